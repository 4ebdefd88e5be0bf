"""A few seconds of the soak on a tiny model, and that it can fail."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.soak import Soak, soak


@pytest.fixture
def engine(make_llama: Callable[..., Path], tmp_path: Path) -> Iterator[Engine]:
    export(make_llama(), tmp_path / "b", uncertified(block_size=8))
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="160KiB", max_step_tokens=64)) as engine:
        yield engine


def test_random_use_from_many_threads_leaves_nothing(engine: Engine) -> None:
    report = soak(engine, seconds=4, threads=8)
    assert report.faults == []
    assert {"finish", "cancel", "fork", "close"} <= set(report.counts)
    assert engine.stats().preemptions > 0


def test_a_wrong_reply_is_a_fault(engine: Engine) -> None:
    import random

    run = Soak(engine, seed=1)
    run.learn()
    run._expected = {key: (-1, *tokens[1:]) for key, tokens in run._expected.items()}
    for _ in range(4):
        run._one(random.Random(0))
    assert run.report.faults
