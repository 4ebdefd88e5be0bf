"""Token masks and backends whose rows vary, under speculation: the text is plain decoding's all the same."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scripted import Guess, ScriptedProposer, half_right, recorded

from pagelet.models.errors import InputError
from pagelet.runtime import Engine, SamplingParams
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.request import Request
from pagelet.runtime.request_options import TokenMask
from pagelet.runtime.sampling import Sampler

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
MakeSpeculating = Callable[..., tuple[Engine, ScriptedProposer]]
VOCAB = 258
PROMPT = np.random.default_rng(2).integers(2, VOCAB, 11).tolist()


def params(max_tokens: int = 24, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def by_position(generated: Sequence[int]) -> NDArray[np.bool_] | None:
    """Of each three places the first is free, the others have a third of the vocabulary each."""
    place = len(generated) % 3
    return None if not place else np.arange(VOCAB) % 3 == place


@pytest.mark.parametrize("asked", [
    params(),
    params(temperature=0.9, seed=8, top_p=0.9),
    params(repetition_penalty=1.4, n=2, temperature=1.0, seed=1, logprobs=2),
], ids=["greedy", "sampled", "samples"])  # fmt: skip
def test_a_mask_that_changes_with_the_position(
    make_engine: MakeEngine, make_speculating: MakeSpeculating, asked: SamplingParams
) -> None:
    plain, _ = make_engine(speculate="off")
    expected = plain.generate(PROMPT, asked, token_mask=by_position)
    for choice in expected.choices:
        assert all(token % 3 == i % 3 for i, token in enumerate(choice.token_ids) if i % 3)
    texts = [[*PROMPT, *choice.token_ids] for choice in expected.choices]
    free = plain.generate(PROMPT, asked)
    unmasked = [[*PROMPT, *choice.token_ids] for choice in free.choices]
    assert free.token_ids != expected.token_ids
    for guess in (recorded(texts), half_right(recorded(texts)), recorded(unmasked)):
        engine, proposer = make_speculating(guess, num_draft_tokens=7)
        done = engine.generate(PROMPT, asked, token_mask=by_position)
        assert done.choices == expected.choices
        assert proposer.observed
        engine.check_integrity()
    assert sum(accepted for _, accepted in proposer.observed) < 24, "the unmasked text is not this one"


def test_a_mask_is_asked_once_for_each_token_in_its_order(make_speculating: MakeSpeculating) -> None:
    texts: list[list[int]] = []

    def mask(generated: Sequence[int]) -> None:
        texts.append(list(generated))

    engine, _ = make_speculating(lambda tokens, limit: [5] * limit, {"script": [5] * 100})
    done = engine.generate(PROMPT, params(20), token_mask=mask)
    assert done.usage.accepted_tokens > 10
    assert texts == [[5] * length for length in range(20)]


def raising(generated: Sequence[int]) -> None:
    if len(generated) == 7:
        raise RuntimeError("no such state")


def at_seven(mask: object) -> TokenMask:
    return lambda generated: mask if len(generated) == 7 else None  # type: ignore[return-value]


@pytest.mark.parametrize(("mask", "message"), [
    (raising, r"token_mask raised RuntimeError\('no such state'\)"),
    (at_seven(np.ones(VOCAB - 1, np.bool_)), r"mask is of type bool \[257\]; expected .* bool \[258\]"),
    (at_seven(np.ones(VOCAB, np.uint8)), r"the token mask is of type uint8 \[258\]"),
    (at_seven([True] * VOCAB), "the token mask is of type list"),
    (at_seven(np.zeros(VOCAB, np.bool_)), "the token mask allows no token"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_is_none_ends_its_request_alone(
    make_engine: MakeEngine,
    make_speculating: MakeSpeculating,
    mask: TokenMask,
    message: str,
    temperature: float,
) -> None:
    asked = params(temperature=temperature, seed=2)
    plain, _ = make_engine(speculate="off")
    expected = plain.generate(PROMPT, asked)
    refused = plain.submit(PROMPT, asked, token_mask=mask)
    with pytest.raises(InputError, match=message):
        refused.result()
    engine, _ = make_speculating(recorded([[*PROMPT, *expected.token_ids]]), num_draft_tokens=5)
    beside = engine.submit(PROMPT, asked)
    request = engine.submit(PROMPT, asked, token_mask=mask)
    with pytest.raises(InputError, match=message):
        request.result()
    assert _text_before_error(request) == _text_before_error(refused) != ""
    assert beside.result().choices == expected.choices
    assert engine.generate(PROMPT, asked).choices == expected.choices
    engine.check_integrity()
    assert engine.stats().failed_steps == 0


def _text_before_error(request: Request) -> str:
    """Text of the chunks that came before the request failed."""
    text = ""
    with pytest.raises(InputError):
        for chunk in request:
            text += chunk.text
    return text


class NoisyBackend(FakeBackend):
    """A row's logits depend, within `row_noise`, on how many rows its sequence has in the step."""

    def __init__(self, noise: float) -> None:
        super().__init__(vocab_size=VOCAB, max_context=256, num_blocks=200)
        self.row_noise = noise

    def _run(self, batch: StepBatch) -> NDArray[np.float32]:
        logits = super()._run(batch)
        counts = np.diff(batch.cumulative_sequence_length)
        for row, place in zip(logits, batch.logits_indices, strict=True):
            sequence = int(np.searchsorted(batch.cumulative_sequence_length, place, side="right")) - 1
            if counts[sequence] > 1:
                rng = np.random.default_rng([int(counts[sequence]), int(batch.position_ids[place])])
                # Each logit goes as far as it may: up or down.
                row += np.float32(self.row_noise) * rng.choice(np.array([-1, 1], np.float32), VOCAB)
        return logits


