"""Prompts that begin alike: what is found, what is computed, and that the tokens stay the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, failing_once, generate_together, greedy, logits_of

from pagelet.models.errors import BackendError, InputError
from pagelet.runtime import Completion, Engine, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
WINDOWS = [(0,), (12,), (0, 12)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def params(max_tokens: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def tokens_read(backend: FakeBackend) -> int:
    return sum(sum(batch) for batch in backend.batches)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 39, 40, 41])
def test_a_repeated_prompt_is_found_up_to_its_last_block(
    make_engine: MakeEngine, windows: tuple[int, ...], length: int
) -> None:
    engine, backend = make_engine({"windows": windows})
    first = engine.generate(prompt_of(length), params(1))
    backend.batches.clear()
    again = engine.generate(prompt_of(length), params(1))
    expected = (length - 1) // 4 * 4
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, expected)
    assert tokens_read(backend) == length - expected
    assert first.token_ids == again.token_ids == tuple(greedy(prompt_of(length), 1, VOCAB, windows))
    assert engine.stats().cached_tokens == expected
    assert engine.stats().prefix_hit_rate == expected / (2 * length)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_conversation_goes_on_from_its_replies(make_engine: MakeEngine, windows: tuple[int, ...]) -> None:
    engine, _ = make_engine({"windows": windows}, max_step_tokens=32)
    tokens = prompt_of(13)
    for _ in range(4):
        done = engine.generate(tokens, params(11))
        assert done.usage.cached_tokens == (0 if len(tokens) == 13 else (len(tokens) - 6) // 4 * 4)
        assert list(done.token_ids) == greedy(tokens, 11, VOCAB, windows)
        tokens = [*tokens, *done.token_ids, *prompt_of(5, seed=len(tokens))]


def test_salts_keep_users_apart_and_private_requests_leave_nothing(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()

    def cached(**options: Any) -> int:
        done = engine.generate(prompt_of(21), params(1), **options)
        assert list(done.token_ids) == greedy(prompt_of(21), 1, VOCAB)
        return done.usage.cached_tokens

    assert cached(prefix_cache=False) == 0
    assert engine.stats().blocks_cached == 0
    assert [cached(), cached(), cached(prefix_cache=False)] == [0, 20, 0]
    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 20, 0]
    assert cached(cache_salt="a", prefix_cache=False) == 0
    assert cached() == 20
    off, _ = make_engine(prefix_cache=False)
    assert [off.generate(prompt_of(21), params(1)).usage.cached_tokens for _ in range(2)] == [0, 0]
    assert off.stats().blocks_cached == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_salt": ""}, "cache_salt is ''"),
        ({"cache_salt": "x" * 2000}, "1 to 1024 characters"),
        ({"cache_salt": 5}, "cache_salt is '5'"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'"),
    ],
)
def test_wrong_cache_options_are_refused(
    make_engine: MakeEngine, options: dict[str, Any], message: str
) -> None:
    engine, _ = make_engine()
    with pytest.raises(InputError, match=message):
        engine.submit([5], **options)


def test_logits_are_computed_for_every_row(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    engine.generate(prompt_of(33), params(1))
    backend.batches.clear()
    logits = engine.logits(prompt_of(33))
    assert tokens_read(backend) == 33
    assert (logits == logits_of(np.array(prompt_of(33)), VOCAB)).all()


def test_the_first_logits_after_a_hit_equal_those_without(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"windows": (0, 12)})
    asked = params(6, logprobs=20)
    first = engine.generate(prompt_of(38), asked)
    again = engine.generate(prompt_of(38), asked)
    assert again.usage.cached_tokens == 36
    assert again.logprobs == first.logprobs


def test_a_failing_step_leaves_nothing_wrong_in_the_cache(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(max_step_tokens=32)
    engine.generate(prompt_of(16), params(1))
    backend.before_run = failing_once("broken")
    with pytest.raises(BackendError, match="broken"):
        engine.generate(prompt_of(50), params(1))
    done = engine.generate(prompt_of(50), params(5))
    assert done.usage.cached_tokens == 16, "what was there before, and nothing of the failed step"
    assert list(done.token_ids) == greedy(prompt_of(50), 5, VOCAB)


def test_what_is_used_again_outlives_what_is_not(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 24}, max_step_tokens=64)
    for seed in range(12):
        engine.generate(prompt_of(17, seed=0), params(1))
        engine.generate(prompt_of(17, seed=1 + seed), params(1))
    assert engine.stats().evictions > 0
    assert engine.generate(prompt_of(17, seed=0), params(1)).usage.cached_tokens == 16
    assert engine.generate(prompt_of(17, seed=1), params(1)).usage.cached_tokens == 0


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 24}, max_step_tokens=64)
    for seed in range(6):  # 4 full blocks each, and one that is given back: the sixth needs one more
        engine.generate(prompt_of(17, seed), params(1))
    assert engine.stats().evictions == 1
    assert engine.generate(prompt_of(17, seed=0), params(1)).usage.cached_tokens == 12


def test_two_at_once_share_what_is_published_and_end_with_one_copy(make_engine: MakeEngine) -> None:
    engine, backend = make_engine({"num_blocks": 40}, max_step_tokens=32)
    requests = [engine.submit(prompt_of(64), params(30)) for _ in range(2)]
    for request in requests:
        assert list(request.result().token_ids) == greedy(prompt_of(64), 30, VOCAB)
    assert engine.stats().blocks_cached == (64 + 29) // 4
    assert tokens_read(backend) < 2 * (64 + 29), "the second reads at most what was not published yet"


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_64_requests_give_the_same_tokens_however_they_are_served(
    make_engine: MakeEngine, windows: tuple[int, ...], temperature: float
) -> None:
    asked = params(12, temperature=temperature, seed=3, top_p=0.95)
    # Sixteen beginnings, four endings each.
    prompts = [prompt_of(20 + seed % 16, seed % 16) + prompt_of(1 + seed // 16, seed) for seed in range(64)]
    model = {"windows": windows, "num_blocks": 200}
    alone, _ = make_engine(model, prefix_cache=False)
    expected = [alone.generate(prompt, asked).token_ids for prompt in prompts]

    def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in done]

    batched, _ = make_engine(model, prefix_cache=False, max_sequences=64)
    assert tokens(batched.generate_all(prompts, asked)) == expected
    chunked, _ = make_engine(model, prefix_cache=False, max_sequences=5, max_step_tokens=7)
    assert tokens(chunked.generate_all(prompts, asked)) == expected
    hits, _ = make_engine(model, max_sequences=8)
    assert tokens(hits.generate_all(prompts, asked)) == expected
    assert hits.stats().cached_tokens > 0
    assert tokens(hits.generate_all(prompts, asked)) == expected
    few = 16 if windows == (12,) else 25
    preempted, _ = make_engine(model | {"num_blocks": few}, max_sequences=8, max_step_tokens=16)
    assert tokens(generate_together(preempted, prompts, asked)) == expected
    assert preempted.stats().evictions > 0
    if 0 in windows:  # a window's sequences stop growing, so what was let in stays
        assert preempted.stats().preemptions > 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_hundred_markers_under_pressure_stay_where_they_belong(
    make_engine: MakeEngine, windows: tuple[int, ...]
) -> None:
    """The fake model hashes all it reads, so one foreign token anywhere gives other tokens."""
    system = prompt_of(18, seed=99)
    prompts = [system + [2 + marker, 3 + marker] * (1 + marker % 7) for marker in range(100)]
    few = 22 if windows == (12,) else 40
    engine, backend = make_engine(
        {"windows": windows, "num_blocks": few}, max_sequences=8, max_step_tokens=24, max_queue=200
    )
    for done, prompt in zip(generate_together(engine, prompts, params(20)), prompts, strict=True):
        assert list(done.token_ids) == greedy(prompt, 20, VOCAB, windows)
    stats = engine.stats()
    assert stats.preemptions > 0 or windows == (12,)
    assert stats.evictions > 0
    assert stats.cached_tokens > 50 * 16
    assert backend.copies == 0, "whole blocks are shared, and never written"


def test_preempted_sequences_come_back_through_the_cache(make_engine: MakeEngine) -> None:
    read = {}
    for prefix_cache in (True, False):
        engine, backend = make_engine(
            {"num_blocks": 30}, max_sequences=4, prefix_cache=prefix_cache, speculate="off"
        )
        prompts = [prompt_of(20, seed) for seed in range(4)]
        for done, prompt in zip(generate_together(engine, prompts, params(30)), prompts, strict=True):
            assert list(done.token_ids) == greedy(prompt, 30, VOCAB)
        assert engine.stats().preemptions > 0
        read[prefix_cache] = tokens_read(backend)
    assert read[True] < read[False]
