"""The step loop: schedule, run, sample, deliver, again and again, in a thread of its own.

Callers of any thread leave work at the door (`_arrivals`, `_cancelled`); the step thread alone touches
the scheduler, the block pool and the backend.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from pagelet.models.errors import BackendError, CapacityError, EngineClosedError, PageletError
from pagelet.runtime.backends.base import Backend, Float32Array
from pagelet.runtime.batch import StepBuffers
from pagelet.runtime.block_pool import BlockPool, BlockTable
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.request import FinishReason, Request
from pagelet.runtime.scheduler import Run, Scheduler
from pagelet.runtime.stats import EngineStats, StepCounters
from pagelet.runtime.step_thread import StepThread
from pagelet.runtime.tasks import Task


class StepLoop:
    """Runs tasks over a backend until they have finished.

    Attributes:
        context: most tokens of one sequence.
        closed: why nothing is taken any more; None while open.
    """

    def __init__(self, backend: Backend, config: EngineConfig) -> None:
        layout = backend.layout
        self.context = min(backend.max_context, config.max_context or backend.max_context)
        self.closed: EngineClosedError | None = None
        self.pool = BlockPool(layout.num_blocks, layout.block_size)
        self.scheduler: Scheduler[Task] = Scheduler(
            self.pool, max_sequences=config.max_sequences, max_step_tokens=config.max_step_tokens
        )
        self._backend = backend
        self._layout = layout
        self._max_queue = config.max_queue
        self._max_blocks = self.pool.blocks_for(self.context)
        self._buffers = StepBuffers(
            max_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            max_blocks=self._max_blocks,
            max_context=self.context,
        )
        self._counters = StepCounters()
        self._lock = threading.Lock()
        self._arrivals: deque[Task] = deque()
        self._cancelled: deque[Request] = deque()
        self._numbers = itertools.count()
        self._next_deadline = math.inf
        self.thread = StepThread(self)

    # Called by any thread

    def new_table(self) -> BlockTable:
        return BlockTable(self.pool, self._max_blocks)

    def new_rank(self, priority: int = 0) -> tuple[int, int]:
        return -priority, next(self._numbers)

    def check_open(self) -> None:
        """Raise EngineClosedError if nothing can be queued from here."""
        self.thread.check_process()
        if self.closed is not None:
            raise self.closed

    def enqueue(self, tasks: Sequence[Task]) -> None:
        """Queue tasks of one group.

        Raises:
            CapacityError: the queue is full.
            EngineClosedError: closed.
        """
        self.check_open()
        with self._lock:
            self.check_open()
            num_waiting = len(self._arrivals) + len(self.scheduler.waiting)
            if num_waiting + len(tasks) > self._max_queue:
                raise CapacityError(
                    f"{num_waiting} sequences wait already, and max_queue is {self._max_queue}: "
                    f"no room for {len(tasks)} more. Try again later."
                )
            self._arrivals.extend(tasks)
            self._next_deadline = min(self._next_deadline, tasks[0].deadline)
        self.thread.wake()

    def cancel(self, request: Request) -> None:
        self._cancelled.append(request)
        self.thread.wake()

    def stats(self) -> EngineStats:
        running = list(self.scheduler.running)
        counters = self._counters
        return EngineStats(
            kv_bytes=self._layout.num_bytes,
            block_size=self._layout.block_size,
            blocks_total=self._layout.num_blocks,
            blocks_used=self.pool.num_used,
            blocks_free=self.pool.num_free,
            cached_tokens=sum(task.table.length for task in running),
            running=len(running),
            waiting=len(self.scheduler.waiting) + len(self._arrivals),
            preemptions=self.scheduler.num_preempted,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            step_seconds_median=counters.step_seconds(50),
            step_seconds_p95=counters.step_seconds(95),
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
            self._backend.close()

    # Called by the step thread

    def step(self) -> bool:
        """One step of all running sequences; False when there was nothing to do."""
        started = time.perf_counter()
        self._take_requests()
        runs = self.scheduler.schedule()
        if not runs:
            return False
        try:
            logits = self._backend.run(self._buffers.fill(runs))
        except Exception as error:
            self._fail_step(runs, error)
            return True
        self._postprocess(runs, logits)
        self._counters.count([run.count for run in runs], time.perf_counter() - started)
        return True

    def abort(self, error: Exception) -> None:
        """The loop itself failed: nothing can be trusted, so everything ends."""
        closed = EngineClosedError(f"the engine's step loop failed and is closed: {error!r}. Open it again.")
        closed.__cause__ = error
        with self._lock:
            self.closed = closed
            self._fail_all(closed)

    def _take_requests(self) -> None:
        # Cancellations first: what was cancelled before this line has arrived before it too.
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        while self._arrivals:
            self.scheduler.add(self._arrivals.popleft())
        for request in cancelled:
            self._end_all(request.samples, "cancelled")
        if time.monotonic() >= self._next_deadline:
            self._end_overdue()

    def _end_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            tasks = [*self.scheduler.running, *self.scheduler.waiting]
            later = (task.deadline for task in (*tasks, *self._arrivals) if task.deadline > now)
            self._next_deadline = min(later, default=math.inf)
        self._end_all([task for task in tasks if task.deadline <= now], "timeout")

    def _postprocess(self, runs: list[Run[Task]], logits: Float32Array) -> None:
        row = 0
        for run in runs:
            task, rows = run.sequence, logits[row : row + run.num_logits]
            row += run.num_logits
            if task.finished:  # a sample beside it failed just now
                continue
            try:
                task.advance(rows)
            except Exception as error:
                self._fail(task, error)
            else:
                if task.finished:
                    self.scheduler.remove(task)

    def _end_all(self, tasks: Sequence[Task], reason: FinishReason) -> None:
        for task in tasks:
            if not task.finished:
                self.scheduler.remove(task)
                task.end(reason)

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
        for task in (*self._arrivals, *self.scheduler.waiting, *self.scheduler.running):
            if not task.finished:
                task.fail(error)
        self._arrivals.clear()
        self.scheduler.clear()
