"""`pagelet eval`: perplexity of a text, and the distance to a reference."""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError
from pagelet.models.manifest import MANIFEST_NAME, load_manifest
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import common
from pagelet.tools.evaluate import EvalResult, evaluate, windows
from pagelet.tools.quality.charts import check_plot, plot_layers, plot_sizes
from pagelet.tools.quality.kept_logits import KeptLogits, check_room
from pagelet.tools.quality.measure import Row
from pagelet.tools.quality.report import document, markdown
from pagelet.tools.quality.storage import bundle_storage

# Of a text that the single layers are compared on: each of them is run through all that follow it.
_PLOT_TOKENS = 1024


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
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="BUNDLE", help="others to set beside it, in one table"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="a picture: how far each layer alone is from the reference; with --compare, distance against "
        "size (needs the extra: plot)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    text = common.read_text(args.text)
    _check(args)
    if args.compare:
        _compare(args, text)
        return
    with common.open_engine(args) as engine, _reference(args) as reference:
        contexts = [reference.engine.max_context] if reference else []
        pieces = _pieces(args, engine, text, *contexts)
        result = evaluate(engine, pieces, reference.engine if reference else None)
        if args.plot:
            assert reference
            _plot_layers(args, reference.bundle, pieces)
            _say_where(args.plot)
    print(json.dumps(result.to_json(), indent=1) if args.json else _table(result))


def _check(args: argparse.Namespace) -> None:
    """Refuse now what would fail after the long work."""
    if args.window < 2:
        raise InputError(f"--window is {args.window}; expected at least 2 tokens.")
    if args.max_tokens is not None and args.max_tokens < 2:
        raise InputError(f"--max-tokens is {args.max_tokens}; expected at least 2.")
    if args.compare and args.reference is None:
        raise InputError("--compare needs --reference: what all of them are compared with.")
    if args.plot and args.reference is None:
        raise InputError("--plot shows distances from a reference: name one with --reference.")
    if args.plot:
        check_plot(args.plot)
    if args.plot and not args.compare and find_spec("onnx") is None:
        raise InputError("--plot reads the graphs, which needs onnx: pip install 'pagelet[export,plot]'.")


def _pieces(args: argparse.Namespace, engine: Engine, text: str, *contexts: int) -> list[list[int]]:
    """Windows that every model concerned has positions for."""
    size = min(args.window, engine.max_context, *contexts)
    return list(windows(engine.tokenizer.encode(text), size, args.max_tokens))


def _plot_layers(args: argparse.Namespace, reference: Path, pieces: list[list[int]]) -> None:
    from pagelet.tools.progress import bar
    from pagelet.tools.quality.layers import layer_kl

    few = list(windows([token for piece in pieces for token in piece], len(pieces[0]), _PLOT_TOKENS))
    with bar("layers", "layer") as on_layer:
        plot_layers(layer_kl(args.bundle, reference, few, on_layer), args.bundle.resolve().name, args.plot)


def _compare(args: argparse.Namespace, text: str) -> None:
    """A row for each bundle; the reference's logits are computed once."""
    bundles = [args.bundle, *args.compare]
    manifests = [load_manifest(bundle) for bundle in bundles]  # a wrong path is refused at once
    rows = []
    with _reference(args) as original, tempfile.TemporaryDirectory(prefix="pagelet-logits-") as folder:
        assert original
        pieces = _pieces(args, original.engine, text, *(each.spec.max_context for each in manifests))
        check_room(Path(folder), sum(map(len, pieces)), original.engine.vocab_size)
        reference = KeptLogits(original.engine, Path(folder))
        for bundle, manifest in zip(bundles, manifests, strict=True):
            with Engine.open(bundle, EngineConfig(kv_memory=args.kv_memory, threads=args.threads)) as scorer:
                result = evaluate(scorer, pieces, reference)
            rows.append(Row(bundle.resolve().name, bundle_storage(manifest), result))
    print(json.dumps(document(rows, []), indent=1) if args.json else markdown(rows))
    if args.plot:
        plot_sizes(rows, args.plot)
        _say_where(args.plot)


def _say_where(picture: Path) -> None:
    print(f"picture: {picture}", file=sys.stderr)


@dataclass(frozen=True)
class Reference:
    """An open bundle."""

    bundle: Path
    engine: Engine


@contextlib.contextmanager
def _reference(args: argparse.Namespace) -> Iterator[Reference | None]:
    """The reference's engine; a checkpoint is exported in fp32 to a temporary folder first."""
    if args.reference is None:
        yield None
        return
    config = EngineConfig(threads=args.threads)
    if (args.reference / MANIFEST_NAME).is_file():
        with Engine.open(args.reference, config) as engine:
            yield Reference(args.reference, engine)
        return
    from pagelet.exporter import ExportOptions, export

    with tempfile.TemporaryDirectory(prefix="pagelet-reference-") as folder:
        bundle = Path(folder) / "fp32"
        options = ExportOptions(weights="fp32", cache_type="f32", certificate_seconds=None)
        export(args.reference, bundle, options)
        with Engine.open(bundle, config) as engine:
            yield Reference(bundle, engine)


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
