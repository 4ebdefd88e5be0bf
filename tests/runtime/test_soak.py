"""Everything at once, at random, with the blocks checked in every step."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy
from test_engine_threads import eventually

from pagelet.models.errors import CapacityError
from pagelet.runtime import Engine, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258


class Caller:
    """One thread's requests, each compared with what the model says without a cache."""

    def __init__(self, engine: Engine, seed: int, windows: tuple[int, ...]) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._windows = windows
        self.wrong: list[Any] = []
        self.refused = 0

    def run(self, requests: int) -> None:
        try:
            for _ in range(requests):
                self._one()
        except CapacityError:
            self.refused += 1
        except Exception as error:
            self.wrong.append(error)

    def _one(self) -> None:
        rng = self._rng
        prompt = [2 + int(rng.integers(3))] * int(rng.integers(1, 40)) + rng.integers(2, VOCAB, 3).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 25)), n=int(rng.integers(1, 4)), ignore_eos=True
        )
        request = self._engine.submit(
            prompt,
            params,
            priority=int(rng.integers(2)),
            timeout=float(rng.choice([0.01, 60.0], p=[0.1, 0.9])),
            cache_salt=rng.choice([None, "a", "b"]),
            prefix_cache=bool(rng.integers(5)),
        )
        if rng.integers(3) == 0:
            request.next_chunk()
            fork = self._engine.fork(request, params, sample=params.n - 1)
            self._check(fork, fork.prompt_ids)
        if rng.integers(4) == 0:
            request.cancel()
        self._check(request, prompt)

    def _check(self, request: Any, prompt: list[int]) -> None:
        done = request.result(timeout=60)
        for choice in done.choices:
            expected = greedy(prompt, len(choice.token_ids), VOCAB, self._windows)
            if list(choice.token_ids) != expected:
                self.wrong.append((prompt, choice, expected))


@pytest.mark.parametrize("windows", [(0,), (0, 12)])
def test_random_requests_from_many_threads(make_engine: MakeEngine, windows: tuple[int, ...]) -> None:
    engine, backend = make_engine(
        {"windows": windows, "num_blocks": 45}, max_sequences=6, max_step_tokens=24, max_queue=200
    )

    def check(batch: object) -> None:
        loop = engine._loop
        loop.blocks.check_integrity(task.cache for task in loop.scheduler.running)
        assert all(not task.cache.length for task in loop.scheduler.waiting)

    backend.before_run = check
    callers = [Caller(engine, seed, windows) for seed in range(8)]
    threads = [threading.Thread(target=caller.run, args=(30,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [caller.wrong for caller in callers] == [[]] * 8
    assert sum(caller.refused for caller in callers) == 0
    eventually(lambda: engine.stats().running == engine.stats().waiting == 0)
    stats = engine.stats()
    assert (stats.blocks_used, stats.failed_steps) == (0, 0)
    assert min(stats.preemptions, stats.evictions, stats.cached_tokens, backend.copies) > 0
