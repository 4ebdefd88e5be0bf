"""What speculation gains with a draft of known quality and cost, and whether the cost model foresees it.

The draft is scripted: it knows the target's greedy text, and gets each token right with a fixed probability.
Beside each measurement stands a simulation: the same plan, the same right and wrong guesses, and the median
times of the steps that ran. Exit status 1: a text was different.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagelet.models.errors import InputError, PageletError
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.opening import open_bundle
from pagelet.tools.peers.report import machine, number
from pagelet.tools.progress import bar
from pagelet.tools.scripted_simulation import (
    Run,
    Script,
    ScriptedDraft,
    TimedCosts,
    best_fixed,
    simulate,
)
from pagelet.tools.speculation_bench import Spread
from pagelet.tools.speculation_tasks import PASSAGES

OnRun = Callable[[int, int, str], None]

_PROMPT_TOKENS = 16  # of each prompt, at most: a step reads all prompts
_MAX_SEQUENCES = 32
_NUM_PROMPTS = 8  # at least
_TIMED_PROMPTS = 2  # whose steps say what the draft costs


class Bench:
    """An engine with a scripted draft, which knows what follows each of `prompts`."""

    def __init__(self, bundle: Path, config: EngineConfig, num_prompts: int, new_tokens: int) -> None:
        opened = open_bundle(bundle, config, False, None)
        self.draft = ScriptedDraft(Script(0.0), opened.backend.vocab_size)
        self.engine = Engine(
            opened.backend, opened.tokenizer, config, manifest=opened.manifest, proposers=[self.draft]
        )
        self.costs = self.engine._loop.speculator.costs = TimedCosts()
        self.engine._loop.measure_steps()
        sentences = [sentence for passage in PASSAGES for sentence in passage.split(". ")]
        tokens = (opened.tokenizer.encode(sentence) for sentence in sentences[:num_prompts])
        self.prompts = [tuple(ids[:_PROMPT_TOKENS]) for ids in tokens]
        self.new_tokens = new_tokens
        _, texts = self.run(range(num_prompts), speculate=False)
        self.draft.texts = dict(zip(self.prompts, texts, strict=True))

    def set_draft_cost(self, cost: float) -> None:
        """A step of the draft takes this part of a plain step of one sequence, which is timed now."""
        self.costs.clear_times()
        for prompt in range(_TIMED_PROMPTS):
            self.run([prompt], speculate=False)
        self.draft.step_seconds = cost * self.costs.median(1)

    def run(self, prompts: Iterable[int], *, speculate: bool) -> tuple[Run, list[tuple[int, ...]]]:
        engine, params = self.engine, SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        # They arrive between two steps, so one step reads all prompts, and all decode from the next on.
        requests = engine._loop.call(
            lambda: [engine.submit(self.prompts[p], params, speculate=speculate) for p in prompts]
        )
        replies = [request.result() for request in requests]
        if failure := engine.stats().speculation_failure:
            raise PageletError(f"the draft failed and was given up: {failure}.")
        if any(len(reply.token_ids) < self.new_tokens for reply in replies):
            raise PageletError(
                f"a reply has less than {self.new_tokens} tokens; lower --new-tokens or raise --kv-memory."
            )
        end = max(request.last_token for request in requests)
        run = Run(
            end - min(request.first_token or end for request in requests),
            (self.new_tokens - 1) * len(replies),
            sum(reply.usage.drafted_tokens for reply in replies),
            sum(reply.usage.accepted_tokens for reply in replies),
        )
        return run, [reply.token_ids for reply in replies]


@dataclass(frozen=True)
class Result:
    """Of one number of sequences.

    Attributes:
        plain, speculating: tokens per second of all sequences together.
        ratio, simulated: of each round, measured and foreseen.
        best_fixed, best_length: the highest expected gain of a fixed number of candidates, and that number.
        bound: the same if more rows took no more time.
        draft_seconds, draft_cost: of a step of the draft, and as a part of a plain step of one sequence in
            the end: the machine drifts.
        step_seconds: median by rows.
    """

    sequences: int
    plain: Spread
    speculating: Spread
    ratio: Spread
    simulated: Spread
    best_fixed: float
    best_length: int
    bound: float
    drafted_per_step: float
    simulated_drafted_per_step: float
    acceptance_rate: float | None
    tokens_per_step: float
    identical: bool
    draft_seconds: float
    draft_cost: float
    step_seconds: dict[int, float]


def measure(
    bench: Bench, agreement: float, cost: float, sequences: int, repeat: int, on_run: OnRun
) -> Result:
    """`repeat` rounds without and with speculation in turns, then the same rounds simulated."""
    bench.set_draft_cost(cost)
    bench.draft.script = script = Script(agreement)
    bench.costs.clear_times()
    rounds = [[(turn + index) % len(bench.prompts) for index in range(sequences)] for turn in range(repeat)]
    pairs, identical = [], True
    for turn, prompts in enumerate(rounds):
        on_run(turn, repeat, f"{sequences} sequences")
        script.round = turn
        order = (True, False) if turn % 2 else (False, True)
        runs = {speculate: bench.run(prompts, speculate=speculate) for speculate in order}
        pairs.append((runs[False][0], runs[True][0]))
        identical &= runs[True][1] == runs[False][1]
    return _result(bench, agreement, rounds, pairs, identical)


def _result(
    bench: Bench, agreement: float, rounds: list[list[int]], pairs: list[tuple[Run, Run]], identical: bool
) -> Result:
    step, draft_seconds, sequences = bench.costs.median, bench.draft.step_seconds, len(rounds[0])
    simulated = _simulated(bench, agreement, rounds)
    best, length = best_fixed(agreement, sequences, step, draft_seconds)
    total, foreseen = _total([run for _, run in pairs]), _total(simulated)
    return Result(
        sequences=sequences,
        plain=Spread.of([plain.tokens_per_second for plain, _ in pairs]),
        speculating=Spread.of([run.tokens_per_second for _, run in pairs]),
        ratio=Spread.of([plain.seconds / run.seconds for plain, run in pairs]),
        simulated=Spread.of([run.tokens_per_second * step(sequences) / sequences for run in simulated]),
        best_fixed=best,
        best_length=length,
        bound=best_fixed(agreement, sequences, lambda rows: step(sequences), draft_seconds)[0],
        drafted_per_step=total.drafted / total.steps,
        simulated_drafted_per_step=foreseen.drafted / foreseen.steps,
        acceptance_rate=total.accepted / total.drafted if total.drafted else None,
        tokens_per_step=total.tokens / total.steps,
        identical=identical,
        draft_seconds=draft_seconds,
        draft_cost=draft_seconds / step(1),
        step_seconds={rows: step(rows) for rows in range(1, 2 * sequences + 8)},
    )


def _simulated(bench: Bench, agreement: float, rounds: list[list[int]]) -> list[Run]:
    """The speculating runs; what one teaches counts in the next, as in the engine."""
    script, num_tokens = Script(agreement), bench.new_tokens - 1
    step, draft_seconds = bench.costs.median, bench.draft.step_seconds
    limit = bench.engine.config.max_draft_tokens
    runs = []
    for turn, prompts in enumerate(rounds):
        script.round = turn
        runs.append(simulate(script, prompts, num_tokens, step, draft_seconds, limit))
    return runs


def _total(runs: Sequence[Run]) -> Run:
    return Run(
        sum(run.seconds for run in runs),
        sum(run.tokens for run in runs),
        sum(run.drafted for run in runs),
        sum(run.accepted for run in runs),
    )


def table(results: Sequence[Result]) -> str:
    """Markdown, a row per number of sequences."""
    head = (
        "sequences", "plain, tok/s", "speculating, tok/s", "ratio", "simulated", "best fixed K",
        "if rows were free",
        "draft ÷ step", "drafted a step", "accepted", "tokens a step", "text",
    )  # fmt: skip
    rows = [head, ("---",) * len(head), *(_row(result) for result in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(result: Result) -> tuple[str, ...]:
    ratio, accepted = result.ratio, result.acceptance_rate
    return (
        str(result.sequences),
        number(result.plain.median),
        number(result.speculating.median),
        f"**{number(ratio.median)}×** [{number(ratio.least)}–{number(ratio.most)}]",
        f"{number(result.simulated.median)}×",
        f"{number(result.best_fixed)}× (K = {result.best_length})",
        f"{number(result.bound)}×",
        number(result.draft_cost),
        f"{number(result.drafted_per_step)} (simulated {number(result.simulated_drafted_per_step)})",
        "–" if accepted is None else f"{accepted:.0%}",
        number(result.tokens_per_step),
        "the same" if result.identical else "DIFFERENT",
    )


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return run(args)
    except PageletError as error:
        print(f"scripted_draft: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagelet.tools.scripted_draft", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--agreement", type=float, default=0.7, metavar="P", help="a guess is right; default: %(default)s"
    )
    parser.add_argument(
        "--cost",
        type=float,
        default=0.25,
        metavar="X",
        help="of a draft's step, in plain steps; default: %(default)s",
    )
    parser.add_argument("--sequences", default="1,8", metavar="N,…", help="at once; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--kv-memory", default="128MiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace) -> int:
    sequences = _checked(args)
    # Each run reads its prompts afresh.
    config = EngineConfig(threads=args.threads, kv_memory=args.kv_memory, prefix_cache=False, speculate="off")
    bench = Bench(args.bundle, config, max(_NUM_PROMPTS, *sequences), args.new_tokens)
    with bench.engine, bar("measuring", "round") as show:
        results = [measure(bench, args.agreement, args.cost, count, args.repeat, show) for count in sequences]
    document = {"machine": machine(), "results": [asdict(result) for result in results]}
    print(json.dumps(document, indent=1) if args.json else table(results))
    return 0 if all(result.identical for result in results) else 1


def _checked(args: argparse.Namespace) -> list[int]:
    """The numbers of sequences, after all options were found to be in their bounds."""
    parts = args.sequences.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= _MAX_SEQUENCES for part in parts):
        raise InputError(f"--sequences is {args.sequences!r}; expected numbers from 1 to {_MAX_SEQUENCES}.")
    for name, least, most in (
        ("agreement", 0, 1),
        ("cost", 0, 100),
        ("repeat", 1, 1000),
        ("new_tokens", 3, 4096),
    ):
        value = getattr(args, name)
        if not least <= value <= most:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected {least} to {most}.")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
