"""From a prompt and its parameters to what the step loop works on: samples, and texts to score."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pagelet.models.errors import InputError
from pagelet.models.text import TextStream, Tokenizer
from pagelet.runtime.backends.base import Float32Array
from pagelet.runtime.prompts import (
    EncodedPrompt,
    LengthLimits,
    Prompt,
    as_continued,
    check_prompt,
    encode_prompt,
)
from pagelet.runtime.request import Request, Sink
from pagelet.runtime.request_options import RequestOptions
from pagelet.runtime.sampling import SamplerState, SamplingParams
from pagelet.runtime.step_loop import StepLoop
from pagelet.runtime.tasks import Generation, Scoring
from pagelet.runtime.truncation import encode_truncated


@dataclass(frozen=True)
class Submitter:
    """Checks requests against what the engine can ever serve, and queues them."""

    loop: StepLoop
    tokenizer: Tokenizer
    vocab_size: int
    limits: LengthLimits

    def encode(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> EncodedPrompt:
        """Token ids of a prompt. Errors as in `Engine.submit`."""
        self.loop.check_open()
        if options.on_context_full == "truncate":
            max_tokens = None if params is None else params.max_tokens
            return encode_truncated(prompt, self.tokenizer, self.vocab_size, self.limits, max_tokens)
        return encode_prompt(prompt, self.tokenizer, self.vocab_size)

    def submit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        origin: Generation | None = None,
        sink: Sink | None = None,
    ) -> Request:
        """Queue a request; `origin` is a sample that it goes on from. Errors as in `Engine.submit`."""
        params = params or SamplingParams()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        states = (SamplerState(params, seed, index, len(prompt.token_ids)) for index in range(params.n))
        return self._submit(prompt, params, options, tuple(states), origin, sink)

    def fork(
        self, request: Request, params: SamplingParams | None, options: RequestOptions, sample: int
    ) -> Request:
        """Continue a request as another one. Errors as in `Engine.fork`."""
        self.loop.check_open()
        so_far, origin = request.tokens_so_far(sample)
        tokens = check_prompt(so_far, self.vocab_size)
        if origin is not None and not self.loop.blocks.owns(origin.cache):
            raise InputError("the request runs in another engine; fork it there.")
        return self.submit(as_continued(tokens), params, options, origin=origin)

    def resume(
        self, token_ids: list[int], state: SamplerState, max_tokens: int | None, options: RequestOptions
    ) -> Request:
        """Go on drawing as `state` says. Errors as in `Engine.resume`."""
        tokens = check_prompt(token_ids, self.vocab_size)
        state, params = state.resumed(len(tokens), max_tokens)
        return self._submit(as_continued(tokens), params, options, (state,), None, None)

    def score(self, token_ids: Iterable[int]) -> Float32Array:
        """Queue a text and wait for its logits. Errors as in `Engine.logits`."""
        tokens = check_prompt(token_ids, self.vocab_size)
        self.limits.check_scoring(len(tokens))
        # Every row is wanted, so nothing can come from the cache.
        cache = self.loop.blocks.new_cache(prefix_cache=False)
        task = Scoring(tokens, cache, self.loop.new_rank(), self.vocab_size)
        try:
            self.loop.enqueue([task])
            return task.future.result()
        except BaseException:  # a caller that is interrupted (Ctrl-C) takes its task along
            self.loop.cancel([task])
            raise

    def _submit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        options: RequestOptions,
        states: tuple[SamplerState, ...],
        origin: Generation | None,
        sink: Sink | None,
    ) -> Request:
        params.check_vocabulary(self.vocab_size)
        max_length = self.limits.max_length(len(prompt.token_ids), params.max_tokens)
        self.loop.check_bounds(params.n, params.n * max_length)
        request = Request(
            prompt.token_ids,
            params,
            options,
            states=states,
            dropped_messages=prompt.dropped_messages,
            on_cancel=self.loop.cancel,
            sink=sink,
        )
        samples: list[Generation] = []
        for index in range(params.n):
            # The first sample reads the prompt; the others begin with its blocks.
            first = samples[0] if samples else origin
            samples.append(self._sample(request, index, prompt, first, max_length))
        request.samples = tuple(samples)
        self.loop.enqueue(request.samples)
        return request

    def _sample(
        self,
        request: Request,
        index: int,
        prompt: EncodedPrompt,
        origin: Generation | None,
        max_length: int,
    ) -> Generation:
        params, options = request.params, request.options
        end_ids = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return Generation(
            request,
            index,
            list(prompt.token_ids),
            self.loop.blocks.new_cache(salt=options.cache_salt, prefix_cache=options.prefix_cache),
            self.loop.new_rank(options.priority),
            origin,
            sampler=request.states[index].sampler(prompt.token_ids, self.vocab_size),
            text=TextStream(self.tokenizer, params.stop, prompt.tail),
            stop_token_ids=frozenset((*params.stop_token_ids, *end_ids)),
            max_length=max_length,
            with_logprobs=params.logprobs is not None,
            row_noise=self.loop.backend.row_noise,
        )
