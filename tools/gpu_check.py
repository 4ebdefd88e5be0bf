"""Whether attention kernels, TensorRT plugin and GPU backends work on this machine's GPU, and how fast.

    python -m pagelet.tools.gpu_check [--json OUT.json] [--bundle BUNDLE]… [--make rtx] [--kernels DIR]

compares the kernels with the NumPy reference over a covering set of nodes and steps, replays a recorded CUDA
graph with other lengths, times decoding and prefill beside a copy and a matrix product, looks whether an
engine's plugin sees the cache itself, and runs bundles, given ones and tiny ones that it makes: their golden
prompts, and a greedy text. It ends with 1 if anything is wrong, and takes at most --seconds, four minutes by
default.

The kernels are compiled here if triton is installed. Where it is not, with only cuda-bindings and NumPy,
compile them before on a machine that needs no GPU, for the device's compute capability, and bring the folder:

    python -m pagelet.tools.gpu_check --compile-only kernels --sm 90
    python -m pagelet.tools.gpu_check --kernels kernels

From a checkout, without installing: `mkdir -p run && ln -sfn "$PWD" run/pagelet`, then `PYTHONPATH=run python
-m pagelet.tools.gpu_check`. Bundles need what they always need: pagelet, ONNX Runtime or TensorRT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pagelet.models.targets import TARGETS
from pagelet.plugins.cuda_driver import CudaError, Driver
from pagelet.plugins.kernels.records import KernelError
from pagelet.tools.gpu.compiling import compile_needed
from pagelet.tools.gpu.device import Gpu
from pagelet.tools.gpu.report import Row, document, is_good, table
from pagelet.tools.gpu.timing import with_shares
from pagelet.tools.gpu.units import PARTS, NoGpu, checks, run_here, supervise

_USE_KERNELS = ("kernels", "graph", "timing")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.worker:
        return _work(args)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"{args.json} is in no folder that exists")
    names = [*(bundle.name for bundle in args.bundle), *args.make]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        parser.error(f"more than one bundle is called {', '.join(twice)}")
    try:
        return _compile_only(args) if args.compile_only else _check(args)
    except (KernelError, NoGpu) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    """Run what was asked for, print and write what was found."""
    deadline = time.monotonic() + args.seconds
    rows: list[Row] = []

    def note(row: Row) -> None:
        """Write it down at once: so what was found is there, whatever happens next."""
        rows.append(row)
        _write(args.json, rows)
        if sys.stderr.isatty():
            print(table([row]).splitlines()[0], file=sys.stderr, flush=True)

    with ExitStack() as resources:
        if args.make:
            args.into = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="pagelet-made-")))
        known = checks(args.bundle, _made(args))
        names = [name for name in known if name != "device" and _is_asked(name, args.only)]
        supervise(["device"], _command(args, args.kernels), deadline, note)
        if rows[0].status == "failed":
            names = []
        kernels = args.kernels
        if kernels is None and any(name.split("/")[0] in _USE_KERNELS for name in names):
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="pagelet-gpu-check-")))
            note(_compile_here(folder, rows[0], args.jobs))
            kernels = folder if (folder / "kernels.json").exists() else None
        supervise(names, _command(args, kernels), deadline, note)
    rows = with_shares(rows)
    print(table(rows))
    _write(args.json, rows)
    return 0 if is_good(rows) else 1


def _write(path: Path | None, rows: Sequence[Row]) -> None:
    if path is not None:
        path.write_text(document(rows), encoding="utf-8")


def _compile_here(folder: Path, device: Row, jobs: int) -> Row:
    """The kernels for this device; skipped where triton is missing."""
    began, sm = time.perf_counter(), device.figures.get("sm")
    if device.figures.get("triton") is None:
        return Row("compile", "skipped", "triton is not installed: give --kernels a folder")
    if not isinstance(sm, int):
        return Row("compile", "failed", "the device's compute capability is not known")
    try:
        problems = compile_needed(folder, sm, jobs, on_progress=_progress)
    except KernelError as error:
        problems = [str(error)]
    return Row(
        "compile",
        "failed" if problems else "ok",
        "; ".join(problems) or f"for SM {sm}, by {jobs} processes",
        time.perf_counter() - began,
    )


def _compile_only(args: argparse.Namespace) -> int:
    if args.sm is None:
        raise KernelError("--compile-only needs --sm: the device's compute capability, 90 for 9.0")
    for problem in (problems := compile_needed(args.compile_only, args.sm, args.jobs, on_progress=_progress)):
        print(f"gpu_check: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _work(args: argparse.Namespace) -> int:
    """In the process of its own: names come from stdin, and lines go to what was stdout."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not ours

    def tell(message: object) -> None:
        print(json.dumps(message), file=lines, flush=True)

    names = json.load(sys.stdin)
    try:
        gpu = Gpu(Driver.open(), args.kernels)
    except CudaError as error:
        tell({"fatal": str(error)})
        return 1
    known = checks(args.bundle, _made(args))
    is_whole = run_here({name: known[name] for name in names}, gpu, tell)
    if not is_whole:
        os._exit(1)  # with a lost device libraries may hang when they are unloaded
    return 0


