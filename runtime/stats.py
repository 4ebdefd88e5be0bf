"""EngineStats: what an engine has done and holds, and the bounded counters behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagelet.runtime.scheduler import Run, S

# Step times are taken over this many steps, so that statistics never grow.
_WINDOW = 512


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Tokens and requests count from the opening on; step times cover the last 512 steps.

    Attributes:
        kv_bytes: bytes of the target's cache, allocated once; a draft's is not counted here.
        block_size: tokens of a block.
        blocks_total: of all groups of layers with the same window; used, cached and free ones add up to it.
        blocks_used: in the tables of sequences; `blocks_shared` of them in several.
        blocks_cached: used by nobody, but kept for requests that begin with the same tokens; they are given
            up, the least recently used first, when a block is needed and none is free.
        peak_blocks_used: the most that any step used.
        evictions: cached blocks that were given up.
        live_tokens: slots of used blocks that hold what a sequence may attend to; shared ones count once.
        allocated_tokens: slots of all used blocks. 1 - live_tokens / allocated_tokens is the waste.
        cached_tokens: tokens of sequences that were in the cache when they started, and not read again.
        prefix_hit_rate: that, as a share of all tokens that sequences started with.
        running, waiting: sequences.
        prefill_tokens, decode_tokens: tokens read by steps; a token read again after a preemption
            counts again.
        step_seconds_median, step_seconds_p95: of one step, sampling included; 0 before the first.
        drafted_tokens: candidates that steps verified beside the text; `accepted_tokens` of them became
            text, which is the `acceptance_rate`.
        tokens_per_step: generated tokens of a sequence in one step, 1 without speculation.
        seconds_saved: estimate of the time that speculation saved so far; below 0 where it cost time.
        reruns: tokens that a step without candidates decided, where a target's rows vary with the batch.
        speculation_failure: why a proposer was given up; None while all work.
    """

    kv_bytes: int
    block_size: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_shared: int
    peak_blocks_used: int
    evictions: int
    live_tokens: int
    allocated_tokens: int
    cached_tokens: int
    prefix_hit_rate: float
    running: int
    waiting: int
    preemptions: int
    steps: int
    failed_steps: int
    prefill_tokens: int
    decode_tokens: int
    step_seconds_median: float
    step_seconds_p95: float
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    tokens_per_step: float
    seconds_saved: float
    reruns: int
    speculation_failure: str | None


class StepCounters:
    """Counts steps, in constant memory."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._seconds = np.zeros(_WINDOW)

    def count(self, runs: Sequence[Run[S]], seconds: float) -> None:
        """A step; of a sequence that decodes, candidates do not count."""
        read = sum(run.count - run.num_drafted for run in runs)
        decoded = sum(not run.reads_prompt for run in runs)
        self.decode_tokens += decoded
        self.prefill_tokens += read - decoded
        self._seconds[self.steps % _WINDOW] = seconds
        self.steps += 1

    def step_seconds(self, percentile: float) -> float:
        window = self._seconds[: self.steps]
        return float(np.percentile(window, percentile)) if len(window) else 0.0
