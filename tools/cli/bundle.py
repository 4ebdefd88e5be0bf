"""`pagelet inspect` and `pagelet verify`: what is in a bundle, and whether it still computes the same."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagelet.models.certificate import Certificate, load_certificate
from pagelet.models.errors import BundleError, InputError
from pagelet.models.manifest import Manifest, Quantization, check_files, load_manifest
from pagelet.models.spec import ModelSpec
from pagelet.runtime.verification import Verification, replay
from pagelet.tools.cli import common

_WORST = 3  # layers that `inspect` names


def add_parsers(commands: Any) -> None:
    for name, run, text in (
        ("inspect", run_inspect, "what is inside a bundle"),
        ("verify", run_verify, "check every file of a bundle, and that it computes here what it should"),
    ):
        parser = commands.add_parser(name, help=text, description=text)
        parser.add_argument("bundle", type=Path, metavar="BUNDLE")
        parser.add_argument("--json", action="store_true", help="print one JSON document")
        parser.set_defaults(run=run)
    parser.add_argument("--threads", type=int, metavar="N", help="default: the physical cores")


def run_inspect(args: argparse.Namespace) -> None:
    manifest = load_manifest(args.bundle)
    certificate = load_certificate(args.bundle, manifest)
    if args.json:
        print(json.dumps({**manifest.to_json(), "quality": certificate and _quality(certificate)}, indent=1))
    else:
        print(common.table([*_summary(manifest), *_certificate(manifest, certificate), *_files(manifest)]))


def _quality(certificate: Certificate) -> dict[str, Any]:
    worst = [asdict(layer) for layer in certificate.worst_layers(_WORST)]
    limits = {"max_kl": certificate.max_kl, "forced": certificate.forced}
    return {**asdict(certificate.quality), "worst_layers": worst, **limits, "note": certificate.note}


def _certificate(manifest: Manifest, certificate: Certificate | None) -> list[tuple[str, str]]:
    if certificate is None:
        why = (
            "made by a pagelet that had none" if manifest.version < 3 else "the export was told to make none"
        )
        return [("certificate", f"none: {why}; export again to have one")]
    quality = certificate.quality
    forced = ", above the limit, kept by --accept-loss" if certificate.forced else ""
    limit = "" if certificate.max_kl is None else f", limit {certificate.max_kl:g}{forced}"
    worst = (f"{layer.layer} ({layer.error:.2%})" for layer in certificate.worst_layers(_WORST))
    return [
        ("compared on", certificate.note),
        ("perplexity", f"{quality.reference_perplexity:.3f} → {quality.perplexity:.3f}"),
        ("KL divergence", f"mean {quality.mean_kl:.5f} nats, 99% below {quality.p99_kl:.5f}{limit}"),
        ("top-1 agreement", f"{quality.top1_agreement:.2%}"),
        ("worst layers", ", ".join(worst)),
    ]


def _files(manifest: Manifest) -> list[tuple[str, str]]:
    """Each, but for attention kernels, which are many: they are one row."""
    cubins = [entry.bytes for name, entry in manifest.files.items() if name.endswith(".cubin")]
    rows = [
        (name, common.size(entry.bytes))
        for name, entry in manifest.files.items()
        if not name.endswith(".cubin")
    ]
    if cubins:
        rows.append((f"{len(cubins)} attention kernels", common.size(sum(cubins))))
    return rows


def _gpu(manifest: Manifest) -> list[tuple[str, str]]:
    gpu = manifest.gpu
    if gpu is None:
        return []
    rows = [("activations", gpu.activations)]
    if gpu.sms:
        rows.append(("kernels", f"for SM {', '.join(map(str, gpu.sms))}"))
        engine = "none yet: run pagelet build on the device"
        if gpu.engine:
            engine = f"for SM {', '.join(map(str, gpu.engine_sms))}, by {gpu.engine_version}"
        rows.append(("engine", engine))
        steps = f"{gpu.max_sequences} sequences, {gpu.step_tokens} rows, {gpu.logits_rows} rows of logits"
        rows.append(("steps", f"up to {steps}"))
    return rows


def run_verify(args: argparse.Namespace) -> None:
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise InputError(f"--threads is {args.threads}; expected 1 to 1024.")
    manifest = load_manifest(args.bundle)
    check_files(args.bundle, manifest, weights=True)
    found = replay(args.bundle, manifest, args.threads)
    if args.json:
        head = {
            "ok": found.status != "broken",
            "files": len(manifest.files),
            "fingerprint": manifest.fingerprint,
        }
        print(json.dumps({**head, **found.to_json()}))
    else:
        print(common.table(_verification(manifest, found)))
    if found.status == "broken":
        raise BundleError(f"{args.bundle} {found.explanation}")


def _verification(manifest: Manifest, found: Verification) -> list[tuple[str, str]]:
    rows = [
        ("files", f"{len(manifest.files)}, every size and SHA-256 as the manifest says"),
        ("status", f"{found.status}: the bundle {found.explanation}"),
    ]
    if found.status == "unproven":
        return rows
    return [
        *rows,
        ("arithmetic", f"{found.arithmetic} here, {found.certified_arithmetic} at the export"),
        (
            "golden prompts",
            f"the original's first choice at {found.agreement:.1%} of the positions; at the export "
            f"{found.certified_agreement:.1%}",
        ),
        ("time", f"{found.seconds:.1f} s"),
    ]


def _weights(quantization: Quantization) -> str:
    parts = [quantization.weights]
    if quantization.quantizer == "auto":
        return f"{quantization.weights} and others, chosen matrix by matrix (auto)"
    if quantization.group_size:
        parts.append(f"groups of {quantization.group_size}")
    elif quantization.weights == "fp8":
        parts.append("a scale per output")
    if quantization.weights == "int4":
        parts.append("symmetric" if quantization.symmetric else "asymmetric")
    if quantization.quantizer not in ("none", "rtn"):
        parts.append(f"by {quantization.quantizer}")
    if quantization.embedding:
        parts.append(f"embedding and head {quantization.embedding}")
    return ", ".join(parts)


def _heads(spec: ModelSpec) -> str:
    kinds = dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in spec.layers)
    each = " and ".join(f"{count} key/value, size {size}" for count, size in kinds)
    return f"{spec.num_heads} query, {each}"


def _layers(spec: ModelSpec) -> list[tuple[str, str]]:
    """What not all models have."""
    found = []
    if windows := Counter(layer.window for layer in spec.layers if layer.window):
        found.append(
            ("windows", ", ".join(f"{size} tokens in {count} layers" for size, count in windows.items()))
        )
    if shared := sum(layer.shares_cache for layer in spec.layers):
        found.append(("shared caches", f"{shared} layers read the keys and values of another"))
    if spec.experts:
        mixed = sum(layer.experts for layer in spec.layers)
        found.append(
            ("experts", f"{spec.experts.per_token} of {spec.experts.count} for a token, in {mixed} layers")
        )
    if spec.layer_inputs:
        found.append(("layers' inputs", f"{spec.layer_inputs} elements for each token and layer"))
    return found


def _summary(manifest: Manifest) -> list[tuple[str, str]]:
    spec, quantization = manifest.spec, manifest.quantization
    kinds = Counter(entry.type for entry in manifest.tensors.values())
    return [
        ("model", f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}"),
        ("heads", _heads(spec)),
        *_layers(spec),
        ("vocabulary", f"{spec.vocab_size} tokens"),
        ("context", f"{spec.max_context} tokens"),
        ("weights", _weights(quantization)),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))),
        ("cache", f"{manifest.cache_type}, blocks of {manifest.block_size} tokens"),
        ("target", manifest.target),
        *_gpu(manifest),
        ("source", str(manifest.source.get("name", "unknown"))),
        ("made by", manifest.created_by),
    ]
