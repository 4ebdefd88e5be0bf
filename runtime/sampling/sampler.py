"""Sampler: one sequence's logits to its next token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import BackendError, InputError
from pagelet.runtime.sampling.filters import Filter, FloatArray, active_filters, surviving, top_k
from pagelet.runtime.sampling.noise import exponential, gumbel, row_key, token_bits
from pagelet.runtime.sampling.params import SamplingParams

Mask = NDArray[np.bool_]
# Temporary arrays of this many elements stay in the cache, and in the memory the allocator keeps.
_BLOCK = 16_384
# Models that write float32's lowest number where they mean -inf: scaled, it becomes just that.
_LETS_OVERFLOW = np.errstate(over="ignore")


@dataclass(frozen=True)
class SampledToken:
    """A drawn token.

    Attributes:
        token_id: its row of the vocabulary.
        logprob: natural log of its probability under the model's own logits: before penalties, temperature
            and filters. None unless asked for.
        top_logprobs: the likeliest tokens in that sense with their log-probabilities, likeliest first,
            of equals the lower id first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """Draws the tokens of one sequence.

    The order is: repetition penalty, presence and frequency penalties, logit bias, mask, temperature, top-k,
    top-p, min-p, draw. The draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014): the candidate with the
    highest logit/temperature + noise wins. The noise is a function of (seed, sample index, position, token
    id), so what a seed draws depends on the logits and on nothing beside them.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        sample_index: int = 0,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._seed = seed
        self._sample_index = sample_index
        self._filters = active_filters(params.top_k, params.top_p, params.min_p)
        self._penalizes_seen = params.repetition_penalty != 1.0
        self._penalizes_counts = bool(params.presence_penalty or params.frequency_penalty)
        self._edits_logits = self._penalizes_seen or self._penalizes_counts or bool(params.logit_bias)
        if self._penalizes_seen:
            self._seen = np.zeros(vocab_size, np.bool_)
            prompt = np.asarray(prompt_ids, np.int64)
            self._seen[prompt[prompt < vocab_size]] = True
        if self._penalizes_counts:
            self._counts = np.zeros(vocab_size, np.int32)
        if params.logit_bias:
            params.check_vocabulary(vocab_size)
            self._bias_ids = np.fromiter(params.logit_bias, np.int64)
            self._biases = np.fromiter(params.logit_bias.values(), np.float32)

    def accept(self, token_id: int) -> None:
        """Count a token that is now part of the text; the penalties of later draws see it."""
        if self._penalizes_seen:
            self._seen[token_id] = True
        if self._penalizes_counts:
            self._counts[token_id] += 1

    def sample(self, logits: FloatArray, position: int, mask: Mask | None = None) -> SampledToken:
        """Draw the token of absolute index `position`; changes neither `logits` nor the sampler.

        Args:
            logits: float32 [vocab], of the model.
            position: tokens before this one: prompt and generated.
            mask: bool [vocab], True where a token is allowed; None allows all.

        Raises:
            BackendError: the logits hold NaN or infinity, or nothing but -infinity.
            InputError: the mask leaves no token.
        """
        assert logits.shape == (self._vocab_size,), f"logits {logits.shape}, vocabulary {self._vocab_size}"
        likeliest = _likeliest(logits)
        scores = self._edited(logits) if self._edits_logits else logits
        if mask is not None:
            scores = _masked(scores, mask)
        if self._params.temperature > 0.0:
            token_id = self._draw(scores, position)
        else:
            token_id = likeliest if scores is logits else int(scores.argmax())
        if self._params.logprobs is None:
            return SampledToken(token_id)
        return _with_logprobs(logits, token_id, self._params.logprobs)

    def checked_mask(self, mask: object) -> Mask:
        """Raises InputError if `mask` is not bool [vocab]."""
        if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self._vocab_size,):
            return mask
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise InputError(
            f"the token mask is of type {found}; expected a NumPy array, bool [{self._vocab_size}]."
        )

    def is_decided(self, logits: FloatArray, position: int, mask: Mask | None, noise: float) -> bool:
        """Whether `sample` draws the same token from any logits within `noise` of these.

        Args:
            noise: above 0; by how much a logit may differ. Otherwise as in `sample`.
        """
        scores = self._edited(logits) if self._edits_logits else logits
        if mask is not None:
            scores = _masked(scores, mask)
        # Both the winner and another one may be off; a penalty may enlarge it.
        reach = 2.0 * noise * max(1.0, self._params.repetition_penalty, 1.0 / self._params.repetition_penalty)
        if self._params.temperature > 0.0:
            return self._draw_is_decided(scores, position, reach / self._params.temperature)
        first, second = np.partition(scores, scores.size - 2)[-2:][::-1]
        return bool(first - second > reach)

    @_LETS_OVERFLOW
    def _draw_is_decided(self, scores: FloatArray, position: int, reach: float) -> bool:
        key = row_key(self._seed, self._sample_index, position)
        scaled = scores / np.float32(self._params.temperature)
        totals = scaled + gumbel(key, np.arange(scaled.size, dtype=np.uint32))
        if not self._filters:
            first, second = np.partition(totals, totals.size - 2)[-2:][::-1]
            return bool(first - second > reach)
        ids = surviving(scaled, self._filters)
        winner = int(ids[totals[ids].argmax()])
        # The winner must pass wherever it and the others stand, and beat whoever may pass then.
        lowered = scaled.copy()
        lowered[winner] -= np.float32(reach)
        passes = winner in surviving(lowered, self._filters_within(-reach))
        loose = self._filters_within(reach)  # none is left where top-p's mass may come to all there is
        last = scaled[surviving(scaled, loose)].min() if loose else -np.inf
        rivals = np.setdiff1d(np.flatnonzero(scaled >= last - reach), [winner])
        return passes and bool(totals[winner] - totals[rivals].max(initial=-np.inf) > reach)

    def _filters_within(self, reach: float) -> tuple[Filter, ...]:
        """The filters, looser by what logits that differ by `reach` can do to them; below 0: stricter.

        It multiplies the odds of top-p's mass, and the ratio that min-p bounds, by e^reach at most.
        """
        params, factor = self._params, math.exp(min(max(reach, -50.0), 50.0))
        p = params.top_p * factor / (1.0 - params.top_p + params.top_p * factor)
        return active_filters(params.top_k, p, params.min_p / factor)

    @_LETS_OVERFLOW
    def _edited(self, logits: FloatArray) -> FloatArray:
        """A copy of the logits with the penalties and the biases, in float32 as transformers has them."""
        params = self._params
        scores: FloatArray = logits.copy()
        if self._penalizes_seen:
            ids = np.flatnonzero(self._seen)
            penalty, seen = np.float32(params.repetition_penalty), scores[ids]
            scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if self._penalizes_counts:
            ids = np.flatnonzero(self._counts)
            scores[ids] -= self._counts[ids] * np.float32(params.frequency_penalty)
            scores[ids] -= np.float32(params.presence_penalty)
        if params.logit_bias:
            scores[self._bias_ids] += self._biases
        return scores

    @_LETS_OVERFLOW
    def _draw(self, scores: FloatArray, position: int) -> int:
        key = row_key(self._seed, self._sample_index, position)
        scaled = scores / np.float32(self._params.temperature)
        ids = surviving(scaled, self._filters) if self._filters else _contenders(scaled, key)
        totals = scaled[ids] + gumbel(key, ids.astype(np.uint32))
        return int(ids[totals.argmax()])


def _likeliest(logits: FloatArray) -> int:
    """Index of the highest logit, the lowest of equals."""
    index = int(logits.argmax())  # NumPy's argmax stops at the first NaN, so this looks for one as well
    if not math.isfinite(logits[index]):
        raise BackendError(
            f"The model's logits are not finite: {logits[index]} at token id {index}; expected numbers. "
            "Weights or an op are damaged: run `pagelet verify` on the bundle."
        )
    return index


def _masked(scores: FloatArray, mask: Mask) -> FloatArray:
    allowed: FloatArray = np.where(mask, scores, np.float32(-np.inf))
    if not np.isfinite(allowed.max()):
        raise InputError("the token mask allows no token that the model can produce; expected at least one.")
    return allowed


def _contenders(scores: FloatArray, key: int) -> NDArray[np.intp]:
    """Indices, ascending, of every token that can win the Gumbel-max draw: a cheap exact pre-selection.

    The draw is a race: the lowest arrival time E / weight wins, E ~ Exp(1), weight = exp(score - highest).
    The likeliest token arrives at its E. E is at least x, the uniform number it is made of, so a token with
    x / weight later than that cannot win, which needs no logarithm.
    """
    likeliest = int(scores.argmax())
    arrival = float(exponential(token_bits(key, np.array([likeliest], np.uint32)))[0])
    # Half a percent covers the float32 rounding of both sides; one more candidate costs nothing.
    factor = np.float32(arrival * 2.0**32 * 1.005)
    hits = []
    for start in range(0, scores.size, _BLOCK):
        reach = np.exp(scores[start : start + _BLOCK] - scores[likeliest])
        reach *= factor
        bits = token_bits(key, np.arange(start, start + reach.size, dtype=np.uint32))
        hits.append(np.flatnonzero(bits.astype(np.float32) <= reach) + start)
    return np.concatenate(hits)


def _with_logprobs(logits: FloatArray, token_id: int, alternatives: int) -> SampledToken:
    log_total = _log_sum_exp(logits)
    chosen = float(logits[token_id]) - log_total
    if not alternatives:
        return SampledToken(token_id, chosen, ())
    ids = top_k(logits, alternatives)
    # More may equal the last one: a stable sort of ascending ids puts the lowest ids first.
    ids = ids[np.argsort(-logits[ids], kind="stable")][:alternatives]
    return SampledToken(token_id, chosen, tuple((int(i), float(logits[i]) - log_total) for i in ids))


def _log_sum_exp(logits: FloatArray) -> float:
    highest = float(logits.max())
    blocks = (logits[start : start + _BLOCK] for start in range(0, logits.size, _BLOCK))
    total = sum(float(np.exp(block.astype(np.float64) - highest).sum()) for block in blocks)
    return highest + math.log(total)
