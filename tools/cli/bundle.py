"""`pagelet inspect` and `pagelet verify`: what is in a bundle, and whether it is whole."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pagelet.models.manifest import Manifest, Quantization, check_files, load_manifest
from pagelet.tools.cli import common


def add_parsers(commands: Any) -> None:
    for name, run, text in (
        ("inspect", run_inspect, "what is inside a bundle"),
        ("verify", run_verify, "check every file of a bundle, the weights too"),
    ):
        parser = commands.add_parser(name, help=text, description=text)
        parser.add_argument("bundle", type=Path, metavar="BUNDLE")
        parser.add_argument("--json", action="store_true", help="print one JSON document")
        parser.set_defaults(run=run)


def run_inspect(args: argparse.Namespace) -> None:
    manifest = load_manifest(args.bundle)
    print(json.dumps(manifest.to_json(), indent=1) if args.json else common.table(_summary(manifest)))


def run_verify(args: argparse.Namespace) -> None:
    manifest = load_manifest(args.bundle)
    check_files(args.bundle, manifest, weights=True)
    if args.json:
        print(json.dumps({"ok": True, "files": len(manifest.files), "fingerprint": manifest.fingerprint}))
    else:
        print(f"{args.bundle}: {len(manifest.files)} files, every size and SHA-256 as the manifest says")


def _weights(quantization: Quantization) -> str:
    parts = [quantization.weights]
    if quantization.group_size:
        parts.append(f"groups of {quantization.group_size}")
    elif quantization.weights == "fp8":
        parts.append("a scale per output")
    if quantization.weights == "int4":
        parts.append("symmetric" if quantization.symmetric else "asymmetric")
    if quantization.embedding:
        parts.append(f"embedding and head {quantization.embedding}")
    return ", ".join(parts)


def _summary(manifest: Manifest) -> list[tuple[str, str]]:
    spec, quantization = manifest.spec, manifest.quantization
    kinds = Counter(entry.type for entry in manifest.tensors.values())
    return [
        ("model", f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}"),
        ("heads", f"{spec.num_heads} query, {spec.num_kv_heads} key/value, size {spec.head_dim}"),
        ("vocabulary", f"{spec.vocab_size} tokens"),
        ("context", f"{spec.max_context} tokens"),
        ("weights", _weights(quantization)),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))),
        ("cache", f"{manifest.cache_type}, blocks of {manifest.block_size} tokens"),
        ("target", manifest.target),
        ("source", str(manifest.source.get("name", "unknown"))),
        ("made by", manifest.created_by),
        *((name, common.size(entry.bytes)) for name, entry in manifest.files.items()),
    ]
