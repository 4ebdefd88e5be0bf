"""`pagelet build`: the engine of a bundle for TensorRT, built on the device that will run it."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagelet.models.errors import BackendError
from pagelet.models.manifest import load_manifest
from pagelet.plugins.cuda_driver import CudaError, Driver
from pagelet.plugins.tensorrt.build import OnPhase
from pagelet.runtime.config import parse_size
from pagelet.tools.cli import common


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "build", help="build a bundle's engine on this device (tensorrt), or anew (rtx)", description=__doc__
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--rebuild", action="store_true", help="also where there is an engine that fits")
    parser.add_argument(
        "--workspace",
        metavar="SIZE",
        help="memory that a layer may use while it is timed and run; default: a quarter of what is free, at "
        "most 1GiB",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from pagelet.runtime.engine_building import build_bundle

    workspace = None if args.workspace is None else parse_size(args.workspace, "--workspace")
    target = load_manifest(args.bundle).target
    sm = _this_device() if target == "tensorrt" else None
    with _progress() as on_phase:
        manifest = build_bundle(
            args.bundle, sm=sm, rebuild=args.rebuild, workspace=workspace, on_phase=on_phase
        )
    gpu = manifest.gpu
    assert gpu is not None
    size = manifest.files[gpu.engine].bytes
    if args.json:
        print(json.dumps({"engine": gpu.engine, "bytes": size, "version": gpu.engine_version,
                          "sms": gpu.engine_sms}))  # fmt: skip
    else:
        sms = ", ".join(map(str, gpu.engine_sms))
        print(f"{args.bundle / gpu.engine}: {common.size(size)}, by {gpu.engine_version}, for SM {sms}")


@contextlib.contextmanager
def _progress() -> Iterator[OnPhase]:
    """TensorRT's phases, on a terminal; a device has no library for bars."""
    shown = sys.stderr.isatty()

    def show(phase: str, done: int, total: int) -> None:
        if shown:
            print(f"\r\x1b[Kbuild: {phase} {done}/{total}"[:100], end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _this_device() -> int:
    """Its compute capability, times ten."""
    try:
        driver = Driver.open()
    except CudaError as error:
        raise BackendError(f"TensorRT builds for the GPU that is here: {error}") from error
    try:
        return driver.compute_capability
    finally:
        driver.close()
