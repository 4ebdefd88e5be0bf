"""The rounds: every engine does the same thing, one after the other, again and again."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagelet.tools.peers.entrants import Entrant
from pagelet.tools.peers.scenarios import Scenario, prompts
from pagelet.tools.peers.worker import Sample, Worker, WorkerError

_REST_SECONDS = 0.2  # threads of the engine before may still spin

OnProgress = Callable[[str], None]


@dataclass
class Record:
    """What was measured of one entrant.

    Attributes:
        load_s: seconds of each opening, files in the page cache, imports not counted.
        peak_rss_bytes: after the first run of the plain scenario.
        runs: by scenario; warm-ups are not among them.
        failure: why it has no further runs.
    """

    entrant: Entrant
    load_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    runs: dict[str, list[Sample]] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Rounds:
    """How to measure: one round to warm up, then `repeat`; each model is opened `loads` times.

    Nothing new is begun after `limit_s`; what has been measured by then counts.
    """

    scenarios: Sequence[Scenario]
    repeat: int
    threads: int
    allowed_tokens: Sequence[int]
    logs: Path
    loads: int = 3
    limit_s: float = float("inf")


def measure(records: Sequence[Record], rounds: Rounds, on_progress: OnProgress) -> None:
    """Measure the entrants of `records`, interleaved, and write what was found there at once.

    Raises:
        WorkerError: pagelet itself failed; another engine's failure stands in its record.
    """
    end = time.monotonic() + rounds.limit_s
    with contextlib.ExitStack() as stack:
        workers: list[tuple[Worker, Record]] = []
        for index, record in enumerate(records):
            on_progress(f"opening {record.entrant.name}")
            with _failure_noted(record):
                workers.append((_open(record, index, rounds, stack), record))
        for round_index in range(rounds.repeat + 1):
            for scenario in rounds.scenarios:
                if not _is_due(scenario, round_index) or time.monotonic() > end:
                    continue
                for worker, record in workers:
                    if sample := _run(worker, record, scenario, round_index, rounds.allowed_tokens):
                        step = f"round {round_index} of {rounds.repeat}, {scenario.key}"
                        on_progress(f"{step}: {record.entrant.name}, {sample.seconds:.2f} s")


def _open(record: Record, index: int, rounds: Rounds, stack: contextlib.ExitStack) -> Worker:
    tokens = max(scenario.tokens for scenario in rounds.scenarios)
    log = rounds.logs / f"worker-{index}-{record.entrant.engine}.log"
    for attempt in range(rounds.loads):
        worker = Worker(record.entrant, rounds.threads, tokens, log)
        record.load_s.append(worker.load_s)
        if attempt + 1 < rounds.loads:
            worker.close()
    return stack.enter_context(worker)


def _is_due(scenario: Scenario, round_index: int) -> bool:
    """Round 0 warms up what is run in every round; the long ones go without."""
    return scenario.every == 1 or round_index % scenario.every == 1


def _run(
    worker: Worker, record: Record, scenario: Scenario, round_index: int, allowed: Sequence[int]
) -> Sample | None:
    """One run, unless it is not for this engine."""
    entrant = record.entrant
    left_out = (scenario.ours_only and not entrant.is_ours) or (scenario.sequences > 1 and not entrant.many)
    if record.failure or left_out:
        return None
    time.sleep(_REST_SECONDS)
    with _failure_noted(record):
        sample = worker.run(prompts(scenario, round_index, allowed), scenario.new_tokens)
        record.peak_rss_bytes = record.peak_rss_bytes or sample.peak_rss_bytes
        if round_index:
            record.runs.setdefault(scenario.key, []).append(sample)
        return sample
    return None


@contextlib.contextmanager
def _failure_noted(record: Record) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        if record.entrant.is_ours:
            raise
        record.failure = str(error)
