"""The sampler against transformers' processors, softmax itself, and its own promises."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import RepetitionPenaltyLogitsProcessor

from pagelet.models.errors import BackendError, InputError
from pagelet.runtime.sampling import Sampler, SamplingParams
from pagelet.runtime.sampling.noise import gumbel, row_key

Logits = NDArray[np.float32]


def random_logits(size: int, seed: int = 0, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def sampler(vocab_size: int, prompt: list[int] | None = None, *, seed: int = 1, **params: Any) -> Sampler:
    return Sampler(SamplingParams.from_dict(params), vocab_size, prompt or [], seed=seed)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.array([0, 5, 1, 5], np.float32)
    assert sampler(4).sample(logits, 0).token_id == 1
    assert sampler(4, top_k=1, top_p=0.1).sample(logits, 0).token_id == 1
    mask = np.array([True, False, True, True])
    assert sampler(4).sample(logits, 0, mask).token_id == 3


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(params: dict[str, Any]) -> None:
    """Chi-square of 4,000 seeded draws; at 5 standard deviations of the statistic."""
    logits, draws, temperature = random_logits(12, 1, 1.0), 4_000, 0.7
    drawn = sampler(12, temperature=temperature, **params)
    counts = np.bincount([drawn.sample(logits, i).token_id for i in range(draws)], minlength=12)
    weights = np.exp(logits / temperature)
    weights[counts == 0] = 0  # what the filters leave is test_sampling_filters' subject
    expected = draws * weights / weights.sum()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert freedom >= 4
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 5.0), st.sampled_from([0.0, 0.1, 3.0, 30.0]))
def test_the_pre_selected_race_is_the_plain_gumbel_max(seed: int, temperature: float, spread: float) -> None:
    logits = random_logits(40_000, seed, spread)
    scaled = logits / np.float32(temperature)
    everything = scaled + gumbel(row_key(seed, 0, 9), np.arange(logits.size, dtype=np.uint32))
    drawn = sampler(logits.size, seed=seed, temperature=temperature).sample(logits, 9)
    assert drawn.token_id == int(everything.argmax())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sets(st.integers(0, 99), min_size=1))
def test_a_mask_does_not_change_the_noise_of_what_it_allows(seed: int, allowed: set[int]) -> None:
    """A draw that the mask would allow is the draw under the mask: so a seed survives constraints."""
    logits, drawn = random_logits(100, seed), sampler(100, seed=seed, temperature=1.0)
    free = drawn.sample(logits, 3).token_id
    mask = np.zeros(100, np.bool_)
    mask[[*allowed]] = True
    assert drawn.sample(logits, 3, mask).token_id in allowed
    mask[free] = True
    assert drawn.sample(logits, 3, mask).token_id == free


def test_sampling_changes_neither_the_sampler_nor_the_logits() -> None:
    params = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 1.0, "logit_bias": {3: 5.0}}
    logits = random_logits(50)
    before, drawn = logits.copy(), sampler(50, [1, 2], **params)
    first = [drawn.sample(logits, position) for position in range(20)]
    assert [drawn.sample(logits, position) for position in reversed(range(20))] == first[::-1]
    assert np.array_equal(logits, before)


def test_seeds_and_sample_indices_draw_differently() -> None:
    logits, params = np.zeros(1000, np.float32), SamplingParams(temperature=1.0)
    samplers = [
        Sampler(params, 1000, [], seed=seed, sample_index=index) for seed in range(5) for index in range(5)
    ]
    texts = {tuple(drawn.sample(logits, i).token_id for i in range(8)) for drawn in samplers}
    assert len(texts) == 25


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 59), min_size=1, max_size=30),
    st.lists(st.integers(0, 49), max_size=30),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([0.0, 1.5, -2.0]),
    st.sampled_from([0.0, 0.25, -1.0]),
)
def test_penalties(
    prompt: list[int], text: list[int], repetition: float, presence: float, frequency: float
) -> None:
    """Repetition as transformers' processor has it; presence and frequency by the formula of OpenAI's API,
    over the generated tokens only. Prompt ids beyond the logits are ignored."""
    logits = random_logits(50, len(text))
    penalized = sampler(
        50, prompt, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    for token in text:
        penalized.accept(token)
    processor = RepetitionPenaltyLogitsProcessor(repetition)
    expected = processor(torch.tensor([prompt + text]), torch.from_numpy(logits)[None].clone())[0].numpy()
    counts = np.bincount(text, minlength=50) if text else np.zeros(50, np.int64)
    expected = (
        expected - (frequency * counts).astype(np.float32) - (presence * (counts > 0)).astype(np.float32)
    )
    assert penalized.sample(logits, 0).token_id == int(expected.argmax())


def test_bias_is_added_to_the_logits() -> None:
    logits = np.array([1.0, 0.0, -50.0], np.float32)
    assert sampler(3, logit_bias={"1": 1.5}).sample(logits, 0).token_id == 1
    assert sampler(3, logit_bias={"0": -100, "1": -100}).sample(logits, 0).token_id == 2


def test_logprobs_are_those_of_the_model_whatever_is_drawn() -> None:
    logits = random_logits(40_000)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    for params in ({}, {"temperature": 0.5, "top_k": 2, "repetition_penalty": 2.0}):
        token = sampler(40_000, [1], logprobs=5, **params).sample(logits, 1)
        # 1e-12: a float64 sum of 40,000 terms, in blocks here and in torch's own order there.
        assert token.logprob == pytest.approx(float(exact[token.token_id]), rel=1e-12)
        values, ids = exact.topk(5)
        assert token.top_logprobs is not None
        assert [i for i, _ in token.top_logprobs] == ids.tolist()
        assert [v for _, v in token.top_logprobs] == pytest.approx(values.tolist(), rel=1e-12)


def test_logprobs_list_the_lowest_ids_of_equals_and_nothing_unless_asked() -> None:
    logits = np.array([0, 2, 2, 2, 1], np.float32)
    assert sampler(5).sample(logits, 0).logprob is None
    assert sampler(5, logprobs=0).sample(logits, 0).top_logprobs == ()
    top = sampler(5, logprobs=2).sample(logits, 0).top_logprobs
    assert top is not None
    assert [i for i, _ in top] == [1, 2]
    assert len(sampler(5, logprobs=100).sample(logits, 0).top_logprobs or ()) == 5


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(params: dict[str, Any], value: float) -> None:
    logits = random_logits(100)
    logits[57] = value
    with pytest.raises(BackendError, match="token id 57"):
        sampler(100, **params).sample(logits, 0)
    with pytest.raises(BackendError, match="not finite"):
        sampler(100, **params).sample(np.full(100, -np.inf, np.float32), 0)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=str)
def test_a_mask_without_a_possible_token_is_an_error(params: dict[str, Any]) -> None:
    logits = random_logits(10)
    logits[3] = -np.inf
    for mask in (np.zeros(10, np.bool_), np.arange(10) == 3):
        with pytest.raises(InputError, match="mask allows no token"):
            sampler(10, **params).sample(logits, 0, mask)


def test_tokens_that_a_model_rules_out_are_never_drawn() -> None:
    lowest = float(np.finfo(np.float32).min)
    for out in (-np.inf, lowest):  # either is written by models; scaled, the second overflows
        logits = np.array([out, 0.0, out, 0.0], np.float32)
        for params in ({}, {"top_k": 3}, {"top_p": 0.999}, {"repetition_penalty": 2.0}):
            drawn = sampler(4, [0], temperature=0.5, **params)
            assert {drawn.sample(logits, i).token_id for i in range(50)} == {1, 3}
