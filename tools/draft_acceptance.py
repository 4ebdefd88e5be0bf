"""How often a draft's tokens would be accepted on a given text, under three rules of speculative decoding.

`shared noise` is the runtime's: both models draw with the same noise, and a token is accepted if it is the
same. `rejection` is the classic rule, min(1, p/q) (Leviathan et al. 2023). `greedy` compares the likeliest.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.sampling import Sampler
from pagelet.runtime.sampling.filters import top_p
from pagelet.runtime.speculation.pairing import check_pair
from pagelet.tools.cli import common
from pagelet.tools.evaluate import windows
from pagelet.tools.progress import bar

Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
OnPiece = Callable[[int, int, str], None]

# Tokens that are scored from one empty context: two models' logits of so many rows are in memory at once.
_WINDOW = 512
_MAX_TOKENS = 100_000
_MAX_SEEDS = 4096


@dataclass(frozen=True)
class Estimate:
    """A mean over the positions of a text, and its standard error."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Estimate":
        """Of one value per position, two or more; they count as independent."""
        return cls(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(values.size))


@dataclass(frozen=True)
class Result:
    """Probabilities that a drafted token is accepted.

    Attributes:
        gain: rejection less shared noise, position by position.
    """

    positions: int
    shared_noise: Estimate
    rejection: Estimate
    greedy: Estimate
    gain: Estimate


def measure(
    target: Engine,
    draft: Engine,
    pieces: Sequence[Sequence[int]],
    params: SamplingParams,
    num_seeds: int,
    on_piece: OnPiece = lambda *_: None,
) -> Result:
    """Compare the two models after every token of every piece; each piece begins with an empty context.

    Raises:
        InputError: fewer than two positions.
    """
    if sum(map(len, pieces)) < 2:
        raise InputError("the text has fewer than two tokens; there is nothing to compare.")
    shared, rejection, greedy = [], [], []
    position = 0
    for done, piece in enumerate(pieces):
        on_piece(done, len(pieces), "")
        ours = target.logits(piece)
        for p, q in zip(ours, _padded(draft.logits(piece), ours.shape[1]), strict=True):
            position += 1
            shared.append(agreement(p, q, params, position, num_seeds))
            rejection.append(overlap(probabilities(p, params), probabilities(q, params)))
            greedy.append(float(p.argmax() == q.argmax()))
    gain = np.subtract(rejection, shared)
    estimates = (Estimate.of(np.asarray(values)) for values in (shared, rejection, greedy, gain))
    return Result(position, *estimates)


def agreement(target: Logits, draft: Logits, params: SamplingParams, position: int, num_seeds: int) -> float:
    """Share of the seeds 0 to `num_seeds` - 1 with which both logits float32 [vocab] draw the same token."""
    same = 0
    for seed in range(num_seeds):
        sampler = Sampler(params, target.size, (), seed=seed)
        same += sampler.sample(target, position).token_id == sampler.sample(draft, position).token_id
    return same / num_seeds


def overlap(p: Probabilities, q: Probabilities) -> float:
    """Σ min(p, q): 1 less the total variation distance (Leviathan et al. 2023, section 3.2)."""
    return float(np.minimum(p, q).sum())


def probabilities(logits: Logits, params: SamplingParams) -> Probabilities:
    """float64 [vocab]: what the sampler draws from, after temperature and top-p."""
    scaled = logits / np.float32(params.temperature)
    kept = top_p(scaled, params.top_p) if params.top_p < 1.0 else np.arange(scaled.size)
    weights = np.zeros(scaled.size)
    weights[kept] = np.exp(scaled[kept].astype(np.float64) - float(scaled.max()))
    normalized: Probabilities = weights / weights.sum()
    return normalized


def _padded(logits: Logits, vocab_size: int) -> Logits:
    """A draft's logits [T, its vocabulary] as the target's; what it lacks is never said."""
    return np.pad(logits, ((0, 0), (0, vocab_size - logits.shape[1])), constant_values=-np.inf)


def table(result: Result) -> str:
    """Markdown, a row per rule."""
    rows = {
        "shared noise (the runtime's rule)": result.shared_noise,
        "rejection": result.rejection,
        "greedy": result.greedy,
        "rejection − shared noise": result.gain,
    }
    lines = [f"| rule, {result.positions} positions | accepted | standard error |", "|---|---|---|"]
    lines += [f"| {name} | {value.mean:.4f} | {value.standard_error:.4f} |" for name, value in rows.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return run(args)
    except PageletError as error:
        print(f"draft_acceptance: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagelet.tools.draft_acceptance", description=__doc__)
    parser.add_argument("target", type=Path, help="the bundle whose text it is")
    parser.add_argument("draft", type=Path, help="the bundle that guesses")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to follow")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="default: %(default)s, off")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--seeds", type=int, default=32, metavar="N", help="draws of each position; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--kv-memory", default="128MiB", metavar="SIZE", help="of each engine; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace) -> int:
    for name, value, most in (
        ("max-tokens", args.max_tokens, _MAX_TOKENS),
        ("seeds", args.seeds, _MAX_SEEDS),
    ):
        if not 1 <= value <= most:
            raise InputError(f"--{name} is {value}; expected 1 to {most}.")
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    if params.temperature == 0.0:
        raise InputError("--temperature is 0, where all rules are the greedy one; expected a number above 0.")
    text = common.read_text(args.text)
    manifest = load_manifest(args.target)
    window = min(_WINDOW, manifest.spec.max_context)
    check_pair(args.target, manifest, args.draft, load_manifest(args.draft), window)
    config = EngineConfig(threads=args.threads, kv_memory=args.kv_memory, speculate="off")
    with (
        Engine.open(args.target, config) as target,
        Engine.open(args.draft, config) as draft,
        bar("comparing", "piece") as show,
    ):
        pieces = list(windows(target.tokenizer.encode(text), window, args.max_tokens))
        result = measure(target, draft, pieces, params, args.seeds, show)
    print(json.dumps(asdict(result), indent=1) if args.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
