"""`pagelet export`: a checkpoint goes in, a bundle comes out."""

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.certificate import load_certificate
from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import Manifest, TensorEntry
from pagelet.models.targets import TARGETS

# As the exporter has them, which is imported only when it runs.
CALIBRATION_TOKENS = 8_192
QUANTIZERS = ("rtn", "awq", "gptq", "auto")
WEIGHTS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("export", help="export a checkpoint into a bundle", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("out", type=Path, metavar="OUT", help="the bundle's folder, made new")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="a LoRA as PEFT writes it, merged into the weights"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="int4", help="default: %(default)s")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="inputs of a scale; default: the checkpoint's own if it has some, else 32, or all (fp8)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--symmetric", action="store_true", help="int4: a scale per group (default on GPUs)")
    form.add_argument(
        "--asymmetric", action="store_true", help="int4: a scale and a minimum per group (default on the CPU)"
    )
    parser.add_argument(
        "--embedding",
        choices=("int8", "int4", "fp16"),
        help="int4: storage of the embedding table and the head; default: int8, or fp16 where the target has "
        "no int8",
    )
    parser.add_argument(
        "--block-scales",
        action="store_true",
        help="fp8: a scale for each block of 128 outputs and 128 inputs",
    )
    _add_quantizer(parser)
    parser.add_argument(
        "--target",
        choices=tuple(TARGETS),
        default="cpu",
        help="; ".join(f"{row.name}: {row.title}" for row in TARGETS.values()) + ". Default: %(default)s",
    )
    parser.add_argument(
        "--sm",
        type=_sms,
        default=(),
        metavar="SM[,SM…]",
        help="rtx, tensorrt: compute capabilities of the GPUs, 86,89,120 say; default: all that are served",
    )
    parser.add_argument(
        "--activations",
        choices=("f16", "bf16"),
        default="f16",
        help="GPU targets: type of what matrix products and attention read; default: %(default)s",
    )
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
        "--block-size", type=int, metavar="N", help="tokens of a KV block; default: 32, for cuda 256"
    )
    _add_certificate(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def _add_quantizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        default="rtn",
        help="int4, int8: rtn rounds to the nearest; awq and gptq look at a text's activations; auto (int4) "
        "also spends --bits-per-weight where they help most. Default: %(default)s",
    )
    parser.add_argument(
        "--bits-per-weight", type=float, metavar="X", help="auto: of all matrices together; default: 4.5"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="awq, gptq, auto, and fp8 weights on a GPU: a UTF-8 text of the kind that the model will read, "
        "at most 64 MiB; default: texts that come with pagelet",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help=f"of that text at most; default: {CALIBRATION_TOKENS}, at least 1024",
    )
    parser.add_argument(
        "--desc-act",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gptq, auto: round the columns with the largest activations first (default)",
    )


def _add_certificate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--certificate-seconds",
        type=float,
        metavar="S",
        help="about how long the bundle is compared with the original at the end; default: 60",
    )
    parser.add_argument(
        "--no-certificate", action="store_true", help="do not compare; the bundle records that"
    )
    parser.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="stop above this mean KL divergence from the original; default: 0.5 (int4), 0.05 (int8, bf16), "
        "0.1 (fp8), 0.02 (fp16), 0.005 (fp32)",
    )
    parser.add_argument(
        "--accept-loss", action="store_true", help="keep the bundle even above --max-kl, and record that"
    )


