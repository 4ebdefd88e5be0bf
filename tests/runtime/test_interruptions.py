"""What is not an Exception: interrupts and exits, in callbacks, in the step thread, in threads that wait."""

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy, logits_of
from test_engine_threads import ENDLESS, LONG_CONTEXT, SHORT, Gate, eventually

from pagelet.models.errors import EngineClosedError, InputError
from pagelet.runtime import Engine, SamplingParams
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.tasks import Scoring

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
ESCAPES = [SystemExit, KeyboardInterrupt, asyncio.CancelledError]


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_callback_that_exits_fails_its_request_alone(
    make_engine: MakeEngine, kind: type[BaseException]
) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})

    def leave(done: int, total: int) -> None:
        raise kind("out")

    doomed, other = engine.submit([5], SHORT, on_progress=leave), engine.submit([6], SHORT)
    gate.open()
    with pytest.raises(InputError, match=f"on_progress raised {kind.__name__}"):
        doomed.result(timeout=10)
    for request in (other, engine.submit([7], SHORT)):
        assert list(request.result(timeout=10).token_ids) == greedy(request.prompt_ids, 5, VOCAB)


@pytest.mark.parametrize("kind", ESCAPES)
def test_what_escapes_from_a_step_closes_the_engine(
    make_engine: MakeEngine, kind: type[BaseException]
) -> None:
    gate = Gate()

    def run(batch: StepBatch) -> None:
        gate(batch)
        raise kind("out")

    engine, _ = make_engine({"before_run": run}, max_sequences=1)
    requests = [engine.submit([5], SHORT), engine.submit([6], SHORT)]
    gate.open()
    for request in requests:
        with pytest.raises(EngineClosedError, match="out") as raised:
            request.result(timeout=10)
        assert isinstance(raised.value.__cause__, kind)
    for call in (lambda: engine.submit([5], SHORT), lambda: engine.logits([5]), engine.check_integrity):
        with pytest.raises(EngineClosedError, match="out"):
            call()


@pytest.mark.parametrize("name", ["adopt", "append", "free"])
def test_a_sequence_on_its_way_between_queues_is_not_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine, _ = make_engine()
    request = engine.submit([5], SHORT, on_progress=lambda done, total: False)
    request.result(timeout=10)

    def leave(*args: object) -> None:
        monkeypatch.undo()  # for what ends everything
        raise SystemExit("out")

    monkeypatch.setattr("pagelet.runtime.sequence_cache.SequenceCache." + name, leave)
    stuck = engine.submit([5], ENDLESS, on_progress=lambda done, total: False)
    # A request that has its end before its blocks are freed keeps it; the engine is closed all the same.
    if name == "free":
        assert stuck.result(timeout=10).finish_reason == "cancelled"
    else:
        with pytest.raises(EngineClosedError, match="out"):
            stuck.result(timeout=10)
    eventually(lambda: engine._loop.closed is not None)


def test_a_call_between_steps_that_exits_gets_an_answer(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()

    def leave() -> None:
        raise SystemExit("out")

    with pytest.raises(EngineClosedError, match="out"):
        engine._loop.call(leave)
    with pytest.raises(EngineClosedError, match="out"):
        engine._loop.call(lambda: None)


def test_a_sample_is_not_advanced_in_the_step_in_which_its_sibling_failed(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, backend = make_engine({"before_run": gate})
    request = engine.submit(
        [5], SamplingParams(n=2, max_tokens=5, ignore_eos=True), on_progress=lambda done, total: 1 / 0 > 0
    )
    _, sibling = request.samples
    gate.open()
    with pytest.raises(InputError, match="ZeroDivisionError"):
        request.result(timeout=10)
    assert list(engine.generate([6], SHORT).token_ids) == greedy([6], 5, VOCAB)
    assert backend.batches[0] == (1, 1), "both were in the step"
    assert sibling.tokens == [5]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal to one thread")
def test_interrupted_logits_do_not_run_beside_the_next(make_engine: MakeEngine) -> None:
    main, rows, interrupts = threading.main_thread().ident, [], [signal.SIGINT]
    assert main is not None

    def run(batch: StepBatch) -> None:
        rows.append(len(batch.logits_indices))
        time.sleep(0.002)
        if interrupts:
            time.sleep(0.05)  # a signal just before the wait itself would be seen only after it
            signal.pthread_kill(main, interrupts.pop())

    engine, _ = make_engine(LONG_CONTEXT | {"before_run": run})
    with pytest.raises(KeyboardInterrupt):
        engine.logits([5] * 3900)
    tokens = list(range(200))
    assert (engine.logits(tokens) == logits_of(np.array(tokens), VOCAB)).all()
    assert max(rows) == Scoring.max_chunk
    assert len(rows) < 30, "the first, of 61 steps, was ended"
    eventually(lambda: engine.stats().blocks_used == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_cancelling_in_a_fork_takes_no_lock(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"before_run": lambda batch: time.sleep(0.001)} | LONG_CONTEXT)
    request = engine.submit([5], ENDLESS)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._loop.thread._condition, engine._scoring:
            held.set()
            forked.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking with threads is risky is the point
        child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that hangs
        request.cancel()
        try:
            engine.logits([5])
        except EngineClosedError:
            os._exit(0)
        os._exit(1)
    forked.set()
    holder.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    request.cancel()
    assert request.result(timeout=10).finish_reason == "cancelled"
