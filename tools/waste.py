"""How much of the KV cache holds tokens: the real scheduler and block manager over a trace of a real service.

Nothing is computed but the schedule: a step takes a fixed time and a time per token, tokens are made up.
Beside it stands what reserving each sequence's memory in one piece would have held, in the same run.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import InputError
from pagelet.runtime import Engine, Request, SamplingParams
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.cache_layout import CacheLayout, GroupLayout
from pagelet.runtime.scheduler import Scheduler
from pagelet.runtime.scheduler import Sequence as Row
from pagelet.tools.cli import common

_STEP_SECONDS = 0.008
_TOKEN_SECONDS = 0.00005


@dataclass(frozen=True)
class TraceRequest:
    """Arrival in seconds from the first one, and lengths in tokens."""

    arrival: float
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class WasteResult:
    """Of one run, per step: tokens that sequences hold, and slots that each way of storing them takes.

    `paged` counts shared blocks once and unreferenced cached ones not at all; `whole_context` reserves the
    longest context for every running sequence, `longest_reply` its prompt and the longest reply.
    """

    live: NDArray[np.int64]
    paged: NDArray[np.int64]
    whole_context: NDArray[np.int64]
    longest_reply: NDArray[np.int64]
    requests: int
    preemptions: int

    def used(self, slots: NDArray[np.int64]) -> float:
        """Live tokens over allocated slots, over all steps."""
        return float(self.live.sum() / slots.sum())


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Rows of TIMESTAMP, ContextTokens, GeneratedTokens, as in the Azure LLM inference traces."""
    requests: list[TraceRequest] = []
    first: datetime | None = None
    for row in csv.DictReader(common.read_text(path).splitlines()):
        try:
            # Seven digits of a second are one more than Python reads.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            arrival = (at - first).total_seconds()
            requests.append(TraceRequest(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}, request {len(requests) + 1}: not a row of a trace ({error!r})."
            ) from error
        if len(requests) == limit:
            break
    return requests