@pytest.mark.parametrize("asked", [
    params(80),
    params(80, temperature=0.8, seed=3),
    params(80, temperature=1.0, seed=4, top_k=12),
    params(80, temperature=0.7, seed=5, top_p=0.8),
    params(80, temperature=1.0, seed=6, min_p=0.05),
    params(80, temperature=0.9, seed=7, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    params(80, repetition_penalty=0.7, frequency_penalty=0.3),
    params(80, repetition_penalty=1.8, logit_bias={3: 2.0}),
], ids=["greedy", "sampled", "top_k", "top_p", "min_p", "all", "rewarded", "penalized"])  # fmt: skip
@pytest.mark.parametrize("noise", [0.002, 0.02, 0.2])
def test_rows_that_vary_do_not_change_the_text(
    make_speculating: MakeSpeculating, asked: SamplingParams, noise: float
) -> None:
    plain, _ = make_speculating(lambda tokens, limit: [], NoisyBackend(noise), prefix_cache=False)
    expected = plain.generate(PROMPT, asked)
    text: Guess = recorded([[*PROMPT, *expected.token_ids]])
    for guess in (text, half_right(text)):
        engine, _ = make_speculating(guess, NoisyBackend(noise), num_draft_tokens=6, prefix_cache=False)
        done = engine.generate(PROMPT, asked)
        assert done.token_ids == expected.token_ids
        stats = engine.stats()
        if noise > 0.01:
            assert stats.reruns > 0
        if noise < 0.1:
            assert stats.accepted_tokens > 0
        engine.check_integrity()


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.01, 0.3, 2.0, 8.0]),
    noise=st.sampled_from([1e-4, 1e-2, 0.3]),
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 31, 32]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    penalty=st.sampled_from([1.0, 0.6, 1.7]),
)
def test_what_is_decided_is_drawn_from_all_logits_nearby(
    seed: int,
    spread: float,
    noise: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    rng = np.random.default_rng(seed)
    asked = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    prompt = rng.integers(0, 32, 5).tolist()
    sampler = Sampler(asked, 32, prompt, seed=seed)
    logits = rng.normal(0, spread, 32).astype(np.float32)
    mask = rng.random(32) < 0.8 if seed % 2 else None
    if mask is not None:
        mask[0] = True
    if not sampler.is_decided(logits, 9, mask, noise):
        return
    drawn = sampler.sample(logits, 9, mask).token_id
    for _ in range(20):
        # A hair less than the noise: float32 rounds the sum.
        near = logits + (rng.choice([-1, 0, 1], 32) * noise * 0.99).astype(np.float32)
        assert sampler.sample(near, 9, mask).token_id == drawn


@pytest.mark.parametrize(("noise", "ratio", "first"), [(0.1, 0.8, 0.03), (0.02, 0.95, 0.004)])
def test_noise_moves_top_ps_edge_by_more_than_one_token(noise: float, ratio: float, first: float) -> None:
    """Where probabilities fall steeply at the edge, a little mass decides over several tokens."""
    tail = first * ratio ** np.arange(12)
    rest = 0.5 - tail.sum()
    small = np.full(int(rest / (tail[-1] * 0.9)) + 1, 1.0)
    probabilities = np.concatenate([[0.5], tail, rest * small / small.sum()])
    logits = np.log(probabilities).astype(np.float32)
    direction = np.where(np.arange(len(logits)), -0.99, 0.99).astype(np.float32) * np.float32(noise)
    num_decided = 0
    for seed in range(600):
        asked = SamplingParams(temperature=1.0, top_p=0.5 + float(tail.sum()) * (0.2 + 0.6 * seed / 600))
        sampler = Sampler(asked, len(logits), [1], seed=seed)
        if sampler.is_decided(logits, 5, None, noise):
            num_decided += 1
            for near in (logits + direction, logits - direction):
                assert sampler.sample(near, 5).token_id == sampler.sample(logits, 5).token_id
    assert num_decided > 300


def test_a_token_that_alone_passes_is_decided() -> None:
    logits = np.zeros(32, np.float32)
    logits[7] = 9.0
    for filters in ({"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.5}):
        sampler = Sampler(SamplingParams(temperature=1.0, **filters), 32, [1], seed=1)  # type: ignore[arg-type]
        assert sampler.is_decided(logits, 5, None, 0.01)
