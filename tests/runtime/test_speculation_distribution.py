"""Speculation draws from the target's distribution: many continuations against what the logits say.

60,000 of them, or with PAGELET_FULL_EXACTNESS=1 200,000, which takes a minute or two.
"""

import math
import os
import random
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagelet.models.text import TextStream, Tokenizer
from pagelet.runtime.backends.base import Float32Array
from pagelet.runtime.request import Request
from pagelet.runtime.request_options import RequestOptions
from pagelet.runtime.sampling import Sampler, SamplingParams
from pagelet.runtime.sequence_cache import SequenceCache
from pagelet.runtime.speculation.proposal import Candidate
from pagelet.runtime.tasks import Generation

VOCAB = 16
# Continuations of two tokens, drawn one after the other: each begins as if nothing stood before it.
LENGTH, NUM_PER_REQUEST = 2, 200
PROMPT = [3, 5]
UNIT = 50_000 if os.environ.get("PAGELET_FULL_EXACTNESS") == "1" else 15_000
MAX_CANDIDATES = 2
_RNG = np.random.default_rng(12)
# The target's logits for the first and, by the first, for the second token; then those of somebody who
# knows them roughly.
TARGET = [_RNG.uniform(-2, 2, (VOCAB,) * (i + 1)).astype(np.float32) for i in range(LENGTH)]
ROUGHLY = [table + _RNG.normal(0, 0.7, table.shape).astype(np.float32) for table in TARGET]
# Their cumulative probabilities, as lists: an array of 16 numbers costs more than it saves.
ROUGH_SUMS = [np.cumsum(np.exp(t) / np.exp(t).sum(-1, keepdims=True), -1).tolist() for t in ROUGHLY]
Counts = NDArray[np.int64]


def by_position(generated: Sequence[int]) -> NDArray[np.bool_] | None:
    """Nothing is forbidden to a first token, every third to a second one."""
    return np.arange(VOCAB) % 3 != 1 if len(generated) % LENGTH else None


CASES: dict[str, tuple[dict[str, Any], RequestOptions]] = {
    "temperature 1": ({"temperature": 1.0}, RequestOptions()),
    "top_p": ({"temperature": 0.9, "top_p": 0.8}, RequestOptions()),
    "mask": ({"temperature": 1.0}, RequestOptions(token_mask=by_position)),
}


class LenientGeneration(Generation):
    """Takes a candidate for drawn where it is merely among the four likeliest: what must be found out."""

    def _draw(self, logits: Float32Array) -> int | None:
        place = len(self.tokens) - self.cache.length - 1
        if place < len(self.proposal):
            candidate = self.proposal[place].token
            if candidate in np.argsort(logits)[-4:]:
                return candidate
        return super()._draw(logits)


class Continuations:
    """Draws continuations of nothing, as the step loop does: a step's logits, then `Generation.advance`."""

    def __init__(self, tokenizer: Tokenizer, case: str, kind: type[Generation] = Generation) -> None:
        settings, self._options = CASES[case]
        self._params = SamplingParams(max_tokens=LENGTH * NUM_PER_REQUEST, ignore_eos=True, **settings)
        self._tokenizer = tokenizer
        self._kind = kind
        self._rng = random.Random(9)
        self.drafted = self.accepted = 0

    def count(self, seeds: range, proposals: str) -> Counts:
        """How often each continuation is drawn: int64 [vocab, vocab]."""
        counts = np.zeros((VOCAB,) * LENGTH, np.int64)
        for seed in seeds:
            np.add.at(counts, tuple(np.reshape(self.draw(seed, proposals), (-1, LENGTH)).T), 1)
        return counts

    def draw(self, seed: int, proposals: str) -> list[int]:
        """Proposals are "none", of what is drawn "alike" (as a draft does), or "independent" of the draw."""
        task = self._generation(seed)
        while task.choice is None:
            task.cache.length = len(task.tokens) - 1
            text = task.tokens[len(PROMPT) :]
            first = len(text)
            if proposals != "none":
                for _ in range(min(task.max_candidates, MAX_CANDIDATES)):
                    text.append(self._guess(task, text, first, proposals == "alike"))
            task.proposal = [Candidate(token, i - 1, 0.5) for i, token in enumerate(text[first:])]
            self.drafted += len(task.proposal)
            rows = [_logits(TARGET, text[:place]) for place in range(first, len(text) + 1)]
            self.accepted += len(task.advance(np.array(rows)))
        return list(task.choice.token_ids)

    def _guess(self, task: Generation, text: list[int], first: int, alike: bool) -> int:
        if alike:
            token = task.guess(_logits(ROUGHLY, text), text[first:])
            assert token is not None
            return token
        sums = ROUGH_SUMS[1][text[-1]] if len(text) % LENGTH else ROUGH_SUMS[0]
        return min(bisect(sums, self._rng.random()), VOCAB - 1)

    def _generation(self, seed: int) -> Generation:
        request = Request(PROMPT, self._params, self._options, states=(), on_cancel=_ignore, sink=_ignore)
        task = self._kind(
            request,
            0,
            list(PROMPT),
            SequenceCache((), 4, keys=None, on_copy=_ignore),
            (0, 0),
            None,
            sampler=Sampler(self._params, VOCAB, PROMPT, seed=seed),
            text=TextStream(self._tokenizer),
            stop_token_ids=frozenset(),
            max_length=len(PROMPT) + LENGTH * NUM_PER_REQUEST,
            with_logprobs=False,
            row_noise=0.0,
        )
        request.samples = (task,)
        return task