def simulate(
    requests: Sequence[TraceRequest],
    *,
    block_size: int,
    cache_tokens: int = 131_072,
    max_sequences: int = 64,
    max_step_tokens: int = 512,
    speed: float = 1.0,
) -> WasteResult:
    """Serve the trace, its arrivals `speed` times as fast, in a cache of `cache_tokens`."""
    context = max(request.prompt_tokens + request.new_tokens for request in requests)
    reply = max(request.new_tokens for request in requests)
    layout = CacheLayout(
        block_size, (GroupLayout(0, cache_tokens // block_size, block_bytes=1),), max_step_tokens
    )
    blocks = BlockManager(layout, context)
    scheduler: Scheduler[_Served] = Scheduler(
        blocks, max_sequences=max_sequences, max_step_tokens=max_step_tokens
    )
    samples: list[tuple[int, int, int, int]] = []
    now = 0.0
    arrivals = _arrivals(requests, blocks, speed)
    upcoming = next(arrivals, None)
    while upcoming or scheduler.running or scheduler.waiting:
        while upcoming and upcoming.arrival <= now:
            scheduler.add(upcoming)
            upcoming = next(arrivals, None)
        runs = scheduler.schedule()
        if not runs:
            assert upcoming
            now = upcoming.arrival
            continue
        samples.append(_sample(scheduler, block_size, context, reply))
        now += _STEP_SECONDS + _TOKEN_SECONDS * sum(run.count for run in runs)
        for run in runs:
            run.sequence.take(run.num_logits)
            if run.sequence.finished:
                scheduler.remove(run.sequence)
    live, paged, whole, longest = np.array(samples, np.int64).T
    return WasteResult(live, paged, whole, longest, len(requests), scheduler.num_preempted)


class _Served(Row):
    """A request of the trace: its tokens are its own number, so that no two share a prefix."""

    def __init__(self, number: int, request: TraceRequest, arrival: float, blocks: BlockManager) -> None:
        super().__init__([number] * request.prompt_tokens, blocks.new_cache(), (0, number))
        self.arrival = arrival
        self.reserved = request.prompt_tokens
        self._number = number
        self._length = request.prompt_tokens + request.new_tokens

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self._length

    def take(self, num_logits: int) -> None:
        """The step has read its tokens; with logits it has a new one."""
        self.cache.commit(self.tokens)
        if num_logits:
            self.tokens.append(self._number)


def _arrivals(requests: Sequence[TraceRequest], blocks: BlockManager, speed: float) -> Iterator[_Served]:
    for number, request in enumerate(requests):
        yield _Served(number, request, request.arrival / speed, blocks)


def _sample(
    scheduler: Scheduler[_Served], block_size: int, context: int, reply: int
) -> tuple[int, int, int, int]:
    running = scheduler.running
    live = sum(sequence.cache.length for sequence in running)
    return (
        live,
        scheduler.blocks.num_used * block_size,
        len(running) * context,
        sum(sequence.reserved + reply for sequence in running),
    )


def replay(bundle: Path, requests: Sequence[TraceRequest], speed: float = 1.0) -> float:
    """Serve the requests with a real engine; live tokens over allocated slots, sampled while it is busy."""
    generator = np.random.default_rng(0)
    arrivals = [request.arrival / speed for request in requests]
    live = allocated = 0
    with Engine.open(bundle) as engine:
        began, handles = time.monotonic(), list[Request]()
        while len(handles) < len(requests) or not all(handle.done for handle in handles):
            while len(handles) < len(requests) and arrivals[len(handles)] <= time.monotonic() - began:
                request = requests[len(handles)]
                tokens = generator.integers(0, engine.vocab_size, request.prompt_tokens).tolist()
                params = SamplingParams(max_tokens=request.new_tokens, ignore_eos=True)
                handles.append(engine.submit(tokens, params))
            stats = engine.stats()
            live, allocated = live + stats.live_tokens, allocated + stats.allocated_tokens
            time.sleep(0.005)
        for handle in handles:
            handle.result()
    return live / allocated


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    parser.add_argument(
        "--bundle", type=Path, help="serve the requests for real, ten times as fast as they came"
    )
    args = parser.parse_args()
    requests = read_trace(args.trace, args.requests)
    if args.bundle:
        print(f"{len(requests)} requests served by {args.bundle}: {replay(args.bundle, requests, 10.0):.2%}")
        return 0
    results = {size: simulate(requests, block_size=size) for size in (16, 32, 64)}
    print(
        f"{len(requests)} requests, {len(results[16].live)} steps; share of allocated slots that hold tokens"
    )
    for size, result in results.items():
        print(f"  paged, blocks of {size:<4}                 {result.used(result.paged):.2%}")
    print(f"  reserving prompt + longest reply     {results[16].used(results[16].longest_reply):.2%}")
    print(f"  reserving the whole context          {results[16].used(results[16].whole_context):.2%}")
    if args.plot:
        plot(results[16], args.plot)
    return 0


def plot(result: WasteResult, path: Path) -> None:
    """Slots over the steps, of each way to store the same sequences."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    lines: list[tuple[str, NDArray[np.int64], str]] = [
        ("reserving the whole context", result.whole_context, "#c44e52"),
        ("reserving prompt + longest reply", result.longest_reply, "#dd8452"),
        ("paged, blocks of 16", result.paged, "#4c72b0"),
        ("tokens held", result.live, "#222222"),
    ]
    for name, values, color in lines:
        axes.plot(_smooth(values), label=name, color=color, linewidth=4 if "paged" in name else 1.2)
    axes.set(xlabel="step", ylabel="token slots", yscale="log", title="KV cache held by the same sequences")
    axes.legend(loc="lower right", ncols=2, fontsize=9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _smooth(values: NDArray[np.int64]) -> NDArray[Any]:
    width = max(len(values) // 400, 1)
    usable = len(values) // width * width
    return np.asarray(values[:usable].reshape(-1, width).mean(axis=1)).repeat(width)


if __name__ == "__main__":
    sys.exit(main())
