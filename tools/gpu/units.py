"""What is run, piece by piece, in a process of its own: an error of a kernel ends all that a process can do
with a GPU, and a kernel that never ends can only be left behind. So the next process goes on with the rest.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from pagelet.plugins.cuda_driver import CudaError
from pagelet.tools.gpu.cases import CASES
from pagelet.tools.gpu.device import Gpu, Missing, check_device
from pagelet.tools.gpu.graph import check_graph
from pagelet.tools.gpu.kernels import check_case
from pagelet.tools.gpu.report import Row
from pagelet.tools.gpu.timing import LOADS, check_copy, check_load, check_matrix

PARTS = ("device", "kernels", "graph", "timing", "make", "addresses", "bundle")
# Seconds after which one check of a part hangs.
LIMITS = {
    "device": 60,
    "kernels": 40,
    "graph": 60,
    "timing": 60,
    "make": 150,
    "addresses": 150,
    "bundle": 240,
}

_BETWEEN = 60  # seconds for a process to begin, or to end
_KILLED = 20  # and for one that was killed, which may wait for its GPU

Check = Callable[[Gpu], Row]
OnRow = Callable[[Row], None]


class NoGpu(RuntimeError):
    """There is no device to check."""


def checks(bundles: Iterable[Path], made: Iterable[Path] = ()) -> dict[str, Check]:
    """By name, in order.

    Args:
        made: bundles that are to be made, in folders of their targets' names.
    """
    found: dict[str, Check] = {"device": check_device}
    for case in CASES:
        found[f"kernels/{case.name}"] = partial(check_case, case=case)
    found["graph"] = check_graph
    found["timing/copy"] = check_copy
    found["timing/matrix"] = lambda gpu: check_matrix()
    for load in LOADS:
        found[f"timing/{load.name}"] = partial(check_load, load=load)
    for bundle in made:
        found[f"make/{bundle.name}"] = partial(_make, bundle)
    for bundle in (*bundles, *made):
        found |= _of_bundle(bundle)
    return found


def _make(bundle: Path, gpu: Gpu) -> Row:
    from pagelet.tools.gpu.making import check_making

    return check_making(bundle.name, gpu.driver.compute_capability, bundle)


def _of_bundle(bundle: Path) -> dict[str, Check]:
    """The runtime, and what it needs, are only imported where there is a bundle."""

    def addresses(gpu: Gpu) -> Row:
        from pagelet.tools.gpu.addresses import check_addresses

        return check_addresses(_existing(bundle))

    def verify(gpu: Gpu) -> Row:
        from pagelet.tools.gpu.bundles import check_bundle

        return check_bundle(_existing(bundle))

    def generate(gpu: Gpu) -> Row:
        from pagelet.tools.gpu.bundles import check_generation

        return check_generation(_existing(bundle))

    return {
        f"addresses/{bundle.name}": addresses,
        f"bundle/{bundle.name}/verify": verify,
        f"bundle/{bundle.name}/generate": generate,
    }


def _existing(bundle: Path) -> Path:
    if not bundle.exists():
        raise Missing("it was not made")
    return bundle


def run_here(chosen: Mapping[str, Check], gpu: Gpu, tell: Callable[[dict[str, Any]], None]) -> bool:
    """Runs checks one after another; False: the device is lost to this process, and the rest was not run.

    Args:
        tell: is given {"begin": name}, then {"row": the row as JSON}, of each.
    """
    for name, check in chosen.items():
        tell({"begin": name})
        tell({"row": run_one(name, check, gpu).to_json()})
        try:
            gpu.wait()
        except CudaError:
            return False
    return True


def run_one(name: str, check: Check, gpu: Gpu) -> Row:
    """A check's row; errors are rows too, and so are warnings, in its text."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row = check(gpu)
        except Missing as error:
            row = Row(name, "skipped", str(error))
        except Exception as error:
            row = Row(name, "failed", f"{type(error).__name__}: {error}")
    said = dict.fromkeys(str(each.message) for each in caught if each.category is RuntimeWarning)
    detail = "; ".join([row.detail, *(f"warning: {message}" for message in said)])
    return replace(row, name=name, detail=detail, seconds=time.perf_counter() - began)


def supervise(names: Sequence[str], command: Sequence[str], deadline: float, on_row: OnRow) -> None:
    """Runs checks in processes; one that ends or hangs fails the check that it runs, and another goes on.

    Args:
        command: reads a list of names as JSON, and writes what `run_here` tells, a line each.
        deadline: of `time.monotonic`; what is not done then is skipped.
        on_row: is given each check's row, as soon as it is there.

    Raises:
        NoGpu: a process says that there is no device.
    """
    left = list(names)

    def add(row: Row) -> None:
        left.remove(row.name)
        on_row(row)

    while left:
        if time.monotonic() >= deadline:
            for name in list(left):
                add(Row(name, "skipped", "out of time"))
            break
        before, worker = len(left), _Worker(command, left)
        try:
            begun = _follow(worker, deadline, add)
        finally:
            status = worker.end()
        # Who was in work is to blame; whoever was done has told what happened.
        if (begun or len(left) == before) and time.monotonic() < deadline:
            why = "it hangs" if status is None else f"its process ended with status {status}"
            add(Row(begun or left[0], "failed", why, seconds=worker.seconds))


class _Worker:
    """A process that runs checks."""

    def __init__(self, command: Sequence[str], names: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.hangs = False
        self._began = time.monotonic()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may have ended already
            json.dump(list(names), stdin)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _read(self, stdout: TextIO) -> None:
        with stdout:
            for line in stdout:
                self.lines.put(line)
        self.lines.put(None)

    def end(self) -> int | None:
        """Its status; None: it had to be killed."""
        if not self.hangs:
            status = self._process.wait()
            self._reader.join(_KILLED)
            return status
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED)
        self._reader.join(_KILLED)
        return None


def _follow(worker: _Worker, deadline: float, add: OnRow) -> str:
    """Adds rows until the process ends, hangs or time is up; the check that was begun and not done, or ""."""
    begun = ""
    while True:
        limit = LIMITS[begun.split("/")[0]] if begun else _BETWEEN
        try:
            line = worker.lines.get(timeout=max(0.0, min(limit, deadline - time.monotonic())))
        except queue.Empty:
            worker.hangs = True
            return begun
        if line is None:
            return begun
        said = json.loads(line)
        if "fatal" in said:
            raise NoGpu(said["fatal"])
        if "begin" in said:
            begun = said["begin"]
        else:
            begun = ""
            add(Row.from_json(said["row"]))
