"""gpu_check as a program: its processes, what they say, and what it makes of that."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_on_paper import paper_gpu

from pagelet.plugins.kernels.launch_plan import plan
from pagelet.plugins.kernels.records import KernelError, KernelTable
from pagelet.tools import gpu_check
from pagelet.tools.gpu import timing, units
from pagelet.tools.gpu.cases import CASES
from pagelet.tools.gpu.compiling import compile_needed, needed
from pagelet.tools.gpu.report import Row, is_good, table
from pagelet.tools.gpu.steps import build
from pagelet.tools.gpu.timing import LLAMA_1B
from pagelet.tools.gpu.units import NoGpu, checks, run_one, supervise

PAPER = Path(__file__).parent.parent / "gpu_on_paper.py"


# Kernels for a machine without triton


def test_kernels_are_compiled_for_another_machine(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    merge = LLAMA_1B.kernel("merge")
    broken = replace(merge, arguments=merge.arguments[1:])
    progress: list[tuple[int, int]] = []
    problems = compile_needed(
        tmp_path / "kernels",
        90,
        1,
        specs={"a": merge, "b": broken},
        on_progress=lambda *at: progress.append(at),
    )
    assert len(problems) == 1
    assert "does not compile for SM 90: merge has the parameters" in problems[0]
    assert progress == [(1, 2)]
    files = {path.relative_to(tmp_path / "kernels").as_posix() for path in tmp_path.rglob("*.*")}
    assert files == {"kernels.json", f"sm_90/{merge.key}.cubin"}
    assert set(KernelTable.read(tmp_path / "kernels").kernels) == {merge.key}
    with pytest.raises(KernelError, match="merge has the parameters"):
        compile_needed(tmp_path / "none", 90, 1, specs={"b": broken})


def test_what_is_compiled_is_what_is_launched() -> None:
    found = needed()
    for case in CASES:
        assert {launch.kernel.key for launch in plan(case.variant, build(case).shapes)} <= found.keys()
    for load in timing.LOADS:
        assert {launch.kernel.key for launch in plan(load.variant, load.shapes)} <= found.keys()
    assert {spec.role for spec in found.values()} == {spec.role for spec in LLAMA_1B.kernels()}


def test_where_nothing_can_be_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = Row("device", "ok", "", figures={"sm": 90, "triton": None})
    assert gpu_check._compile_here(tmp_path, device, 1).status == "skipped"
    assert gpu_check.main(["--compile-only", str(tmp_path)]) == 1
    assert "needs --sm" in capsys.readouterr().err


def test_without_kernels_it_is_skipped() -> None:
    with paper_gpu(kernels=None) as gpu:
        rows = [run_one(name, checks([])[name], gpu) for name in (f"kernels/{CASES[0].name}", "graph")]
    assert all(row.status == "skipped" and "triton is not installed" in row.detail for row in rows)
    assert not is_good(rows)


# The whole program


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs gpu_check, whose processes have a GPU of paper; the exit status and the JSON."""

    def run(wrong: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = gpu_check._command

        def paper(args: Any, kernels: Path | None) -> list[str]:
            return [sys.executable, str(PAPER), wrong, *command(args, kernels)[3:]]

        monkeypatch.setattr(gpu_check, "_command", paper)
        out = tmp_path / "out.json"
        status = gpu_check.main(["--kernels", str(tmp_path), "--json", str(out), *arguments])
        return status, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_a_gpu_that_works(on_paper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = on_paper("", "--only", "kernels/llama f16,kernels/sinks f16,graph")
    assert status == 0
    assert found["ok"]
    names = [row["name"] for row in found["checks"]]
    assert names[0] == "device"
    assert names[-1] == "graph"
    assert len(names) == 9
    assert found["checks"][0]["figures"]["sm"] == 89
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "9 ok, 0 failed, 0 skipped"


def test_what_is_wrong_is_named(on_paper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = on_paper("window", "--only", "kernels/reader,kernels/llama bf16")
    assert status == 1
    assert not found["ok"]
    failed = [row["name"] for row in found["checks"] if row["status"] == "failed"]
    assert failed == ["kernels/reader/prefill", "kernels/reader/decode"]
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 ok, 2 failed, 0 skipped: kernels/reader/prefill, kernels/reader/decode"


def test_after_a_kernel_that_lost_the_device_others_are_checked(on_paper: Any) -> None:
    status, found = on_paper(
        "crash", "--only", "kernels/gemma3/decode,kernels/sinks f16,kernels/reader/decode"
    )
    assert status == 1
    rows = {row["name"]: row for row in found["checks"]}
    assert {name for name, row in rows.items() if row["status"] == "failed"} == {
        "kernels/sinks f16/prefill",
        "kernels/sinks f16/decode",
    }
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in rows["kernels/sinks f16/decode"]["detail"]
    assert rows["kernels/reader/decode"]["status"] == "ok"


def test_after_a_kernel_that_hangs_others_are_checked(on_paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(units.LIMITS, "kernels", 2)
    status, found = on_paper("hang", "--only", "kernels/sinks f16/decode,kernels/reader/decode")
    assert status == 1
    rows = {row["name"]: row for row in found["checks"]}
    assert rows["kernels/sinks f16/decode"]["detail"] == "it hangs"
    assert rows["kernels/reader/decode"]["status"] == "ok"


def test_without_a_gpu_one_line_says_so(on_paper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = on_paper("no device")
    assert status == 1
    assert capsys.readouterr().err == (
        "gpu_check: no CUDA device can be used: cuInit failed with CUDA_ERROR_NO_DEVICE.\n"
    )


def test_what_is_not_done_in_time_is_skipped() -> None:
    rows: list[Row] = []
    supervise(["graph", "timing/copy"], ["false"], time.monotonic(), rows.append)
    assert [(row.name, row.status, row.detail) for row in rows] == [
        ("graph", "skipped", "out of time"),
        ("timing/copy", "skipped", "out of time"),
    ]


def test_a_process_that_does_not_start_fails_every_check() -> None:
    rows: list[Row] = []
    supervise(["graph", "timing/copy"], [sys.executable, "-c", "exit(3)"], time.monotonic() + 60, rows.append)
    assert [row.detail for row in rows] == ["its process ended with status 3"] * 2


def test_a_process_may_say_that_there_is_no_device() -> None:
    command = [sys.executable, "-c", 'print(\'{"fatal": "none"}\')']
    with pytest.raises(NoGpu, match="none"):
        supervise(["graph"], command, time.monotonic() + 60, lambda row: None)


def test_a_warning_is_shown() -> None:
    def check(gpu: Any) -> Row:
        warnings.warn("decoding goes on without CUDA graphs", RuntimeWarning, stacklevel=1)
        return Row("x", "ok", "fine")

    with paper_gpu() as gpu:
        row = run_one("graph", check, gpu)
    assert (row.name, row.detail) == ("graph", "fine; warning: decoding goes on without CUDA graphs")


def test_the_table_counts() -> None:
    rows = [Row("device", "ok", "a"), Row("graph", "skipped", "b"), Row("timing/copy", "failed", "c", 1.25)]
    assert table(rows).splitlines()[1:] == [
        "skipped graph          0.0 s  b",
        "FAILED  timing/copy    1.2 s  c",
        "1 ok, 1 failed, 1 skipped: timing/copy",
    ]
    assert not is_good(rows[:2])  # nothing was checked
    assert (
        json.loads(json.dumps(Row("x", "ok", "", figures={"x": np.inf}).to_json()))["figures"]["x"] == "inf"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "cernels"],
        ["--seconds", "0"],
        ["--sm", "x"],
        ["--make", "cpu"],
        ["--json", "no such folder/out.json"],
        ["--make", "rtx", "--bundle", "x/rtx"],
    ],
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(arguments)