def _logits(tables: list[Float32Array], text: list[int]) -> Float32Array:
    """Of the token after `text`, float32 [vocab]."""
    place = len(text) % LENGTH
    logits: Float32Array = tables[place][tuple(text[len(text) - place :])]
    return logits


def _ignore(*_: object) -> None:
    return


def exact(case: str) -> NDArray[np.float64]:
    """Probabilities of all continuations, float64 [vocab, vocab], from the logits."""
    settings, options = CASES[case]
    joint = np.ones((VOCAB,) * LENGTH)
    for place, table in enumerate(TARGET):
        scores = table.astype(np.float64) / settings["temperature"]
        mask = options.token_mask and options.token_mask([0] * place)
        weights = np.exp(scores) * (1 if mask is None else mask)
        weights /= weights.sum(-1, keepdims=True)
        order = np.argsort(-weights, axis=-1)
        ranked = np.take_along_axis(weights, order, -1)
        # Kept are those whose likelier ones have less than top_p together.
        ranked *= np.cumsum(ranked, -1) - ranked < settings.get("top_p", 1.0)
        np.put_along_axis(weights, order, ranked, -1)
        weights /= weights.sum(-1, keepdims=True)
        joint *= weights.reshape(weights.shape + (1,) * (LENGTH - 1 - place))
    return joint


def p_value(counts: Counts, probabilities: NDArray[np.float64]) -> float:
    """Of Pearson's chi-square test, cells with fewer than 5 expected pooled into one.

    By the approximation of Wilson and Hilferty (1931): for the more than 20 degrees of freedom here its
    error at 1e-4 is some percent, far from what would decide.
    """
    assert not counts[probabilities == 0].any(), "a continuation that cannot be"
    expected = counts.sum() * probabilities.ravel()
    small = expected < 5
    found = np.append(counts.ravel()[~small], counts.ravel()[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    freedom = len(found) - 1
    assert freedom > 20
    part = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1.0 - part)) / math.sqrt(part)
    return math.erfc(z / math.sqrt(2.0)) / 2.0


@pytest.mark.parametrize(("case", "number"), [("temperature 1", 2 * UNIT), ("top_p", UNIT), ("mask", UNIT)])
def test_the_distribution_is_the_targets(tokenizer: Tokenizer, case: str, number: int) -> None:
    probabilities = exact(case)
    assert probabilities.sum() == pytest.approx(1.0, rel=1e-12)
    continuations = Continuations(tokenizer, case)
    num_requests = number // NUM_PER_REQUEST
    counts = continuations.count(range(num_requests // 10), "alike")
    assert p_value(counts, probabilities) >= 1e-4
    plain = continuations.count(range(num_requests // 10), "none")
    assert (plain == counts).all(), "without proposals the draws are others"
    counts += continuations.count(range(num_requests // 10, num_requests), "independent")
    assert counts.sum() == number
    assert p_value(counts, probabilities) >= 1e-4
    assert continuations.accepted > number // 10


@pytest.mark.parametrize("case", CASES)
def test_each_seed_draws_what_it_draws_without(tokenizer: Tokenizer, case: str) -> None:
    continuations = Continuations(tokenizer, case)
    for seed in range(3):
        plain = continuations.draw(seed, "none")
        assert continuations.draw(seed, "alike") == continuations.draw(seed, "independent") == plain


def test_a_lenient_rule_is_found_out(tokenizer: Tokenizer) -> None:
    lenient = Continuations(tokenizer, "temperature 1", LenientGeneration)
    counts = lenient.count(range(50), "independent")
    assert lenient.accepted > lenient.drafted // 2
    assert p_value(counts, exact("temperature 1")) < 1e-4
