"""The step loop: schedule, run, sample, deliver, again and again, in a thread of its own.

Callers of any thread leave work at the door (`_arrivals`, `_cancelled`); the step thread alone touches
the scheduler, the block pool and the backend.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagelet.models.errors import (
    BackendError,
    CapacityError,
    EngineClosedError,
    InputError,
    PageletError,
    QueueFullError,
)
from pagelet.runtime.backends.base import Backend, Float32Array
from pagelet.runtime.batch import StepBuffers
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.request import FinishReason
from pagelet.runtime.scheduler import Run, Scheduler
from pagelet.runtime.speculation.proposal import TokenIndices
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.speculation.speculator import MAX_ROWS, Speculator
from pagelet.runtime.speculation.trials import measure
from pagelet.runtime.stats import EngineStats, StepCounters
from pagelet.runtime.step_calls import StepCalls
from pagelet.runtime.step_thread import StepThread
from pagelet.runtime.tasks import Task

R = TypeVar("R")


class StepLoop:
    """Runs tasks over a backend until they have finished.

    Attributes:
        context: most tokens of one sequence.
        backend: for the step thread alone, but for its sizes and names.
        closed: why nothing is taken any more; None while open.
    """

    def __init__(self, backend: Backend, config: EngineConfig, proposers: Sequence[Proposer] = ()) -> None:
        layout = backend.layout
        self.context = min(backend.max_context, config.max_context or backend.max_context)
        self.closed: EngineClosedError | None = None
        self.blocks = BlockManager(
            layout, self.context, fingerprint=backend.fingerprint, prefix_cache=config.prefix_cache
        )
        max_step_tokens = min(config.max_step_tokens, layout.max_step_tokens)
        self.speculator = Speculator(
            proposers,
            num_draft_tokens=config.num_draft_tokens,
            max_draft_tokens=config.max_draft_tokens,
            vocab_size=backend.vocab_size,
            trees=backend.supports_trees,
            max_rows=MAX_ROWS,
        )
        self.scheduler: Scheduler[Task] = Scheduler(
            self.blocks,
            max_sequences=config.max_sequences,
            max_step_tokens=max_step_tokens,
            on_leave=self.speculator.forget,
        )
        self.backend = backend
        self._max_queue = config.max_queue
        self._max_queue_tokens = config.max_queue_tokens
        self._buffers = StepBuffers(
            max_tokens=max_step_tokens,
            max_sequences=config.max_sequences,
            max_blocks=self.blocks.max_blocks,
            num_groups=len(layout.groups),
        )
        self._counters = StepCounters()
        self._lock = threading.Lock()
        self._arrivals: deque[Task] = deque()
        self._cancelled: deque[Sequence[Task]] = deque()
        self._calls = StepCalls()
        self._numbers = itertools.count()
        self._next_deadline = math.inf
        self.thread = StepThread(self)

    # Called by any thread

    def new_rank(self, priority: int = 0) -> tuple[int, int]:
        return -priority, next(self._numbers)

    def check_open(self) -> None:
        """Raise EngineClosedError if nothing can be queued from here."""
        self.thread.check_process()
        if self.closed is not None:
            raise self.closed

    def check_bounds(self, num_sequences: int, num_tokens: int) -> None:
        """Raise CapacityError for a request that would not even fit into the empty queue."""
        if num_sequences > self._max_queue or num_tokens > self._max_queue_tokens:
            raise CapacityError(
                f"the request is {num_sequences} sequences that may come to {num_tokens} tokens; the queue "
                f"takes {self._max_queue} and {self._max_queue_tokens}. Lower n or max_tokens, or raise "
                "max_queue or max_queue_tokens."
            )

    def enqueue(self, tasks: Sequence[Task]) -> None:
        """Queue tasks of one group.

        Raises:
            QueueFullError: too many sequences or tokens wait.
            EngineClosedError: closed.
        """
        self.check_open()
        with self._lock:
            self.check_open()
            waiting = [*self._arrivals, *self.scheduler.waiting]
            num_tokens = sum(task.max_length for task in (*waiting, *tasks))
            if len(waiting) + len(tasks) > self._max_queue or num_tokens > self._max_queue_tokens:
                raise QueueFullError(
                    f"{len(waiting)} sequences wait already; {len(tasks)} more would come to {num_tokens} "
                    f"tokens. max_queue is {self._max_queue}, max_queue_tokens {self._max_queue_tokens}. "
                    "Try again later."
                )
            self._arrivals.extend(tasks)
            self._next_deadline = min(self._next_deadline, tasks[0].deadline)
        self.thread.wake()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """End tasks before the next step, and before any task that is queued later starts."""
        # Without the lock: a handle that is collected cancels, in whatever its thread is doing.
        self._cancelled.append(tasks)
        self.thread.wake()

    def call(self, function: Callable[[], R]) -> R:
        """The result of `function`, called by the step thread between two steps.

        Raises:
            InputError: this is the step thread, in a callback.
            EngineClosedError: closed.
        """
        if self.thread.is_current:
            raise InputError("a callback of the engine must not wait for it: it would wait for itself.")
        self.check_open()
        with self._lock:
            self.check_open()
            future = self._calls.put(function)
        self.thread.wake()
        return future.result()

    def check_integrity(self) -> None:
        """Check the blocks between two steps; AssertionError tells what is wrong."""

        def check() -> None:
            self.blocks.check_integrity(task.cache for task in self.scheduler.running)
            self.speculator.check_integrity()

        self.call(check)

    def measure_steps(self) -> None:
        """Learn what steps cost by trial, for a plan from the first step on; only before any request."""
        self.call(lambda: measure(self.backend, self.speculator.costs, MAX_ROWS))

    def stats(self) -> EngineStats:
        running = list(self.scheduler.running)
        scheduler, counters, blocks = self.scheduler, self._counters, self.blocks
        speculation = self.speculator.counters
        return EngineStats(
            kv_bytes=blocks.layout.num_bytes,
            block_size=blocks.block_size,
            blocks_total=blocks.layout.num_blocks,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            blocks_free=blocks.num_free,
            blocks_shared=blocks.num_shared,
            peak_blocks_used=blocks.peak_blocks_used,
            evictions=blocks.num_evicted,
            live_tokens=blocks.live_slots(task.cache for task in running),
            allocated_tokens=blocks.num_used * blocks.block_size,
            cached_tokens=scheduler.num_found,
            prefix_hit_rate=scheduler.num_found / max(scheduler.num_looked_up, 1),
            running=len(running),
            waiting=len(scheduler.waiting) + len(self._arrivals),
            preemptions=scheduler.num_preempted,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            step_seconds_median=counters.step_seconds(50),
            step_seconds_p95=counters.step_seconds(95),
            drafted_tokens=speculation.drafted,
            accepted_tokens=speculation.accepted,
            acceptance_rate=speculation.accepted / max(speculation.drafted, 1),
            tokens_per_step=speculation.tokens / max(speculation.sequence_steps, 1),
            seconds_saved=speculation.seconds_saved,
            reruns=speculation.reruns,
            speculation_failure=self.speculator.failure,
        )

    def close(self) -> None:
        """End the thread after its current step, fail what is unfinished, free the backend."""
        if self.thread.forked:  # locks may be held by threads that do not exist here
            return
        self.thread.stop()
        with self._lock:
            if self.closed is None:
                self.closed = EngineClosedError("the engine is closed; open it again to go on.")
            self._fail_all(self.closed)
            self.speculator.close()
            self.backend.close()

    # Called by the step thread

    def step(self) -> bool:
        """One step of all running sequences; False when there was nothing to do."""
        started = time.perf_counter()
        self._take_requests()
        self._calls.run()
        self.speculator.propose(self.scheduler.running)
        runs = self.scheduler.schedule()
        if not runs:
            return False
        try:
            for group, pairs in self.blocks.take_copies().items():
                self.backend.copy_blocks(group, pairs)
            batch = self._buffers.fill(runs)
            computing = time.perf_counter()
            logits = self.backend.run(batch)
            computed = time.perf_counter() - computing
        except Exception as error:
            self._fail_step(runs, error)
            return True
        num_tokens = self._postprocess(runs, logits)
        self._counters.count(runs, time.perf_counter() - started)
        if not any(run.reads_prompt for run in runs):
            self.speculator.count_step(runs, num_tokens, computed)
        return True

    def abort(self, error: BaseException) -> None:
        """The loop itself failed: nothing can be trusted, so everything ends."""
        closed = EngineClosedError(f"the engine's step loop failed and is closed: {error!r}. Open it again.")
        closed.__cause__ = error
        with self._lock:
            self.closed = closed
            self._fail_all(closed)

    def _take_requests(self) -> None:
        # Under the lock, what is cancelled has arrived, and what arrives after a cancellation comes with it.
        with self._lock:
            while self._arrivals:
                self.scheduler.add(self._arrivals.popleft())
            cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        for tasks in cancelled:
            self._end_all(tasks, "cancelled")
        if time.monotonic() >= self._next_deadline:
            self._end_overdue()

    def _end_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            tasks = [*self.scheduler.running, *self.scheduler.waiting]
            later = (task.deadline for task in (*tasks, *self._arrivals) if task.deadline > now)
            self._next_deadline = min(later, default=math.inf)
        self._end_all([task for task in tasks if task.deadline <= now], "timeout")

    def _postprocess(self, runs: list[Run[Task]], logits: Float32Array) -> int:
        """Hand out the logits and settle what is in the cache; returns how many tokens were generated."""
        row = num_tokens = 0
        for run in runs:
            task, rows = run.sequence, logits[row : row + run.num_logits]
            row += run.num_logits
            if task.finished:  # a sample beside it failed just now
                continue
            length = len(task.tokens)
            try:
                self._settle(run, task.advance(rows))
            except Exception as error:
                self._fail(task, error)
            else:
                num_tokens += len(task.tokens) - length
                if task.finished:
                    self.scheduler.remove(task)
        return num_tokens

    def _settle(self, run: Run[Task], accepted: TokenIndices) -> None:
        """Keep in the cache what became text, and nothing else."""
        task = run.sequence
        if run.num_drafted:
            self._move_accepted(run, accepted)
            task.cache.truncate(len(task.tokens) - 1)
        task.cache.commit(task.tokens)
        self.speculator.settle(run, accepted)

    def _move_accepted(self, run: Run[Task], accepted: TokenIndices) -> None:
        """Put an accepted path of a tree where its tokens belong: behind one another."""
        first = run.past + run.count - run.num_drafted
        moved = [(first + index, first + place) for place, index in enumerate(accepted) if index != place]
        if moved:
            for group, table in enumerate(run.sequence.cache.tables):
                pairs = [(table.slot(source), table.slot(target)) for source, target in moved]
                self.backend.copy_slots(group, pairs)

    def _end_all(self, tasks: Sequence[Task], reason: FinishReason) -> None:
        for task in tasks:
            if task.scheduled:  # neither over nor refused by the queue
                task.end(reason)
                self.scheduler.remove(task)

    def _fail_step(self, runs: list[Run[Task]], error: Exception) -> None:
        self._counters.failed_steps += 1
        for run in runs:
            if not run.sequence.finished:
                self._fail(run.sequence, error)

    def _fail(self, task: Task, error: Exception) -> None:
        """End a task and its group; each request gets an exception of its own, with the cause."""
        for sibling in task.group:
            self.scheduler.remove(sibling)
        failure = type(error) if isinstance(error, PageletError) else BackendError
        mine = failure(f"the step that served this request failed: {error}")
        mine.__cause__ = error
        task.fail(mine)

    def _fail_all(self, error: PageletError) -> None:
        self._calls.fail(error)
        for task in (*self._arrivals, *self.scheduler.waiting, *self.scheduler.running):
            if not task.finished:
                task.fail(error)
        self._arrivals.clear()
        self.scheduler.clear()
