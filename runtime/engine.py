"""Engine: a bundle that generates. The public face of the runtime; its steps are in `step_loop`."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pagelet.models.errors import InputError
from pagelet.models.manifest import Manifest
from pagelet.models.spec import ModelSpec
from pagelet.models.text import Tokenizer
from pagelet.runtime.backends.base import Backend, Float32Array
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.opening import OnOpenProgress, open_bundle
from pagelet.runtime.prompts import LengthLimits, Prompt
from pagelet.runtime.request import Chunk, ChunkStream, Completion, Request
from pagelet.runtime.request_options import OnProgress, Options, RequestOptions, TokenMask
from pagelet.runtime.sampling import SamplingParams
from pagelet.runtime.session import LoadedSession, SaveOptions, SessionInfo, load, save
from pagelet.runtime.speculation.choice import lookups
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.stats import EngineStats
from pagelet.runtime.step_loop import StepLoop
from pagelet.runtime.submission import Submitter
from pagelet.runtime.truncation import OnContextFull

if TYPE_CHECKING:  # in `typing` from Python 3.11 on
    from typing_extensions import Unpack


class Engine:
    """Generates from one model, for any number of requests and threads at once.

    Every method may be called from any thread. An engine is closed by `close`, the end of its `with`
    block, or when it is no longer referenced.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        manifest: Manifest | None = None,
        proposers: Sequence[Proposer] | None = None,
    ) -> None:
        """Start a step loop over `backend`, which belongs to the engine from here on.

        So do `proposers`; None: those that `config.speculate` names and that need no model.
        """
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.manifest = manifest
        self.vocab_size = backend.vocab_size
        self._loop = StepLoop(backend, self.config, lookups(self.config) if proposers is None else proposers)
        context = self._loop.context
        limits = LengthLimits(context, backend.layout.max_tokens(context))
        self._submitter = Submitter(self._loop, tokenizer, self.vocab_size, limits)
        self._scoring = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        verify: bool = False,
        on_progress: OnOpenProgress | None = None,
        proposers: Sequence[Proposer] = (),
    ) -> Engine:
        """Open a bundle.

        Args:
            verify: hash the weights too, not only the small files, and replay the certificate's golden
                prompts where there is one: takes seconds.
            on_progress: told (stage, fraction) in this thread; stages are "verify", "tokenizer",
                "session" and, with a draft, "draft". If it returns False the opening is cancelled.
            proposers: guess ahead beside those that `config.speculate` names.

        Raises:
            BundleError: the bundle is damaged, incomplete, foreign or newer; with `verify`, or it computes
                other numbers here than it should.
            CapacityError: the KV cache does not fit into memory, or not one block into `kv_memory`; with a
                draft, of both models.
            InputError: the draft's tokenizer, vocabulary, context or target is not the bundle's.
            BackendError: the engine underneath is missing or refuses the graph.
            CancelledError: `on_progress` returned False.
        """
        config = config or EngineConfig()
        opened = open_bundle(Path(path), config, verify, on_progress)
        engine = cls(
            opened.backend,
            opened.tokenizer,
            config,
            manifest=opened.manifest,
            proposers=[*opened.proposers, *proposers],
        )
        if config.draft is not None:
            engine._loop.measure_steps()
        return engine

    @property
    def spec(self) -> ModelSpec | None:
        """The model, where the engine was opened from a bundle."""
        return None if self.manifest is None else self.manifest.spec

    @property
    def max_context(self) -> int:
        """Tokens of one sequence, prompt and reply."""
        return self._loop.context

    # Requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        cache_salt: str | None = None,
        prefix_cache: bool = True,
        on_context_full: OnContextFull = "refuse",
        speculate: bool = True,
        token_mask: TokenMask | None = None,
    ) -> Request:
        """Queue a request and return at once.

        Args:
            prompt: raw text, a list of messages (they go through the chat template), or token ids.
            priority, timeout, on_progress, cache_salt, prefix_cache, on_context_full, speculate, token_mask:
                see RequestOptions.

        Raises:
            InputError: an empty prompt, a token id outside the vocabulary, or a parameter out of range.
            PromptTooLongError: the prompt leaves no room in the context.
            CapacityError: the request can never fit into the KV cache or the queue.
            QueueFullError: too much waits at this moment.
            EngineClosedError: the engine is closed, or belongs to the process this one was forked from.
        """
        options = RequestOptions(
            priority,
            timeout,
            on_progress,
            cache_salt,
            prefix_cache,
            on_context_full,
            speculate,
            token_mask,
        )
        return self._submitter.submit(self._submitter.encode(prompt, params, options), params, options)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Generate and wait for the end; arguments and errors as in `submit`."""
        return self.generate_all([prompt], params, **options)[0]

    def generate_all(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> list[Completion]:
        """Generate from several prompts at once; results in their order, otherwise as in `submit`."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, params, **options))
            return [request.result() for request in requests]
        finally:  # a reader that is interrupted (Ctrl-C) takes its requests along
            for request in requests:
                request.cancel()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> ChunkStream:
        """Iterate over text as it comes; closing or dropping the iterator cancels. As in `submit`."""
        return ChunkStream(self.submit(prompt, params, **options))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: the event loop is never blocked; cancelling the task cancels the request."""
        import asyncio  # a tenth of the start-up time, and whoever iterates here has it already

        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def sink(chunk: Chunk | None) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        checked = RequestOptions(**options)
        encoded = await asyncio.to_thread(self._submitter.encode, prompt, params, checked)
        request = self._submitter.submit(encoded, params, checked, sink=sink)
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            request.raise_error()
        finally:
            request.cancel()

    def fork(
        self,
        request: Request,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Request:
        """Continue from what a request has so far, as a request of its own; the other one goes on unchanged.

        Its prompt is the prompt of `request` and all that sample `sample` has generated when this is called
        (a stop token too), and penalties treat it so. It shares the blocks of a request that still runs, and
        finds those of a finished one in the prefix cache, under the same salt; nothing else differs from a
        new request with these tokens.

        Args:
            params: None: those of `request` with a new seed, or the samples would say the same again.
            priority: None: that of `request`.

        Raises:
            InputError: no such sample, or a request of another engine.
            PageletError: `request` failed, or as in `submit`.
        """
        options = replace(
            request.options,
            priority=request.options.priority if priority is None else priority,
            timeout=timeout,
            on_progress=on_progress,
        )
        return self._submitter.fork(request, params or replace(request.params, seed=None), options, sample)

    def save_session(
        self,
        path: str | Path,
        request_or_tokens: Request | Iterable[int],
        *,
        sample: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """Write a sequence to a file: tokens, sampler state, and its full blocks that are in the cache.

        Args:
            request_or_tokens: sample `sample` of a request, with all that it has generated so far, or tokens.
            cache_salt: under which the tokens were read; a request knows its own.
            metadata: JSON of the caller's own, given back by `load_session`.

        Raises:
            InputError: no such sample, no tokens, or the file cannot be written; an older one is still there.
            PageletError: the request failed, or the engine is closed.
        """
        options = SaveOptions(sample, cache_salt, metadata)
        return save(self._loop, Path(path), request_or_tokens, self.vocab_size, options)

    def load_session(self, path: str | Path, *, cache_salt: str | None = None) -> LoadedSession:
        """Read a session file and put its blocks into the prefix cache, where requests find them.

        Blocks without room are dropped, from the end. A checksum finds damage, not malice: blocks that
        somebody made up would answer whoever asks with these tokens and this salt, so load a stranger's file
        under a salt of its own.

        Raises:
            SessionError: damaged, or of another version, model, cache type or block size.
            InputError: the file cannot be read.
        """
        return load(self._loop, Path(path), self.vocab_size, cache_salt=cache_salt)

    def resume(
        self, session: LoadedSession, *, max_tokens: int | None = None, **options: Unpack[Options]
    ) -> Request:
        """Go on with a saved request as if it had never stopped: greedy or sampled, the same tokens follow.

        Args:
            max_tokens: new tokens; None: those that the saved request had left.

        Raises:
            InputError: tokens were saved, not a request; or it has none left. Otherwise as in `submit`.
        """
        if session.sampler is None:
            raise InputError("the session has tokens only; pass its token_ids to generate or submit.")
        checked = RequestOptions(**options)
        return self._submitter.resume(session.token_ids, session.sampler, max_tokens, checked)

    def logits(self, token_ids: Iterable[int]) -> Float32Array:
        """Logits float32 [T, vocab] after each of T tokens, through the same steps as generation.

        Raises:
            InputError: no tokens, or an id outside the vocabulary.
            PromptTooLongError, CapacityError: more than the context, or the KV cache, holds.
        """
        if self._loop.thread.is_current:
            raise InputError("a callback of the engine must not wait for logits: it would wait for itself.")
        self._loop.check_open()  # in a fork the lock may be held for ever
        # One at a time: this bounds the rows of logits in a step.
        with self._scoring:
            return self._submitter.score(token_ids)

    def stats(self) -> EngineStats:
        """Blocks, sequences, tokens and step times at this moment."""
        return self._loop.stats()

    def check_integrity(self) -> None:
        """Check, between two steps, that every block of the cache is free, cached or used, and counted right.

        Raises:
            AssertionError: says what is wrong; a bug of this library.
            EngineClosedError: the engine is closed.
        """
        self._loop.check_integrity()

    def close(self) -> None:
        """Stop after the current step and free the model; unfinished requests fail. Closing twice is fine.

        Raises:
            InputError: called from a callback of this engine.
        """
        if self._loop.thread.is_current:
            raise InputError("a callback must not close its own engine; cancel the request instead.")
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
