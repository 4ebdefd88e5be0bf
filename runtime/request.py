"""A submitted request as its caller sees it: a handle to wait on, iterate or cancel, and its results."""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from pagelet.models.errors import EngineClosedError, InputError, PageletError
from pagelet.runtime.request_options import RequestOptions
from pagelet.runtime.sampling import SampledToken, SamplerState, SamplingParams

if TYPE_CHECKING:
    from pagelet.runtime.tasks import Generation

STEP_THREAD_NAME = "pagelet-step"
# "stop": an end token, stop token or stop string; "length": max_tokens or the context's end.
FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Of `prompt_tokens`, `cached_tokens` were not computed anew. `drafted_tokens` were verified beside the
    text, and `accepted_tokens` of them are in it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was submitted; None where no token was generated.

    `decode_tokens_per_second` counts all samples, from the first token on; None below two tokens.
    """

    total: float
    time_to_first_token: float | None
    decode_tokens_per_second: float | None


@dataclass(frozen=True)
class Chunk:
    """New text of sample `index`, and the tokens that it took; the last chunk has a `finish_reason`.

    `text` is empty in a last chunk that ends without text. `logprobs` has an entry per token where the
    request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True)
class Choice:
    """One sample. `token_ids` are all generated tokens, the stop token included; `text` is without it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request. `choices` has one entry per sample; the short names are those of the first.

    `dropped_messages` did not fit: they were left out of the prompt, as `on_context_full` allowed.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    dropped_messages: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[SampledToken, ...] | None:
        return self.choices[0].logprobs

    def to_json(self) -> dict[str, Any]:
        """The first sample's fields and those of the whole request; `choices` too where there are several."""
        body = {**asdict(self.choices[0]), "usage": asdict(self.usage), "timings": asdict(self.timings)}
        body["dropped_messages"] = self.dropped_messages
        if len(self.choices) > 1:
            body["choices"] = [asdict(choice) for choice in self.choices]
        return body


# What a request tells its reader: chunks, then None.
Sink = Callable[[Chunk | None], None]


class Request:
    """Handle of a submitted request, for any thread. Iterating gives its chunks, each to one reader.

    Dropping the handle does not cancel: the request runs to its end.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        states: tuple[SamplerState, ...],
        dropped_messages: int = 0,
        on_cancel: "Callable[[tuple[Generation, ...]], None]",
        sink: Sink | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.options = options
        self.states = states  # how each sample is drawn
        self.dropped_messages = dropped_messages
        self.on_progress = options.on_progress
        self.submitted = time.monotonic()
        self.deadline = math.inf if options.timeout is None else self.submitted + options.timeout
        self.first_token: float | None = None
        self.last_token = self.submitted
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        # The samples that run; empty from the end on, so that a handle keeps neither them nor the engine.
        self.samples: tuple[Generation, ...] = ()
        self._on_cancel: Callable[[tuple[Generation, ...]], None] | None = on_cancel
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._sink: Sink = sink or self._chunks.put
        self._done = threading.Event()
        self._completion: Completion | None = None
        self._error: PageletError | None = None
        self._pid = os.getpid()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def done(self) -> bool:
        """Whether it has finished, failed or been cancelled."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Stop generating; what is there already becomes the result, with finish_reason "cancelled"."""
        on_cancel = self._on_cancel
        # In a fork there is nothing to stop, and the step thread's lock may be held for ever.
        if on_cancel is not None and not self.done and not self._forked:
            on_cancel(self.samples)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end.

        Raises:
            TimeoutError: `timeout` seconds went by; the request goes on.
            PageletError: the request failed.
        """
        self._check_may_wait()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request has not finished within {timeout} seconds; it is still running.")
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    def tokens_so_far(self, index: int = 0) -> "tuple[list[int], Generation | None]":
        """Prompt and generated tokens of sample `index`, and the sample itself if it may still run.

        Raises:
            InputError: there is no such sample.
            PageletError: the request failed.
        """
        if not 0 <= index < self.params.n:
            raise InputError(f"sample {index} of a request with n={self.params.n}; they count from 0.")
        if samples := self.samples:
            return list(samples[index].tokens), samples[index]
        return [*self.prompt_ids, *self.result().choices[index].token_ids], None

    def __iter__(self) -> Iterator[Chunk]:
        while (chunk := self.next_chunk()) is not None:
            yield chunk

    def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk; None at the end.

        Raises:
            PageletError: the request failed.
        """
        self._check_may_wait()
        chunk = self._chunks.get()
        if chunk is None:
            self._chunks.put(None)  # for a reader that asks again
            self.raise_error()
        return chunk

    def raise_error(self) -> None:
        """Raise what the request failed with, if it did."""
        if self._error is not None:
            raise self._error

    @property
    def _forked(self) -> bool:
        """Whether this process is a fork of the one that submitted the request."""
        return os.getpid() != self._pid

    def _check_may_wait(self) -> None:
        if self._forked:
            raise EngineClosedError("this request runs in the process that submitted it, not in its fork.")
        if threading.current_thread().name == STEP_THREAD_NAME and not self.done:
            raise InputError(
                "a callback of the engine must not wait for a request: it would wait for itself."
            )

    # What follows is called by the step loop.

    def deliver(self, chunk: Chunk) -> None:
        try:
            self._sink(chunk)
        except RuntimeError:  # the reader's event loop is closed: nobody is there any more
            self.cancel()

    def finish(self, completion: Completion) -> None:
        self._completion = completion
        self._end()

    def fail(self, error: PageletError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self.samples = ()
        self._on_cancel = None
        self.on_progress = None
        self._done.set()
        try:
            self._sink(None)
        except RuntimeError:
            return


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request; closing or dropping it cancels the request."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __next__(self) -> Chunk:
        chunk = self.request.next_chunk()
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        self.request.cancel()

    def __enter__(self) -> "ChunkStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
