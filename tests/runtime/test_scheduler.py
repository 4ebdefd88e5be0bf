import numpy as np
import pytest
from fake_backend import FakeBackend, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.runtime.batch import StepBuffers
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.scheduler import Run, Scheduler, Sequence
from pagelet.runtime.sequence_cache import SequenceCache

CONTEXT = 40


class Job(Sequence):
    """A sequence that takes the likeliest token until it has `reply` of them."""

    def __init__(self, prompt: list[int], reply: int, cache: SequenceCache, rank: tuple[int, int]) -> None:
        super().__init__(list(prompt), cache, rank)
        self.prompt, self.reply = prompt, reply

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Bench:
    """A scheduler with a fake backend, stepped by hand; every step is checked."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_sequences: int = 4,
        budget: int = 8,
        windows: tuple[int, ...] = (0,),
        prefix_cache: bool = True,
    ) -> None:
        self.windows = windows
        self.backend = FakeBackend(
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=CONTEXT,
            windows=windows,
            max_step_tokens=budget,
        )
        self.blocks = BlockManager(self.backend.layout, CONTEXT, prefix_cache=prefix_cache)
        self.scheduler: Scheduler[Job] = Scheduler(
            self.blocks, max_sequences=max_sequences, max_step_tokens=budget
        )
        self.max_sequences, self.budget = max_sequences, budget
        self.buffers = StepBuffers(
            max_tokens=budget,
            max_sequences=max_sequences,
            max_blocks=self.blocks.max_blocks,
            num_groups=len(windows),
        )
        self.jobs: list[Job] = []

    def add(self, prompt: list[int], reply: int, priority: int = 0) -> Job:
        job = Job(prompt, reply, self.blocks.new_cache(), (-priority, len(self.jobs)))
        self.jobs.append(job)
        self.scheduler.add(job)
        return job

    def step(self) -> list[Run[Job]]:
        before = list(self.scheduler.running)
        runs = self.scheduler.schedule()
        self.check(runs, before)
        if runs:
            for group, pairs in self.blocks.take_copies().items():
                self.backend.copy_blocks(group, pairs)
            logits = iter(self.backend.run(self.buffers.fill(runs)))
            for run in runs:
                run.sequence.cache.commit(run.sequence.tokens)
                if run.num_logits:
                    run.sequence.tokens.append(int(next(logits).argmax()))
                if len(run.sequence.generated) == run.sequence.reply:
                    self.scheduler.remove(run.sequence)
        self.blocks.check_integrity(job.cache for job in self.jobs)
        return runs

    def check(self, runs: list[Run[Job]], before: list[Job]) -> None:
        assert sum(run.count for run in runs) <= self.budget
        assert len(self.scheduler.running) <= self.max_sequences
        assert len({run.sequence for run in runs}) == len(runs)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            assert queue == sorted(queue, key=lambda job: job.rank)
        # All that generate are in the step, before any prompt.
        generating = [run.sequence in before and run.num_logits == run.count == 1 for run in runs]
        assert generating == sorted(generating, reverse=True)
        served = {run.sequence for run in runs}
        assert all(job in served for job in self.scheduler.running if job.num_unread == 1 and job.generated)
        if self.scheduler.running:
            assert self.scheduler.running[0] in served, "the first in rank does not advance"

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        pytest.fail("the scheduler does not come to an end")


JOBS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 10),  # reply
        st.integers(0, 1),  # priority
        st.integers(0, 4),  # steps until the next arrival
        st.sampled_from([None, None, None, 0, 2]),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    JOBS,
    st.integers(10, 24),
    st.integers(1, 5),
    st.integers(0, 12),
    st.sampled_from([(0,), (7,), (0, 3, 9)]),
    st.booleans(),
)
def test_any_schedule_gives_each_sequence_its_own_tokens(
    jobs: list[tuple[int, int, int, int, int | None]],
    num_blocks: int,
    max_sequences: int,
    extra: int,
    windows: tuple[int, ...],
    prefix_cache: bool,
) -> None:
    bench = Bench(
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        budget=max_sequences + extra,
        windows=windows,
        prefix_cache=prefix_cache,
    )
    cancelled = set()
    for number, (prompt, reply, priority, gap, cancel) in enumerate(jobs):
        job = bench.add([(7 * (number % 3) + 3 * i) % 320 for i in range(prompt)], reply, priority)
        for step in range(gap + 1):
            if step == cancel and len(job.generated) < reply:
                bench.scheduler.remove(job)
                cancelled.add(job)
                cancel = None
            bench.step()
    bench.run()
    assert bench.blocks.num_used == 0
    for job in bench.jobs:
        expected = greedy(job.prompt, job.reply, 320, windows)
        assert job.generated == (expected[: len(job.generated)] if job in cancelled else expected)


def test_a_long_prompt_is_read_in_chunks_and_stalls_nobody() -> None:
    bench = Bench(budget=8, num_blocks=32)
    short = bench.add([1, 2], reply=12)
    bench.step()
    bench.add(list(range(30)), reply=2)
    for _ in range(5):
        before = len(short.generated)
        bench.step()
        assert len(short.generated) == before + 1
    assert list(bench.backend.batches)[1:6] == [(1, 7), (1, 7), (1, 7), (1, 7), (1, 2)]


def test_the_newest_is_preempted_and_comes_back_with_the_same_tokens() -> None:
    bench = Bench(num_blocks=10, max_sequences=4, budget=16)
    jobs = [bench.add([10 * i, 1, 2], reply=24) for i in range(3)]
    finished: list[Job] = []
    while runs := bench.step():
        finished += [run.sequence for run in runs if len(run.sequence.generated) == 24]
    assert bench.scheduler.num_preempted > 0
    assert finished[0] is jobs[0]
    for job in jobs:
        assert job.generated == greedy(job.prompt, 24, 320)


def test_first_come_first_served_and_priority_before_that() -> None:
    bench = Bench(max_sequences=1, budget=4)
    jobs = [bench.add([i], reply=1, priority=priority) for i, priority in enumerate([0, 0, 5])]
    order = [bench.step()[0].sequence for _ in range(3)]
    assert order == [jobs[2], jobs[0], jobs[1]]


def test_a_newcomer_waits_until_its_whole_prompt_fits_beside_what_others_still_read() -> None:
    bench = Bench(num_blocks=12, budget=16)
    slow = bench.add(list(range(36)), reply=2)
    slow.max_chunk = 4  # so that the step has room for others
    late = bench.add(list(range(20)), reply=2)
    bench.step()
    assert bench.blocks.num_free == 11
    assert bench.scheduler.waiting == [late], "9 blocks of 12 are promised, 5 are needed"
    bench.run()
    assert bench.scheduler.num_preempted == 0
    for job in (slow, late):
        assert job.generated == greedy(job.prompt, 2, 320)


def test_a_newcomer_leaves_each_running_sequence_a_block_to_grow_into() -> None:
    bench = Bench(num_blocks=10, budget=64)
    first = bench.add([1, 2, 3, 4], reply=8)
    late = bench.add(list(range(36)), reply=2)
    bench.step()
    assert bench.blocks.num_free == 9, "as many as the newcomer's prompt takes"
    assert bench.scheduler.waiting == [late]
    bench.run()
    assert bench.scheduler.num_preempted == 0
    for job in (first, late):
        assert job.generated == greedy(job.prompt, job.reply, 320)


def test_the_first_that_waits_is_looked_at_again_when_another_was_removed() -> None:
    bench = Bench(num_blocks=12, budget=16)
    slow = bench.add(list(range(36)), reply=2)
    slow.max_chunk = 4
    bench.add([1, 2, 3, 4], reply=8)
    late = bench.add(list(range(50, 70)), reply=2)
    bench.step()
    room = bench.blocks.room
    bench.step()
    bench.scheduler.remove(slow)
    assert bench.blocks.room == room, "the other one took what the removed one gave back"
    assert bench.scheduler.waiting == [late]
    bench.step()
    assert bench.scheduler.waiting == [], "nothing is promised any more"
    bench.run()
    assert late.generated == greedy(late.prompt, 2, 320)


def test_buffers_are_reused_and_hold_what_the_contract_says() -> None:
    bench = Bench(num_blocks=16, block_size=4, budget=8)
    bench.add([5, 6, 7, 8, 9], reply=3)
    bench.add(list(range(20)), reply=1)
    runs = bench.scheduler.schedule()
    batch = bench.buffers.fill(runs)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 0, 1, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.cumulative_sequence_length.tolist() == [0, 5, 8]
    assert batch.past_seqlens.tolist() == [0, 0]
    assert batch.logits_indices.tolist() == [4]
    assert batch.block_tables[0].tolist() == [[0, 1, *[-1] * 8], [2, *[-1] * 9]]
    assert np.shares_memory(bench.buffers.fill(runs).input_ids, batch.input_ids)
