"""Samples and forks: one prompt, several continuations, and the blocks that they share."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, failing_once, generate_together, greedy
from test_engine_threads import Gate, eventually

from pagelet.models.errors import BackendError, EngineClosedError, InputError, PromptTooLongError
from pagelet.runtime import Engine, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
WINDOWS = [(0,), (12,), (0, 12)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def params(max_tokens: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32, 33])
def test_samples_share_one_prompt_and_differ_as_they_do_alone(
    make_engine: MakeEngine, windows: tuple[int, ...], prefix_cache: bool, length: int
) -> None:
    model = {"windows": windows, "num_blocks": 200}
    engine, backend = make_engine(model, prefix_cache=prefix_cache, speculate="off")
    done = engine.generate(prompt_of(length), params(10, n=5, temperature=1.0, seed=3))
    # The prompt once, its last token for each of the others, and nine generated tokens each.
    assert sum(map(sum, backend.batches)) == length + 4 + 5 * 9
    assert (backend.copies > 0) == (length % 4 != 1), "the last block is copied where it is partly read"
    assert len({choice.token_ids for choice in done.choices}) == 5
    assert done.usage.cached_tokens == 0
    alone, _ = make_engine({"windows": windows})
    for n in (1, 2, 4):
        fewer = alone.generate(prompt_of(length), params(10, n=n, temperature=1.0, seed=3))
        assert fewer.choices == done.choices[:n]


@pytest.mark.parametrize("max_sequences", [1, 2, 8])
def test_samples_under_pressure_stay_the_same(make_engine: MakeEngine, max_sequences: int) -> None:
    asked = params(20, n=6, temperature=1.0, seed=3)
    roomy, _ = make_engine({"num_blocks": 300})
    expected = [roomy.generate(prompt_of(21, seed), asked).choices for seed in range(4)]
    engine, _ = make_engine({"num_blocks": 20}, max_sequences=max_sequences, max_step_tokens=16)
    done = generate_together(engine, [prompt_of(21, seed) for seed in range(4)], asked)
    assert [completion.choices for completion in done] == expected
    if max_sequences == 8:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_that_fill_the_whole_cache_take_turns(
    make_engine: MakeEngine, windows: tuple[int, ...], prefix_cache: bool
) -> None:
    """A copy needs a block more than the sequence itself, which is not there: nothing may wait for ever."""
    engine, _ = make_engine({"windows": windows, "num_blocks": 5}, prefix_cache=prefix_cache, speculate="off")
    for length in (3, 15, 16, 17, 18, 20):
        new = min(4, 21 - length)
        for done in engine.generate_all([prompt_of(length)] * 2, params(new, n=3)):
            expected = greedy(prompt_of(length), new, VOCAB, windows)
            assert [list(choice.token_ids) for choice in done.choices] == [expected] * 3
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_running_request_is_forked_without_reading_it_again(
    make_engine: MakeEngine, windows: tuple[int, ...], prefix_cache: bool
) -> None:
    gate = Gate()
    engine, backend = make_engine({"before_run": gate, "windows": windows}, speculate="off")
    prompt = prompt_of(30)
    parent = engine.submit(prompt, params(40), prefix_cache=prefix_cache)
    gate.let(7)
    eventually(lambda: any(len(sample.tokens) >= 37 for sample in parent.samples))
    so_far, _ = parent.tokens_so_far()
    fork = engine.fork(parent, params(10))
    other = engine.fork(parent, params(10, logit_bias={9: 100.0}))
    gate.open()
    assert list(fork.result(timeout=10).token_ids) == greedy(so_far, 10, VOCAB, windows)
    assert other.result(timeout=10).token_ids == (9,) * 10
    assert list(parent.result(timeout=10).token_ids) == greedy(prompt, 40, VOCAB, windows)
    assert fork.result().usage.prompt_tokens == len(so_far)
    assert fork.result().usage.cached_tokens == len(so_far) - 1
    assert sum(map(sum, backend.batches)) == 30 + 39 + 2 * 10
    assert engine.stats().blocks_used == 0


def test_a_finished_request_is_forked_through_the_cache(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    parent = engine.submit(prompt_of(18), params(9), cache_salt="mine")
    tokens = prompt_of(18) + list(parent.result(timeout=10).token_ids)
    done = engine.fork(parent, params(7)).result(timeout=10)
    assert list(done.token_ids) == greedy(tokens, 7, VOCAB)
    assert done.usage.cached_tokens == 24
    assert engine.generate(tokens, params(1)).usage.cached_tokens == 0, "the fork keeps the salt"


def test_forks_of_one_sampled_request_go_different_ways(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    parent = engine.submit(prompt_of(8), params(6, n=2, temperature=1.0, seed=5))
    parent.result(timeout=10)
    forks = [engine.fork(parent, sample=1).result(timeout=10).token_ids for _ in range(3)]
    assert len(set(forks)) == 3
    seeded = [engine.fork(parent, params(6, temperature=1.0, seed=1)).result().token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    tokens, _ = parent.tokens_so_far(1)
    assert tokens == prompt_of(8) + list(parent.result().choices[1].token_ids)


def test_a_fork_of_a_request_that_waits_begins_at_its_prompt(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate}, max_sequences=1)
    running = engine.submit([5], params(3))
    waiting = engine.submit(prompt_of(10), params(4))
    fork = engine.fork(waiting, priority=1)
    gate.open()
    for request in (waiting, fork):
        assert list(request.result(timeout=10).token_ids) == greedy(prompt_of(10), 4, VOCAB)
    assert len(running.result().token_ids) == 3
    assert fork.last_token < waiting.last_token, "it does not wait for one that is served after it"


def test_cancelled_parents_and_children_do_not_touch_each_other(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})
    parent = engine.submit(prompt_of(10), params(60))
    gate.let(4)
    fork, doomed = engine.fork(parent, params(9)), engine.fork(parent, params(60))
    tokens = prompt_of(10) + greedy(prompt_of(10), 4, VOCAB)
    gate.let(2)
    parent.cancel()
    doomed.cancel()
    gate.open()
    done = fork.result(timeout=10)
    assert fork.prompt_ids == tokens[: fork.prompt_tokens]
    assert list(done.token_ids) == greedy(fork.prompt_ids, 9, VOCAB)
    assert parent.result(timeout=10).finish_reason == doomed.result(timeout=10).finish_reason == "cancelled"
    eventually(lambda: engine.stats().blocks_used == 0)


def test_stats_count_shared_tokens_once(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})
    request = engine.submit(prompt_of(10), params(20, n=3))
    gate.let(1)
    eventually(lambda: engine.stats().blocks_used == 3 + 2)
    # The prompt of the first sample, 10 tokens in 3 blocks; the others' step has not run yet.
    assert (engine.stats().live_tokens, engine.stats().allocated_tokens) == (8 + 2 + 1 + 1, 20)
    gate.let(1)
    eventually(lambda: engine.stats().steps == 2)
    stats = engine.stats()
    assert stats.blocks_shared == 2
    assert stats.peak_blocks_used == stats.blocks_used == 5
    request.cancel()
    gate.open()
    request.result(timeout=10)
    eventually(lambda: engine.stats().blocks_used == 0)
    assert (engine.stats().live_tokens, engine.stats().blocks_shared) == (0, 0)


def test_wrong_forks_are_refused(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, backend = make_engine({"before_run": gate, "max_context": 20})
    elsewhere, _ = make_engine()
    request = engine.submit(prompt_of(10), params(8))
    with pytest.raises(InputError, match="another engine"):
        elsewhere.fork(request)
    with pytest.raises(InputError, match="sample 1 of a request with n=1"):
        engine.fork(request, sample=1)
    gate.open()
    request.result(timeout=10)
    full = engine.fork(request, params(2))
    full.result(timeout=10)
    with pytest.raises(PromptTooLongError, match="20 tokens"):
        engine.fork(full)
    backend.before_run = failing_once("broken")
    failed = engine.submit([5], params(2))
    with pytest.raises(BackendError, match="broken"):
        failed.result(timeout=10)
    with pytest.raises(BackendError, match="broken"):
        engine.fork(failed)
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.fork(request)


def test_a_copy_that_fails_fails_its_step(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, backend = make_engine()

    def copy_blocks(group: int, pairs: object) -> None:
        raise BackendError("no copies today")

    monkeypatch.setattr(backend, "copy_blocks", copy_blocks)
    with pytest.raises(BackendError, match="no copies today"):
        engine.generate(prompt_of(6), params(4, n=2))
    monkeypatch.undo()
    done = engine.generate(prompt_of(6), params(4, n=2))
    assert [list(choice.token_ids) for choice in done.choices] == [greedy(prompt_of(6), 4, VOCAB)] * 2


def test_forks_and_cancellations_from_many_threads(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 60, "windows": (0, 12)}, max_sequences=6, max_step_tokens=16)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in range(6):
            parent = engine.submit(prompt_of(int(rng.integers(1, 30)), seed * 10 + number), params(12))
            for _ in range(int(rng.integers(0, 3))):
                parent.next_chunk()
            fork = engine.fork(parent, params(6))
            if rng.integers(2):
                parent.cancel()
            tokens = list(fork.result(timeout=30).token_ids)
            whole = greedy(parent.prompt_ids, 12, VOCAB, (0, 12))
            shared = fork.prompt_ids[parent.prompt_tokens :]
            if shared != whole[: len(shared)] or tokens != greedy(fork.prompt_ids, 6, VOCAB, (0, 12)):
                wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    eventually(lambda: engine.stats().running == engine.stats().waiting == 0)
    assert engine.stats().blocks_used == 0
