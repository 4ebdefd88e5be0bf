"""Engine: a bundle that generates. The public face of the runtime; its steps are in `step_loop`."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType

from pagelet.models.errors import InputError
from pagelet.runtime.backends.base import Backend, Float32Array
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.opening import OnOpenProgress, open_bundle
from pagelet.runtime.prompts import EncodedPrompt, LengthLimits, Prompt, check_prompt, encode_prompt
from pagelet.runtime.request import Chunk, ChunkStream, Completion, OnProgress, Request, Sink
from pagelet.runtime.sampling import Sampler, SamplingParams
from pagelet.runtime.stats import EngineStats
from pagelet.runtime.step_loop import StepLoop
from pagelet.runtime.tasks import Generation, Scoring
from pagelet.runtime.text import TextStream, Tokenizer


class Engine:
    """Generates from one model, for any number of requests and threads at once.

    Every method may be called from any thread. An engine is closed by `close`, the end of its `with`
    block, or when it is no longer referenced.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        """Start a step loop over `backend`, which belongs to the engine from here on."""
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.vocab_size = backend.vocab_size
        self._loop = StepLoop(backend, self.config)
        self._limits = LengthLimits(self._loop.context, backend.layout.num_tokens)
        self._scoring = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        verify: bool = False,
        on_progress: OnOpenProgress | None = None,
    ) -> "Engine":
        """Open a bundle.

        Args:
            verify: hash the weights too, not only the small files.
            on_progress: told (stage, fraction) in this thread; stages are "verify", "tokenizer" and
                "session". If it returns False the opening is cancelled.

        Raises:
            BundleError: the bundle is damaged, incomplete, foreign or newer.
            CapacityError: the KV cache does not fit into memory, or not one block into `kv_memory`.
            BackendError: the engine underneath is missing or refuses the graph.
            CancelledError: `on_progress` returned False.
        """
        config = config or EngineConfig()
        backend, tokenizer = open_bundle(Path(path), config, verify, on_progress)
        return cls(backend, tokenizer, config)

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
    ) -> Request:
        """Queue a request and return at once.

        Args:
            prompt: raw text, a list of messages (they go through the chat template), or token ids.
            priority: higher is served first; equal ones in order of arrival.
            timeout: seconds from now; what is there then becomes the result, with finish_reason "timeout".
            on_progress: told (prompt tokens read, prompt tokens), in the engine's own thread, so it must
                be quick. If it returns False the request is cancelled.

        Raises:
            InputError: an empty prompt, a token id outside the vocabulary, or a parameter out of range.
            PromptTooLongError: the prompt leaves no room in the context.
            CapacityError: the request can never fit into the KV cache, or the queue is full.
            EngineClosedError: the engine is closed, or belongs to the process this one was forked from.
        """
        encoded = self._encode(prompt)
        return self._start(encoded, params, priority, timeout, on_progress)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Completion:
        """Generate and wait for the end; arguments and errors as in `submit`."""
        request = self.submit(prompt, params, priority=priority, timeout=timeout, on_progress=on_progress)
        return _await_result(request)

    def generate_all(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[Completion]:
        """Generate from several prompts at once; results in their order, errors as in `submit`."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, params, priority=priority))
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> ChunkStream:
        """Iterate over text as it comes; closing or dropping the iterator cancels. As in `submit`."""
        return ChunkStream(
            self.submit(prompt, params, priority=priority, timeout=timeout, on_progress=on_progress)
        )

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: the event loop is never blocked; cancelling the task cancels the request."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def sink(chunk: Chunk | None) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        encoded = await asyncio.to_thread(self._encode, prompt)
        request = self._start(encoded, params, priority, timeout, on_progress, sink)
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            request.raise_error()
        finally:
            request.cancel()

    def logits(self, token_ids: Iterable[int]) -> Float32Array:
        """Logits float32 [T, vocab] after each of T tokens, through the same steps as generation.

        Raises:
            InputError: no tokens, or an id outside the vocabulary.
            PromptTooLongError, CapacityError: more than the context, or the KV cache, holds.
        """
        tokens = check_prompt(token_ids, self.vocab_size)
        self._limits.check_scoring(len(tokens))
        self._loop.check_open()
        if self._loop.thread.is_current:
            raise InputError("a callback of the engine must not wait for logits: it would wait for itself.")
        # One at a time: this bounds the rows of logits in a step.
        with self._scoring:
            task = Scoring(tokens, self._loop.new_table(), self._loop.new_rank(), self.vocab_size)
            self._loop.enqueue([task])
            return task.future.result()

    def stats(self) -> EngineStats:
        """Blocks, sequences, tokens and step times at this moment."""
        return self._loop.stats()

    def close(self) -> None:
        """Stop after the current step and free the model; unfinished requests fail. Closing twice is fine.

        Raises:
            InputError: called from a callback of this engine.
        """
        if self._loop.thread.is_current:
            raise InputError("a callback must not close its own engine; cancel the request instead.")
        self._loop.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        self._loop.check_open()
        return encode_prompt(prompt, self.tokenizer, self.vocab_size)

    def _start(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | None,
        priority: int,
        timeout: float | None,
        on_progress: OnProgress | None,
        sink: Sink | None = None,
    ) -> Request:
        params = params or SamplingParams()
        params.check_vocabulary(self.vocab_size)
        _check_options(priority, timeout)
        tokens = prompt.token_ids
        max_length = self._limits.max_length(len(tokens), params.max_tokens)
        request = Request(
            len(tokens), on_cancel=self._loop.cancel, on_progress=on_progress, timeout=timeout, sink=sink
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        end_ids = () if params.ignore_eos else self.tokenizer.eos_token_ids
        request.samples = tuple(
            Generation(
                request,
                index,
                list(tokens),
                self._loop.new_table(),
                self._loop.new_rank(priority),
                sampler=Sampler(params, self.vocab_size, tokens, seed=seed, sample_index=index),
                text=TextStream(self.tokenizer, params.stop, prompt.tail),
                stop_token_ids=frozenset((*params.stop_token_ids, *end_ids)),
                max_length=max_length,
                with_logprobs=params.logprobs is not None,
            )
            for index in range(params.n)
        )
        self._loop.enqueue(request.samples)
        return request


def _await_result(request: Request) -> Completion:
    """The result; a reader that is interrupted (Ctrl-C) takes its request along."""
    try:
        return request.result()
    finally:
        request.cancel()


def _check_options(priority: int, timeout: float | None) -> None:
    if not isinstance(priority, int):
        raise InputError(f"priority is {priority!r}; expected a whole number.")
    if timeout is not None and not (
        isinstance(timeout, int | float) and 0 < timeout <= threading.TIMEOUT_MAX
    ):
        raise InputError(f"timeout is {timeout!r}; expected seconds above 0, or None.")
