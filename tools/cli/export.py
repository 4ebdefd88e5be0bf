"""`pagelet export`: a checkpoint goes in, a bundle comes out."""

import argparse
import json
from pathlib import Path
from typing import Any

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import Manifest

# As the exporter has them, which is imported only when it runs.
WEIGHTS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("export", help="export a checkpoint into a bundle", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("out", type=Path, metavar="OUT", help="the bundle's folder, made new")
    parser.add_argument("--weights", choices=WEIGHTS, default="int4", help="default: %(default)s")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="inputs of a scale; default: 32 (int4, int8), all of an output (fp8)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--symmetric", action="store_true", help="int4: a scale per group")
    form.add_argument(
        "--asymmetric", action="store_true", help="int4: a scale and a minimum per group (default)"
    )
    parser.add_argument(
        "--embedding",
        choices=("int8", "int4"),
        help="int4: bits of the embedding table and the head; default: int8",
    )
    parser.add_argument("--target", choices=("cpu",), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--kv",
        choices=tuple(CACHE_TYPES),
        default="f16",
        help="storage of the KV cache; default: %(default)s",
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens; default: the model's own")
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="only the first N layers, as a draft for the whole model (docs/speculation.md)",
    )
    parser.add_argument(
        "--block-size", type=int, default=32, metavar="N", help="tokens of a KV block; default: 32"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    _check_int4_options(args)
    export, options_type, bar = _exporter()
    options = options_type(
        weights=args.weights,
        group_size=args.group_size,
        symmetric=args.symmetric,
        embedding=args.embedding or "int8",
        target=args.target,
        cache_type=args.kv,
        max_context=args.max_context,
        layers=args.layers,
        block_size=args.block_size,
        force=args.force,
    )
    with bar("export", "tensor") as on_progress:
        manifest = export(args.source, args.out, options, on_progress=on_progress)
    print(json.dumps(manifest.to_json(), indent=1) if args.json else summary(args.out, manifest))


def _check_int4_options(args: argparse.Namespace) -> None:
    """Nothing that was asked for is ignored in silence."""
    given = {
        "--embedding": args.embedding,
        "--symmetric": args.symmetric,
        "--asymmetric": args.asymmetric,
    }
    if args.weights != "int4" and any(given.values()):
        names = ", ".join(name for name, value in given.items() if value)
        raise InputError(f"{names} belongs to --weights int4, not to {args.weights}: leave it out.")


def _exporter() -> tuple[Any, Any, Any]:
    """The exporter and its progress bar, which a plain install does not carry."""
    try:
        from pagelet.exporter import ExportOptions, export
        from pagelet.tools.progress import bar
    except ModuleNotFoundError as error:
        raise PageletError(f"exporting needs {error.name}; run: pip install 'pagelet[export]'") from error
    return export, ExportOptions, bar


def summary(out: Path, manifest: Manifest) -> str:
    """What was made, in two lines."""
    size = sum(entry.bytes for entry in manifest.files.values())
    exact = sum(entry.exact for entry in manifest.tensors.values())
    lines = [f"{out}: {manifest.spec.architecture}, {manifest.quantization.weights}, {size / 1e6:.1f} MB"]
    if exact:
        total = len(manifest.tensors)
        lines.append(f"{exact} of {total} matrices are the checkpoint's own numbers, unchanged")
    return "\n".join(lines)
