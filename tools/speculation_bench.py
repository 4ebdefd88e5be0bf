"""What speculative decoding saves: prompts run without it and with it, in turns; the texts must be the same.

Both run in one engine. Exit status 1: a text was different.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError, PageletError
from pagelet.runtime import Completion, Engine, EngineConfig
from pagelet.runtime.config import Speculate
from pagelet.tools.cli import common
from pagelet.tools.peers.report import machine, number
from pagelet.tools.progress import bar
from pagelet.tools.speculation_tasks import NAMES, Task, Workload, load

OnRun = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Run:
    """One reply: decode tokens per second, and what was guessed for it."""

    tokens_per_second: float
    new_tokens: int
    drafted: int = 0
    accepted: int = 0

    @property
    def steps(self) -> int:
        """Of decoding: each gives a token and those that were guessed right; the prompt gives the first."""
        return self.new_tokens - 1 - self.accepted


@dataclass(frozen=True)
class Pair:
    """The same prompt without speculation and with it, one right after the other.

    `answered`: whether the reply is what the task hopes for; None: it hopes for nothing.
    """

    plain: Run
    speculating: Run
    identical: bool
    answered: bool | None

    @property
    def ratio(self) -> float:
        return self.speculating.tokens_per_second / self.plain.tokens_per_second


@dataclass(frozen=True)
class Spread:
    """A median and its range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Result:
    """Of one workload, or of several together.

    Attributes:
        plain, speculating: decode tokens per second of the replies.
        ratio: of the pairs: the machine drifts, and two runs in a row see the same of it.
        acceptance_rate: accepted over drafted tokens; None: nothing was drafted.
        answered: the share of replies that are what their tasks hope for; None: these hope for nothing.
    """

    name: str
    plain: Spread
    speculating: Spread
    ratio: Spread
    acceptance_rate: float | None
    tokens_per_step: float
    drafted_per_step: float
    answered: float | None
    identical: bool
    is_evidence: bool

    @classmethod
    def of(cls, name: str, pairs: Sequence[Pair], is_evidence: bool = True) -> "Result":
        runs = [pair.speculating for pair in pairs]
        drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
        steps = sum(run.steps for run in runs)
        answered = [pair.answered for pair in pairs if pair.answered is not None]
        return cls(
            name=name,
            plain=Spread.of([pair.plain.tokens_per_second for pair in pairs]),
            speculating=Spread.of([run.tokens_per_second for run in runs]),
            ratio=Spread.of([pair.ratio for pair in pairs]),
            acceptance_rate=accepted / drafted if drafted else None,
            tokens_per_step=(steps + accepted) / steps,
            drafted_per_step=drafted / steps,
            answered=sum(answered) / len(answered) if answered else None,
            identical=all(pair.identical for pair in pairs),
            is_evidence=is_evidence,
        )


def measure(
    plain: Engine, speculating: Engine, workloads: Sequence[Workload], repeat: int, on_run: OnRun
) -> dict[str, list[Pair]]:
    """Pairs by workload, `repeat` for each task; every other one begins with speculation.

    Both may be one engine: the plain requests ask for no guesses.
    """
    jobs = [(workload, task) for workload in workloads for task in workload.tasks]
    pairs: dict[str, list[Pair]] = {workload.name: [] for workload in workloads}
    _generate(plain, *jobs[0], speculate=False)  # warm-up: the first steps are slower
    _generate(speculating, *jobs[0], speculate=True)
    for turn in range(repeat):
        for index, (workload, task) in enumerate(jobs):
            on_run(turn * len(jobs) + index, repeat * len(jobs), f"round {turn + 1}, {workload.name}")
            pairs[workload.name].append(_pair(plain, speculating, workload, task, bool((turn + index) % 2)))
    return pairs


def _pair(plain: Engine, speculating: Engine, workload: Workload, task: Task, reverse: bool) -> Pair:
    turns = [(plain, False), (speculating, True)]
    if reverse:
        turns.reverse()
    replies = [_generate(engine, workload, task, speculate=speculate) for engine, speculate in turns]
    first, second = reversed(replies) if reverse else replies
    identical = first.token_ids == second.token_ids
    return Pair(_run(first), _run(second), identical, task.is_answered(second.text))


def _generate(engine: Engine, workload: Workload, task: Task, *, speculate: bool) -> Completion:
    reply = engine.generate(task.prompt, workload.params(task), speculate=speculate)
    if reply.usage.completion_tokens != task.new_tokens:
        raise PageletError(
            f"{workload.name}: a reply has {reply.usage.completion_tokens} of {task.new_tokens} tokens "
            f"({reply.finish_reason}); give more --kv-memory, or take a model with a longer context."
        )
    return reply


def _run(reply: Completion) -> Run:
    usage, speed = reply.usage, reply.timings.decode_tokens_per_second
    assert speed  # there is more than one token
    return Run(speed, usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens)


