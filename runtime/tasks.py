"""What the step loop works on: sequences that generate text, and sequences whose logits are wanted."""

import math
import time
from abc import abstractmethod
from concurrent.futures import Future

import numpy as np

from pagelet.models.errors import CancelledError, InputError, PageletError
from pagelet.models.text import TextStream
from pagelet.runtime.backends.base import Float32Array
from pagelet.runtime.request import Choice, Chunk, Completion, FinishReason, Request, Timings, Usage
from pagelet.runtime.sampling import Mask, SampledToken, Sampler
from pagelet.runtime.scheduler import Sequence
from pagelet.runtime.sequence_cache import SequenceCache
from pagelet.runtime.speculation.proposal import TokenIndices, follower


class Task(Sequence):
    """A sequence that takes its logits step by step until it has `finished`."""

    # Tokens, prompt included, that it may come to.
    max_length: int

    @property
    @abstractmethod
    def finished(self) -> bool: ...

    @property
    @abstractmethod
    def group(self) -> "tuple[Task, ...]":
        """The unfinished tasks that live and die together, this one included."""

    @property
    def deadline(self) -> float:
        """`time.monotonic()` at which the task is ended."""
        return math.inf

    @abstractmethod
    def advance(self, logits: Float32Array) -> TokenIndices:
        """After a step that read tokens of this sequence: logits float32 [rows, vocab], rows may be 0.

        Returns the indices of the candidates that became text, in its order.
        """

    @abstractmethod
    def end(self, reason: FinishReason) -> None:
        """End the task from outside, with what there is."""

    @abstractmethod
    def fail(self, error: PageletError) -> None:
        """End the task and its group with an error."""


class Generation(Task):
    """One sample of a request: draws a token from the logits, turns it into text, decides when to stop."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokens: list[int],
        cache: SequenceCache,
        rank: tuple[int, int],
        origin: "Sequence | None",
        *,
        sampler: Sampler,
        text: TextStream,
        stop_token_ids: frozenset[int],
        max_length: int,
        with_logprobs: bool,
        row_noise: float,
    ) -> None:
        super().__init__(tokens, cache, rank, origin)
        self.request = request
        self.choice: Choice | None = None
        self._index = index
        self._sampler = sampler
        self._text = text
        self._stop_token_ids = stop_token_ids
        self.max_length = max_length
        self._logprobs: list[SampledToken] | None = [] if with_logprobs else None
        self._delivered = len(tokens)
        self._row_noise = row_noise
        self._undecided = False  # the next step reads the last token without candidates

    @property
    def undecided(self) -> bool:
        """Whether the last step left a token to the next one, which decides it alone."""
        return self._undecided

    @property
    def finished(self) -> bool:
        return self.choice is not None or self.request.done

    @property
    def group(self) -> tuple[Task, ...]:
        return tuple(sample for sample in self.request.samples if not sample.finished)

    @property
    def deadline(self) -> float:
        return self.request.deadline

    @property
    def max_candidates(self) -> int:
        """Most tokens that a proposal may have now: none but for a sequence that generates."""
        if self.num_unread != 1 or self._undecided or not self.request.options.speculate:
            return 0
        return max(0, self.max_length - len(self.tokens) - 1)

    def advance(self, logits: Float32Array) -> TokenIndices:
        """Draw a token from the last one's row, and while it is a candidate, the next from that one's row.

        So the text is what plain decoding draws, whatever was proposed; other candidates' rows are not used.
        """
        if self.request.first_token is None and self._index == 0:
            self._report_progress()
        text, reason = "", None
        accepted: list[int] = []
        row = 0
        while row < len(logits) and reason is None:
            try:
                token_id = self._draw(logits[row])
            except PageletError:  # what comes before it was the reader's in plain decoding
                if text:
                    self._deliver(text)
                raise
            if token_id is None:
                break
            more, reason = self._append(token_id)
            text += more
            candidate = follower(self.proposal, row - 1, token_id)
            if candidate < 0:
                break
            accepted.append(candidate)
            row = candidate + 1
        self.request.drafted_tokens += len(self.proposal)
        self.request.accepted_tokens += len(accepted)
        if reason is not None:
            self._end(text, reason)
        elif text:
            self._deliver(text)
        return accepted

    def guess(self, logits: Float32Array, guessed: list[int]) -> int | None:
        """What a draft's logits float32 [vocab] say comes after `guessed`, drawn as the target's will be.

        The penalties know the text without `guessed`. None where nothing can be drawn.
        """
        try:
            mask = self._mask(guessed)
            return self._sampler.sample(logits, len(self.tokens) + len(guessed), mask).token_id
        except PageletError:  # the target meets the same mask, and a draft's bad logits are not the request's
            return None

    def _draw(self, logits: Float32Array) -> int | None:
        """The next token; None where the target's rows vary and this one, beside candidates, is too close."""
        mask = self._mask([])
        position = len(self.tokens)
        noise = self._row_noise if self.proposal else 0.0
        self._undecided = noise > 0 and not self._sampler.is_decided(logits, position, mask, noise)
        if self._undecided:
            return None
        sampled = self._sampler.sample(logits, position, mask)
        if self._logprobs is not None:
            self._logprobs.append(sampled)
        return sampled.token_id

    def _append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Add a token to the sequence; the text that it completes, and why it ends here, if it does."""
        self._sampler.accept(token_id)
        self.tokens.append(token_id)
        self.request.last_token = time.monotonic()
        if self.request.first_token is None:
            self.request.first_token = self.request.last_token
        is_end = token_id in self._stop_token_ids
        text = "" if is_end else self._text.push(token_id)
        if is_end or self._text.stopped:
            return text, "stop"
        return text, "length" if len(self.tokens) >= self.max_length else None

    def end(self, reason: FinishReason) -> None:
        self._end("", reason)

    def fail(self, error: PageletError) -> None:
        self.request.fail(error)

    def _end(self, text: str, reason: FinishReason) -> None:
        text += self._text.finish()
        generated = tuple(self.tokens[self.request.prompt_tokens :])
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        self.choice = Choice(self._text.text, generated, reason, logprobs)
        self._deliver(text, reason)
        choices = [sample.choice for sample in self.request.samples if sample.choice is not None]
        if len(choices) == len(self.request.samples):
            # The first sample reads the prompt for all.
            cached_tokens = self.request.samples[0].cached_tokens or 0
            self.request.finish(_completion(self.request, tuple(choices), cached_tokens))

    def _deliver(self, text: str, reason: FinishReason | None = None) -> None:
        """Pass on `text` with the tokens since the last chunk."""
        token_ids = tuple(self.tokens[self._delivered :])
        logprobs = None
        if self._logprobs is not None:
            logprobs = tuple(self._logprobs[len(self._logprobs) - len(token_ids) :])
        self._delivered = len(self.tokens)
        self.request.deliver(Chunk(text, token_ids, self._index, reason, logprobs))

    def _mask(self, guessed: list[int]) -> Mask | None:
        """The request's mask for the token after `guessed`, checked."""
        token_mask = self.request.options.token_mask
        if token_mask is None:
            return None
        try:
            mask = token_mask(self.tokens[self.request.prompt_tokens :] + guessed)
        except BaseException as error:  # as with on_progress
            raise InputError(f"the request's token_mask raised {error!r}; the request was ended.") from error
        return None if mask is None else self._sampler.checked_mask(mask)

    def _report_progress(self) -> None:
        if self.request.on_progress is None:
            return
        try:
            goes_on = self.request.on_progress(self.cache.length, self.request.prompt_tokens)
        except BaseException as error:  # sys.exit() too is the caller's, not for the step thread to obey
            raise InputError(f"the request's on_progress raised {error!r}; the request was ended.") from error
        if goes_on is False:
            self.request.cancel()


