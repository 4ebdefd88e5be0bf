"""A soak: random requests, cancellations, deadlines and forks from many threads, then a look at what is left.

Every reply to a known prompt must be the one that was given the first time; blocks must all come back, and
memory outside the pool must stay flat.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pagelet.models.errors import PageletError
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.tools.memory import anonymous_rss


@dataclass
class Report:
    """What the threads did, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)


class Soak:
    """Threads that use one engine in random ways until told to stop."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.report = Report()
        self.stop = threading.Event()
        self._engine = engine
        self._seed = seed
        chooser = random.Random(seed)
        size = min(engine.vocab_size, 30_000)
        shared = [chooser.randrange(size) for _ in range(150)]
        self._prompts = [
            shared[: chooser.choice((0, 40, 150))]
            + [chooser.randrange(size) for _ in range(chooser.randint(1, 120))]
            for _ in range(24)
        ]
        self._expected: dict[tuple[int, int], tuple[int, ...]] = {}

    def learn(self) -> None:
        """Each prompt alone, greedy and seeded: the replies that all later ones must equal."""
        for index, prompt in enumerate(self._prompts):
            for kind in range(2):
                self._expected[index, kind] = self._engine.generate(prompt, _params(kind)).token_ids

    def work(self, number: int) -> None:
        chooser = random.Random(f"{self._seed}-{number}")
        while not self.stop.is_set():
            try:
                self._one(chooser)
            except PageletError as error:
                self.report.note(type(error).__name__)
            except Exception as error:
                self.report.fault(repr(error))

    def _one(self, chooser: random.Random) -> None:
        index, kind = chooser.randrange(len(self._prompts)), chooser.randrange(2)
        prompt, expected = self._prompts[index], self._expected[index, kind]
        action = chooser.choices(("finish", "cancel", "deadline", "fork", "close"), (10, 2, 1, 2, 2))[0]
        self.report.note(action)
        if action == "close":
            with self._engine.stream(prompt, _params(kind)) as stream:
                next(iter(stream))
            return
        timeout = chooser.uniform(0.05, 1.0) if action == "deadline" else None
        request = self._engine.submit(prompt, _params(kind), timeout=timeout)
        if action == "cancel":
            time.sleep(chooser.uniform(0, 0.3))
            request.cancel()
        if action == "fork":
            time.sleep(chooser.uniform(0, 0.3))
            self._engine.fork(request, SamplingParams(max_tokens=8, ignore_eos=True)).result(timeout=300)
        found = request.result(timeout=300).token_ids
        if found != expected[: len(found)] or (action == "finish" and len(found) != len(expected)):
            self.report.fault(f"prompt {index}: {found} instead of {expected}")


def _params(kind: int) -> SamplingParams:
    if kind:
        return SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.95, seed=17)
    return SamplingParams(max_tokens=24, ignore_eos=True)


def soak(engine: Engine, seconds: float, threads: int = 8, seed: int = 0) -> Report:
    """Run it; faults are in the report, none if all is well."""
    run = Soak(engine, seed)
    run.learn()
    workers = [threading.Thread(target=run.work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    time.sleep(seconds * 0.2)
    before = anonymous_rss()
    time.sleep(seconds * 0.8)
    run.stop.set()
    for worker in workers:
        worker.join(timeout=300)
        if worker.is_alive():
            run.report.fault("a request is stuck")
    grown = anonymous_rss() - before
    run.report.counts["grown KiB after the first fifth"] = grown >> 10
    if engine.stats().blocks_used or engine.stats().running:
        run.report.fault(f"left behind: {engine.stats()}")
    engine.check_integrity()
    return run.report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--kv-memory", default="24MiB", help="small, so that blocks run out; default: 24MiB")
    args = parser.parse_args()
    with Engine.open(args.bundle, EngineConfig(kv_memory=args.kv_memory)) as engine:
        report = soak(engine, args.seconds, args.threads)
        print(engine.stats())
    for name, count in sorted(report.counts.items()):
        print(f"{count:>8}  {name}")
    for fault in report.faults[:10]:
        print("FAULT", fault)
    print("clean" if not report.faults else f"{len(report.faults)} faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
