"""SamplerState: what the draws of one sample depend on beside logits and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagelet.models.errors import InputError
from pagelet.runtime.sampling.params import SamplingParams
from pagelet.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class SamplerState:
    """Enough to go on drawing the same tokens: the noise is a function of the position, so none is kept.

    Attributes:
        params: as requested; `max_tokens` counts from `prompt_tokens` on.
        seed: of the noise, 0 to 2**64 - 1.
        sample_index: which of the request's samples.
        prompt_tokens: tokens before the first generated one; the penalties treat the two differently.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_tokens: int

    def sampler(self, tokens: Sequence[int], vocab_size: int) -> Sampler:
        """A sampler that has accepted what `tokens`, prompt and generated ones, holds."""
        sampler = Sampler(
            self.params,
            vocab_size,
            tokens[: self.prompt_tokens],
            seed=self.seed,
            sample_index=self.sample_index,
        )
        for token in tokens[self.prompt_tokens :]:
            sampler.accept(token)
        return sampler

    def resumed(self, num_tokens: int, max_tokens: int | None) -> "tuple[SamplerState, SamplingParams]":
        """The state that goes on after `num_tokens`, and the parameters of the one sample that does.

        `max_tokens` are new ones; None: as many as the first request had left.

        Raises:
            InputError: it had none left.
        """
        done = num_tokens - self.prompt_tokens
        if max_tokens is None and self.params.max_tokens is not None:
            max_tokens = self.params.max_tokens - done
            if max_tokens <= 0:
                raise InputError(
                    f"the saved request has generated all of its {self.params.max_tokens} tokens; "
                    "pass max_tokens to go on."
                )
        rest = replace(self.params, n=1, seed=self.seed, max_tokens=max_tokens)
        limit = None if max_tokens is None else done + max_tokens
        return replace(self, params=replace(self.params, max_tokens=limit)), rest