def results(workloads: Sequence[Workload], pairs: dict[str, list[Pair]]) -> list[Result]:
    """One for each workload, and one for all that are evidence, if there are several."""
    found = [Result.of(workload.name, pairs[workload.name], workload.is_evidence) for workload in workloads]
    evidence = [workload.name for workload in workloads if workload.is_evidence]
    if len(evidence) > 1:
        found.append(Result.of("all but loops", [pair for name in evidence for pair in pairs[name]]))
    return found


def table(found: Sequence[Result]) -> str:
    """Markdown, a row per result."""
    head = (
        "workload", "plain, tok/s", "speculating, tok/s", "ratio",
        "accepted", "tokens a step", "drafted a step", "answers right", "text",
    )  # fmt: skip
    rows = [head, ("---",) * len(head), *(_row(result) for result in found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.name if result.is_evidence else f"{result.name} (loops)",
        _spread(result.plain),
        _spread(result.speculating),
        f"**{number(result.ratio.median)}×** [{number(result.ratio.least)}–{number(result.ratio.most)}]",
        _share(result.acceptance_rate),
        number(result.tokens_per_step),
        number(result.drafted_per_step),
        _share(result.answered),
        "the same" if result.identical else "DIFFERENT",
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _spread(spread: Spread) -> str:
    return f"{number(spread.median)} [{number(spread.least)}–{number(spread.most)}]"


def plot(found: Sequence[Result], path: Path) -> None:
    """Tokens per second without and with speculation, with the range of the runs. Needs matplotlib."""
    import matplotlib.pyplot as plt

    canvas, axis = plt.subplots(figsize=(8, 0.75 * len(found) + 1.2))
    for name, color, shift in (("plain", "#b0b0b0", -0.2), ("speculating", "#4c72b0", 0.2)):
        spreads = [getattr(result, name) for result in found]
        medians = [spread.median for spread in spreads]
        ranges = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        places = [index + shift for index in range(len(found))]
        axis.barh(places, medians, 0.38, xerr=ranges, color=color, label=name, error_kw={"linewidth": 1})
    axis.set_yticks(range(len(found)), [f"{r.name}: {number(r.ratio.median)}×" for r in found])
    axis.invert_yaxis()
    axis.set_title("decode, tok/s (more is better)", fontsize=10)
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="center right")
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return run(args)
    except PageletError as error:
        print(f"speculation_bench: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagelet.tools.speculation_bench", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--workloads", default=",".join(NAMES), help="default: %(default)s; news only if --news is given"
    )
    parser.add_argument("--news", type=Path, metavar="FILE", help="text with one article per line")
    parser.add_argument(
        "--speculate", choices=("ngram", "draft", "auto"), help="default: draft if one is given, or ngram"
    )
    parser.add_argument("--draft", type=Path, metavar="BUNDLE", help="a smaller model that guesses")
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="N", help="of each step; default: as many as should pay"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--kv-memory", default="128MiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="timed rounds; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs the extra: plot)")
    return parser


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.repeat <= 1000:
        raise InputError(f"--repeat is {args.repeat}; expected 1 to 1000.")
    if args.plot and find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'pagelet[plot]'.")
    workloads = _workloads(args)
    speculate: Speculate = args.speculate or ("draft" if args.draft else "ngram")
    # No prompt is found in the cache, and guesses come from the text at hand (share_ngrams is off).
    config = EngineConfig(
        threads=args.threads,
        kv_memory=args.kv_memory,
        prefix_cache=False,
        speculate=speculate,
        draft=args.draft,
        num_draft_tokens=args.num_draft_tokens,
    )
    # One engine for both: two have their memory in different places, which alone makes some percent.
    with Engine.open(args.bundle, config) as engine, bar("measuring", "pair") as show:
        pairs = measure(engine, engine, workloads, args.repeat, show)
    found = results(workloads, pairs)
    print(json.dumps(_document(found, pairs, config, args.repeat), indent=1) if args.json else table(found))
    if args.plot:
        plot(found, args.plot)
    return 0 if all(result.identical for result in found) else 1


def _workloads(args: argparse.Namespace) -> list[Workload]:
    names = args.workloads.split(",") if args.workloads else []
    if args.workloads == ",".join(NAMES) and args.news is None:
        names.remove("news")
    return load(names, common.read_text(args.news) if args.news else "")


def _document(
    found: Sequence[Result], pairs: dict[str, list[Pair]], config: EngineConfig, repeat: int
) -> dict[str, Any]:
    return {
        "machine": machine(),
        "settings": {"threads": config.threads, "repeat": repeat, "speculate": config.speculate},
        "results": [asdict(result) for result in found],
        "pairs": {name: [asdict(pair) for pair in several] for name, several in pairs.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