class Scoring(Task):
    """Collects the logits of every position of a text."""

    # Rows of logits are large (a vocabulary each), so a step asks for few of them.
    max_chunk = 64

    def __init__(
        self, tokens: list[int], cache: SequenceCache, rank: tuple[int, int], vocab_size: int
    ) -> None:
        super().__init__(tokens, cache, rank)
        self.max_length = len(tokens)
        self.future: Future[Float32Array] = Future()
        self._logits: Float32Array = np.empty((len(tokens), vocab_size), np.float32)
        self._num_scored = 0

    @property
    def logits_from(self) -> int:
        return self._num_scored

    @property
    def finished(self) -> bool:
        return self.future.done()

    @property
    def group(self) -> tuple[Task, ...]:
        return (self,)

    def advance(self, logits: Float32Array) -> TokenIndices:
        self._logits[self._num_scored : self._num_scored + len(logits)] = logits
        self._num_scored += len(logits)
        if self._num_scored == len(self.tokens):
            self.future.set_result(self._logits)
        return ()

    def end(self, reason: FinishReason) -> None:
        self.fail(CancelledError(f"scoring was ended early: {reason}."))

    def fail(self, error: PageletError) -> None:
        self.future.set_exception(error)


def _completion(request: Request, choices: tuple[Choice, ...], cached_tokens: int) -> Completion:
    generated = sum(len(choice.token_ids) for choice in choices)
    rate = None
    if request.first_token is not None and request.last_token > request.first_token:
        rate = (generated - len(choices)) / (request.last_token - request.first_token)
    since = request.submitted
    first = None if request.first_token is None else request.first_token - since
    timings = Timings(time.monotonic() - since, first, rate)
    usage = Usage(
        request.prompt_tokens, generated, cached_tokens, request.drafted_tokens, request.accepted_tokens
    )
    return Completion(choices, usage, timings, request.dropped_messages)