def _sms(text: str) -> tuple[int, ...]:
    """ "86,89" or "8.6,8.9"."""
    try:
        return tuple(int(part.replace(".", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no compute capabilities; write 86,89 say") from None


def run(args: argparse.Namespace) -> None:
    _check(args)
    export, options_type, bar = _exporter()
    seconds = 60.0 if args.certificate_seconds is None else args.certificate_seconds
    options = options_type(
        adapter=args.adapter,
        weights=args.weights,
        group_size=args.group_size,
        symmetric=True if args.symmetric else False if args.asymmetric else None,
        block_scales=args.block_scales,
        quantizer=args.quantizer,
        bits_per_weight=args.bits_per_weight,
        calibration=args.calibration,
        calibration_tokens=CALIBRATION_TOKENS if args.calibration_tokens is None else args.calibration_tokens,
        desc_act=args.desc_act,
        embedding=args.embedding,
        target=args.target,
        sms=args.sm,
        activations=args.activations,
        cache_type=args.kv,
        max_context=args.max_context,
        layers=args.layers,
        block_size=args.block_size,
        certificate_seconds=None if args.no_certificate else seconds,
        max_kl=args.max_kl,
        accept_loss=args.accept_loss,
        force=args.force,
    )
    with _told_to_go_on(args.out), bar("export", "step") as on_progress:
        manifest = export(
            args.source,
            args.out,
            options,
            on_progress=on_progress,
            on_note=lambda note: print(f"note: {note}", file=sys.stderr),
        )
    print(json.dumps(manifest.to_json(), indent=1) if args.json else summary(args.out, manifest))


def _check(args: argparse.Namespace) -> None:
    """Nothing that was asked for is ignored in silence."""
    given = {
        "--embedding": args.embedding,
        "--symmetric": args.symmetric,
        "--asymmetric": args.asymmetric,
    }
    if args.weights != "int4" and any(given.values()):
        names = ", ".join(name for name, value in given.items() if value)
        raise InputError(f"{names} belongs to --weights int4, not to {args.weights}: leave it out.")
    # Static scales of GPU targets are measured on the same text.
    static = args.target != "cpu" and (args.weights == "fp8" or args.target == "cuda")
    if args.quantizer == "rtn" and not static and args.calibration_tokens is not None:
        raise InputError("--calibration-tokens belongs to the quantizers awq, gptq and auto: leave it out.")
    if args.quantizer == "auto" and (args.embedding or args.group_size):
        raise InputError("the quantizer auto chooses groups and the embedding's bits itself: leave them out.")
    measured = {
        "--certificate-seconds": args.certificate_seconds is not None,
        "--max-kl": args.max_kl is not None,
        "--accept-loss": args.accept_loss,
    }
    if args.no_certificate and any(measured.values()):
        names = ", ".join(name for name, value in measured.items() if value)
        raise InputError(f"--no-certificate measures nothing: leave {names} out.")


@contextlib.contextmanager
def _told_to_go_on(out: Path) -> Iterator[None]:
    """Whoever stops an export is told where its work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        from pagelet.exporter.bundle import partial_folder

        kept = partial_folder(out.absolute())
        word = f"the same command goes on with what is in {kept}" if kept.is_dir() else "nothing was kept"
        print(f"pagelet: {word}", file=sys.stderr)
        raise


def _exporter() -> tuple[Any, Any, Any]:
    """The exporter and its progress bar, which a plain install does not carry."""
    try:
        from pagelet.exporter import ExportOptions, export
        from pagelet.tools.progress import bar
    except ModuleNotFoundError as error:
        raise PageletError(f"exporting needs {error.name}; run: pip install 'pagelet[export]'") from error
    return export, ExportOptions, bar


def summary(out: Path, manifest: Manifest) -> str:
    """What was made, and what it cost, in a few lines."""
    size = sum(entry.bytes for entry in manifest.files.values())
    entries = manifest.tensors.values()
    bits = (
        8 * sum(entry.bytes for entry in entries) / sum(entry.shape[0] * entry.shape[1] for entry in entries)
    )
    kind = manifest.quantization.weights
    lines = [f"{out}: {manifest.spec.architecture}, {kind}, {size / 1e6:.1f} MB, {bits:.2f} bits per weight"]
    exact = sum(entry.exact for entry in entries)
    if exact:
        on_cpu = manifest.gpu is None and kind.startswith("int")
        rounded = "; activations are rounded to INT8 as they are used" if on_cpu else ""
        lines.append(
            f"{exact} of {len(entries)} matrices are the checkpoint's own numbers, unchanged{rounded}"
        )
    if manifest.quantization.quantizer == "auto":
        counts = Counter(map(_storage, entries))
        lines.append("plan: " + ", ".join(f"{count} x {name}" for name, count in counts.most_common()))
    certificate = load_certificate(out, manifest)
    if certificate is None:
        lines.append("not compared with the original (--no-certificate)")
    else:
        quality = certificate.quality
        lines.append(
            f"perplexity {quality.reference_perplexity:.2f} before, {quality.perplexity:.2f} after; KL "
            f"divergence {quality.mean_kl:.4f} nats (99% below {quality.p99_kl:.3f}); the same first choice "
            f"for {quality.top1_agreement:.1%} of {quality.tokens} tokens"
        )
        if certificate.forced:
            lines.append(f"kept by --accept-loss although the limit is {certificate.max_kl:g} nats")
    return "\n".join(lines)


def _storage(entry: TensorEntry) -> str:
    form = "" if entry.type != "int4" else " symmetric" if entry.symmetric else " with minimum"
    return f"{entry.type}{form}, groups of {entry.group_size}"
