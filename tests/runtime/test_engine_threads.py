"""Many callers at once: cancelling, closing, deadlines, failing steps, asyncio, forks, exit."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend, failing_once, greedy

from pagelet.models.errors import BackendError, CapacityError, EngineClosedError, InputError, QueueFullError
from pagelet.models.text import Tokenizer
from pagelet.runtime import ChunkStream, Engine, Request, SamplingParams
from pagelet.runtime.block_table import BlockTable

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
ENDLESS = SamplingParams(ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
LONG_CONTEXT: dict[str, Any] = {"max_context": 4000, "num_blocks": 4000}


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen within ten seconds"
        time.sleep(0.002)


class Gate:
    """Holds the backend before a step; `steps` counts how many went through."""

    def __init__(self) -> None:
        self.steps = 0
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, batch: object) -> None:
        if not self._is_open:
            assert self._permits.acquire(timeout=10)
        self.steps += 1

    def let(self, steps: int) -> None:
        target = self.steps + steps
        self._permits.release(steps)
        eventually(lambda: self.steps == target)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()


def test_a_cancelled_request_frees_its_blocks_within_two_steps(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})
    cancelled, other = engine.submit([5, 6, 7], ENDLESS), engine.submit([8, 9], ENDLESS)
    gate.let(4)
    cancelled.cancel()
    gate.let(2)
    assert cancelled.done
    assert engine.stats().running == 1
    done = cancelled.result()
    assert done.finish_reason == "cancelled"
    assert done.token_ids == tuple(greedy([5, 6, 7], len(done.token_ids), VOCAB))
    assert 3 <= len(done.token_ids) <= 6
    cancelled.cancel()  # once more does nothing
    other.cancel()
    gate.open()
    assert other.result(timeout=10).finish_reason == "cancelled"
    eventually(lambda: engine.stats().blocks_used == 0)


@pytest.mark.parametrize("how", ["close", "drop", "with", "break"])
def test_an_iterator_that_ends_early_cancels_its_request(make_engine: MakeEngine, how: str) -> None:
    engine, _ = make_engine(LONG_CONTEXT)
    if how == "break":
        for _ in engine.stream([5], ENDLESS):
            break
    else:
        stream = engine.stream([5], ENDLESS)
        next(stream)
        if how == "close":
            stream.close()
            assert [chunk.finish_reason for chunk in stream][-1] == "cancelled"
        elif how == "with":
            with stream:
                next(stream)
        else:
            del stream
    eventually(lambda: engine.stats().running == 0)
    assert engine.stats().decode_tokens < 3900


def test_a_request_that_waits_can_be_cancelled(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate}, max_sequences=1)
    first, second = engine.submit([5], ENDLESS), engine.submit([6], SHORT)
    second.cancel()
    first.cancel()
    gate.open()
    assert second.result(timeout=10).token_ids == ()
    assert second.result().timings.time_to_first_token is None
    assert first.result(timeout=10).finish_reason == "cancelled"


def test_deadlines_end_running_and_waiting_requests(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(LONG_CONTEXT | {"before_run": lambda batch: time.sleep(0.002)}, max_sequences=1)
    running = engine.submit([5], ENDLESS, timeout=0.1)
    waiting = engine.submit([5], ENDLESS, timeout=0.05)
    patient = engine.submit([7], SHORT, timeout=60)
    done = running.result(timeout=10)
    assert done.finish_reason == "timeout"
    assert done.token_ids == tuple(greedy([5], len(done.token_ids), VOCAB))
    assert 0.1 <= done.timings.total < 5
    assert waiting.result(timeout=10).finish_reason == "timeout"
    assert waiting.result().token_ids == ()
    assert patient.result(timeout=10).finish_reason == "length"


def test_waiting_for_a_result_can_time_out(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})
    request = engine.submit([5], SHORT)
    with pytest.raises(TimeoutError, match="still running"):
        request.result(timeout=0.01)
    gate.open()
    assert len(request.result(timeout=10).token_ids) == 5


def test_many_threads_each_get_their_own(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 40}, max_sequences=6, max_step_tokens=16)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for number in range(8):
            prompt = [2 + (seed * 31 + number * 7 + i) % 250 for i in range(1 + (seed + 3 * number) % 20)]
            expected = greedy(prompt, 5, VOCAB)
            streamed = [token for chunk in engine.stream(prompt, SHORT) for token in chunk.token_ids]
            if streamed != expected or engine.generate(prompt, SHORT).token_ids != tuple(expected):
                wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.stats().blocks_used == 0


def test_asyncio_streams_run_side_by_side_and_cancel(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(LONG_CONTEXT)

    async def tokens(prompt: list[int]) -> list[int]:
        return [token async for chunk in engine.astream(prompt, SHORT) for token in chunk.token_ids]

    async def main() -> list[list[int]]:
        async with contextlib.aclosing(engine.astream([9], ENDLESS)) as stream:
            async for _ in stream:
                break
        backend.before_run = lambda batch: time.sleep(0.02)
        hanging = asyncio.create_task(anext(aiter(engine.astream([9] * 3999, ENDLESS))))
        await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        backend.before_run = lambda batch: None
        with pytest.raises(InputError, match="outside"):
            await anext(engine.astream([VOCAB]))
        return list(await asyncio.gather(*(tokens([i, i + 1]) for i in range(2, 8))))

    assert asyncio.run(main()) == [greedy([i, i + 1], 5, VOCAB) for i in range(2, 8)]
    eventually(lambda: engine.stats().running == 0)
    assert engine.stats().blocks_used == 0


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"before_run": failing_once("the accelerator is on fire")}, max_sequences=2)
    requests = [engine.submit([5, 6], SHORT) for _ in range(4)]
    outcomes = [request._done.wait(10) and request._error for request in requests]
    failed = [request for request, error in zip(requests, outcomes, strict=True) if error is not None]
    assert 1 <= len(failed) <= 2
    for request in requests:
        if request in failed:
            with pytest.raises(BackendError, match="on fire") as raised:
                request.result()
            assert isinstance(raised.value.__cause__, BackendError)
            with pytest.raises(BackendError, match="on fire"):
                list(request)
        else:
            assert request.result().token_ids == tuple(greedy([5, 6], 5, VOCAB))
    assert engine.stats().failed_steps == 1
    assert engine.stats().blocks_used == 0


def test_logits_and_asyncio_report_a_failing_step(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"before_run": failing_once("broken")})
    with pytest.raises(BackendError, match="broken"):
        engine.logits([5, 6])
    assert engine.logits([5, 6]).shape == (2, VOCAB)
    other, _ = make_engine({"before_run": failing_once("broken")})

    async def main() -> None:
        with pytest.raises(BackendError, match="broken"):
            await anext(other.astream([5]))

    asyncio.run(main())


def test_a_fault_of_the_loop_itself_closes_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine()

    def schedule() -> None:
        raise AssertionError("an invariant is broken")

    monkeypatch.setattr(engine._loop.scheduler, "schedule", schedule)
    with pytest.raises(EngineClosedError, match="invariant is broken"):
        engine.submit([5], SHORT).result(timeout=10)
    with pytest.raises(EngineClosedError, match="invariant is broken"):
        engine.submit([5], SHORT)


def test_closing_ends_what_runs_and_what_waits(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(LONG_CONTEXT, max_sequences=2)
    requests = [engine.submit([5], ENDLESS) for _ in range(5)]
    stream = engine.stream([5], ENDLESS)
    engine.close()
    for request in requests:
        with pytest.raises(EngineClosedError, match="closed"):
            request.result(timeout=10)
    with pytest.raises(EngineClosedError, match="closed"):
        list(stream)
    assert backend.closed


def test_the_queue_is_bounded(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate}, max_sequences=1, max_queue=3)
    first = engine.submit([5], SHORT)
    eventually(lambda: engine.stats().running == 1)
    waiting = [engine.submit([5], SHORT) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 sequences wait already"):
        engine.submit([5], SHORT)
    gate.open()
    for request in (first, *waiting):
        assert len(request.result(timeout=10).token_ids) == 5
    with pytest.raises(CapacityError, match="4 sequences that may come to") as refused:
        engine.submit([5], SamplingParams(n=4))
    assert not isinstance(refused.value, QueueFullError), "trying again would not help"


def test_the_tokens_that_may_wait_are_bounded(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate}, max_sequences=1, max_queue_tokens=200)
    first = engine.submit([5], SHORT)
    eventually(lambda: engine.stats().running == 1)
    waiting = engine.submit([5], SamplingParams(n=3, max_tokens=40, ignore_eos=True))
    with pytest.raises(QueueFullError, match="3 sequences wait already; 2 more would come to 223 tokens"):
        engine.submit([5], SamplingParams(n=2, max_tokens=49))
    with pytest.raises(CapacityError, match="2 sequences that may come to 202 tokens"):
        engine.submit([5], SamplingParams(n=2, max_tokens=100))
    gate.open()
    assert len(first.result(timeout=10).token_ids) == 5
    assert len(waiting.result(timeout=10).choices) == 3


def test_a_long_prompt_reports_progress_and_can_be_cancelled(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(LONG_CONTEXT, max_step_tokens=32)
    seen: list[tuple[int, int]] = []

    def watch(done: int, total: int) -> None:
        seen.append((done, total))

    engine.generate([7] * 100, SHORT, on_progress=watch)
    assert seen == [(32, 100), (64, 100), (96, 100), (100, 100)]
    done = engine.generate([7] * 3000, SHORT, on_progress=lambda done, total: done < 64)
    assert (done.finish_reason, done.token_ids) == ("cancelled", ())
    assert sum(map(sum, backend.batches)) < 104 + 6 * 32


def test_a_callback_must_not_wait_for_its_own_engine(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([5], SHORT),
        lambda: engine.logits([5]),
        engine.close,
        lambda: 1 / 0,
    ]
    for call, message in zip(calls, ["wait", "wait", "close", "ZeroDivisionError"], strict=True):
        request = engine.submit([5], SHORT, on_progress=lambda done, total, call=call: call() is None)
        with pytest.raises(InputError, match=message):
            request.result(timeout=10)
    assert len(engine.generate([5], SHORT).token_ids) == 5


def test_an_idle_engine_uses_no_processor(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    engine.generate([5], SHORT)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03  # a loop that polls would use far more


def test_memory_stays_flat_over_many_requests(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()

    def serve(requests: int) -> None:
        for number in range(requests):
            engine.generate([2 + number % 250], SHORT)
            with engine.stream([5], ENDLESS) as stream:
                next(stream)
        eventually(lambda: engine.stats().running == 0)

    tracemalloc.start()
    try:
        serve(100)  # until every block is in the prefix cache's index
        gc.collect()  # empties the interpreter's free lists as well, which grow for a while
        before = tracemalloc.get_traced_memory()[0]
        gc.disable()
        serve(300)
        left = [thing for thing in gc.get_objects() if type(thing) in (Request, BlockTable, ChunkStream)]
        assert left == [], "finished requests are in cycles that only the collector frees"
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()
    # 600 requests that each left one small object behind would show 29,000 bytes.
    assert growth < 20_000


def test_a_forgotten_engine_is_collected_and_its_thread_ends(tokenizer: Tokenizer) -> None:
    engine = Engine(FakeBackend(vocab_size=VOCAB), tokenizer)
    request = engine.submit([5], SHORT)
    thread, reference = engine._loop.thread._thread, weakref.ref(engine._loop)
    del engine
    assert len(request.result(timeout=10).token_ids) == 5  # a request keeps its engine alive until its end
    eventually(lambda: reference() is None)
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_gets_an_error_and_does_not_hang(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"before_run": lambda batch: time.sleep(0.001)} | LONG_CONTEXT)
    request = engine.submit([5], ENDLESS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking with threads is risky is the point
        child = os.fork()
    if child == 0:
        errors = 0
        for call in (
            lambda: engine.generate([5]),
            lambda: engine.logits([5]),
            request.result,
            lambda: list(request),
        ):
            try:
                call()
            except EngineClosedError:
                errors += 1
        engine.close()
        os._exit(errors)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4
    request.cancel()
    assert request.result(timeout=10).finish_reason == "cancelled"


def test_a_forgotten_engine_does_not_hold_up_the_interpreter(tmp_path: Path, tokenizer: Tokenizer) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fake_backend import FakeBackend
from pagelet.runtime import Engine, SamplingParams

class NoText:
    eos_token_ids = ()

from pagelet.runtime import step_loop
engine = Engine(FakeBackend(max_context=60000, num_blocks=15000), NoText())
import threading
threading.Thread(target=lambda: engine.logits([1] * 5000), daemon=True).start()
while not engine.stats().steps:
    pass
print("leaving")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "leaving", "")