def _command(args: argparse.Namespace, kernels: Path | None) -> list[str]:
    """Of a process that works."""
    command = [sys.executable, "-m", "pagelet.tools.gpu_check", "--worker"]
    command += ["--kernels", str(kernels)] if kernels is not None else []
    command += ["--make", ",".join(args.make), "--into", str(args.into)] if args.make else []
    return command + [part for bundle in args.bundle for part in ("--bundle", str(bundle))]


def _made(args: argparse.Namespace) -> list[Path]:
    """Where bundles will be that are made here."""
    return [args.into / target for target in args.make]


def _is_asked(name: str, only: Sequence[str]) -> bool:
    """What is to be made has been asked for by its own option."""
    return not only or name.startswith("make/") or any(f"{name}/".startswith(f"{each}/") for each in only)


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rkernels: {done} of {of} ", end="" if done < of else "\n", file=sys.stderr, flush=True)


def _names(text: str) -> tuple[str, ...]:
    """A list of parts, or of checks within one: ``kernels/llama int8,graph``."""
    found = tuple(text.split(","))
    for each in found:
        if each.split("/")[0] not in PARTS:
            raise argparse.ArgumentTypeError(f"{each!r} is no part; known: {', '.join(PARTS)}")
    return found


def _targets(text: str) -> tuple[str, ...]:
    """``cuda,rtx``."""
    found = tuple(text.split(","))
    for each in found:
        if each not in TARGETS or not TARGETS[each].is_gpu:
            raise argparse.ArgumentTypeError(f"{each!r} is no target for a GPU")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pagelet.tools.gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, as JSON")
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="compiled by --compile-only")
    parser.add_argument(
        "--bundle", type=Path, action="append", default=[], metavar="BUNDLE", help="to run; may be repeated"
    )
    parser.add_argument(
        "--make",
        type=_targets,
        default=(),
        metavar="TARGETS",
        help="make and run bundles of a tiny random model for these targets; needs pagelet[export]",
    )
    parser.add_argument(
        "--seconds", type=_count, default=240, metavar="N", help="what is not done then is skipped"
    )
    parser.add_argument(
        "--only", type=_names, default=(), metavar="PARTS", help=f"of {', '.join(PARTS)}; or PART/NAME"
    )
    parser.add_argument(
        "--compile-only", type=Path, metavar="DIR", help="compile the kernels for another machine, and end"
    )
    parser.add_argument(
        "--sm", type=_count, metavar="N", help="compute capability, times ten, to compile for"
    )
    parser.add_argument(
        "--jobs", type=_count, default=os.cpu_count() or 1, help="processes that compile side by side"
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
