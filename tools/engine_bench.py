"""Engines for RTX GPUs, built here without one: their sizes, seconds and peak memory.

    python -m pagelet.tools.engine_bench WORK [--only 1b:int4 …] [--gguf SmolLM2.gguf] [--json]

Models are made up (`made_up`), but for a GGUF file that is given. Exporting and building run in processes of
their own. Nothing here runs on a GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pagelet.models.errors import PageletError
from pagelet.models.manifest import MANIFEST_NAME, load_manifest
from pagelet.runtime.engine_building import build_bundle
from pagelet.tools.made_up import SHAPES, write_checkpoint
from pagelet.tools.memory import peak_rss
from pagelet.tools.quality.export_process import export_apart

SMS = {"int4": (86, 89, 120), "fp8": (89, 120)}
_MODELS = ("qwen3-0.6b", "1b")


@dataclass(frozen=True)
class Row:
    """One engine. Sizes are bytes; the peaks are resident sizes of the processes."""

    model: str
    weights: str
    sms: tuple[int, ...]
    version: str
    engine_bytes: int
    kernel_bytes: int
    build_seconds: float
    build_peak: int
    export_seconds: float
    export_peak: int


def measure(work: Path, model: str, source: Path, weights: str) -> Row:
    """Export without a certificate, then build the engine once more by itself."""
    bundle = work / f"{model}-{weights}"
    options = {
        "weights": weights,
        "target": "rtx",
        "sms": SMS[weights],
        "symmetric": True if weights == "int4" else None,
        "certificate_seconds": None,
        "force": True,
    }
    cost = export_apart(source, bundle, options)
    done = subprocess.run(
        [sys.executable, "-m", "pagelet.tools.engine_bench", "--build", str(bundle)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    built = json.loads(done.stdout)
    manifest = load_manifest(bundle)
    assert manifest.gpu is not None
    kernels = sum(entry.bytes for name, entry in manifest.files.items() if name.endswith(".cubin"))
    return Row(
        model,
        weights,
        manifest.gpu.engine_sms,
        manifest.gpu.engine_version,
        manifest.files[manifest.gpu.engine].bytes,
        kernels,
        built["seconds"],
        built["peak"],
        cost.seconds,
        cost.peak_rss_bytes or 0,
    )


def rows(work: Path, gguf: Path | None, only: list[str]) -> Iterator[Row]:
    sources = {model: work / model for model in _MODELS} | ({"smollm2": gguf} if gguf else {})
    for model, source in sources.items():
        for weights in SMS:
            if only and f"{model}:{weights}" not in only:
                continue
            if model in SHAPES and not (source / "config.json").exists():
                write_checkpoint(source, SHAPES[model])
            yield measure(work, model, source, weights)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for checkpoints and bundles: some 15 GB")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="MODEL:WEIGHTS", help="such as 1b:int4 qwen3-0.6b:fp8"
    )
    parser.add_argument("--gguf", type=Path, help="SmolLM2 as a GGUF file")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        began = time.perf_counter()
        build_bundle(args.work, rebuild=True)
        print(json.dumps({"seconds": time.perf_counter() - began, "peak": peak_rss()}))
        return 0
    if (args.work / MANIFEST_NAME).exists():
        parser.error(f"{args.work} is a bundle; name a folder to work in")
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        for row in rows(args.work, args.gguf, args.only):
            print(json.dumps(asdict(row)) if args.json else _line(row), flush=True)
    except PageletError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _line(row: Row) -> str:
    sms = ",".join(map(str, row.sms))
    export = f"export {row.export_seconds:5.0f} s, peak {row.export_peak / 1e9:4.1f} GB"
    return (
        f"{row.model:<10} {row.weights:<4} SM {sms:<9} engine {row.engine_bytes / 1e6:6.0f} MB in "
        f"{row.build_seconds:5.1f} s, peak {row.build_peak / 1e9:4.1f} GB; kernels "
        f"{row.kernel_bytes / 1e6:.1f} MB; {export}"
    )


if __name__ == "__main__":
    sys.exit(main())
