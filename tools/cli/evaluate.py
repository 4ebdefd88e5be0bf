"""`pagelet eval`: perplexity of a text, and the distance to a reference."""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError
from pagelet.models.manifest import MANIFEST_NAME
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import common
from pagelet.tools.evaluate import EvalResult, evaluate, windows


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("eval", help="what quantization cost", description=__doc__)
    common.add_engine_options(parser)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--reference", type=Path, metavar="SRC", help="a bundle, or a checkpoint (run in fp32)"
    )
    parser.add_argument(
        "--window", type=int, default=1024, metavar="N", help="tokens of context; default: 1024"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="score only the text's beginning")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    text = common.read_text(args.text)
    if args.window < 2:
        raise InputError(f"--window is {args.window}; expected at least 2 tokens.")
    with common.open_engine(args) as engine, _reference(args) as reference:
        size = min(args.window, engine.max_context)
        pieces = list(windows(engine.tokenizer.encode(text), size, args.max_tokens))
        result = evaluate(engine, pieces, reference)
    print(json.dumps(result.to_json(), indent=1) if args.json else _table(result))


@contextlib.contextmanager
def _reference(args: argparse.Namespace) -> Iterator[Engine | None]:
    """The reference's engine; a checkpoint is exported in fp32 to a temporary folder first."""
    if args.reference is None:
        yield None
        return
    config = EngineConfig(threads=args.threads)
    if (args.reference / MANIFEST_NAME).is_file():
        with Engine.open(args.reference, config) as engine:
            yield engine
        return
    from pagelet.exporter import ExportOptions, export

    with tempfile.TemporaryDirectory(prefix="pagelet-reference-") as folder:
        bundle = Path(folder) / "fp32"
        export(args.reference, bundle, ExportOptions(weights="fp32", cache_type="f32"))
        with Engine.open(bundle, config) as engine:
            yield engine


def _table(result: EvalResult) -> str:
    rows = [("tokens scored", str(result.tokens)), ("perplexity", f"{result.perplexity:.3f}")]
    if result.mean_kl is not None:
        rows += [
            ("reference perplexity", f"{result.reference_perplexity:.3f}"),
            ("mean KL divergence", f"{result.mean_kl:.5f} nats"),
            ("99th percentile KL", f"{result.p99_kl:.5f} nats"),
            ("top-1 agreement", f"{result.top1_agreement:.2%}"),
        ]
    return common.table(rows)
