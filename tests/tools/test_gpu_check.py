"""gpu_check on a GPU of paper: right kernels pass, and each mistake is found where it is."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from gpu_on_paper import paper_gpu

from pagelet.plugins.cuda_driver import Driver
from pagelet.plugins.kernels.launch_plan import plan
from pagelet.plugins.kernels.records import CubinRecord, KernelError, KernelRecord, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools import gpu_check
from pagelet.tools.gpu import timing
from pagelet.tools.gpu.cases import CASES, PAD, Case
from pagelet.tools.gpu.compiling import compile_needed, needed
from pagelet.tools.gpu.device import Gpu
from pagelet.tools.gpu.graph import check_graph
from pagelet.tools.gpu.kernels import check_case
from pagelet.tools.gpu.report import Row, is_good, table
from pagelet.tools.gpu.steps import build
from pagelet.tools.gpu.timing import (
    LLAMA_1B,
    LLAMA_1B_INT8,
    QWEN3_8B,
    Load,
    check_copy,
    check_load,
    with_shares,
)
from pagelet.tools.gpu.units import NoGpu, checks, run_one, supervise

PAPER = Path(__file__).parent.parent / "gpu_on_paper.py"
SMALL = [case for case in CASES if case.name.split("/")[1] in ("decode", "tree")]


# Kernels


def test_right_kernels_pass() -> None:
    with paper_gpu() as gpu:
        rows = [check_case(gpu, case) for case in CASES]
    assert [row.name for row in rows] == [f"kernels/{case.name}" for case in CASES]
    for row in rows:
        if row.name.endswith("/far"):
            assert row.status == "skipped"
            assert "behind 4352 MiB, and 1024 MiB are free" in row.detail
        else:
            assert row.status == "ok", row
            assert row.figures["codes_apart"] == 0
            # The reference rounds its output only: half a unit of the 3 and more that are allowed.
            assert 0 < row.figures["error_of_allowed"] < 0.25  # type: ignore[operator]


def test_the_cases_meet_everything() -> None:
    variants = {case.variant for case in CASES}
    assert {each.head_dim for each in variants} == {64, 80, 96, 128, 256, 512}
    assert {each.group for each in variants} >= {1, 4, 7, 16}
    assert {each.block_size for each in variants} >= {16, 32, 48}
    for feature in (
        "softcap",
        "scale",
        "rotary_interleaved",
        "norm_after_rotation",
        "norm_values",
        "q_norm",
        "sinks",
    ):
        assert any(getattr(each, feature) for each in variants), feature
    assert any(each.local_window_size > 0 and each.sinks for each in variants)
    assert any(not each.packed for each in variants)
    assert {each.cache for each in variants if not each.writes} == {"f16", "int8"}
    kinds = {(each.cache, each.activation) for each in variants}
    assert kinds == {(cache, kind) for cache in ("f16", "int8", "fp8") for kind in ("f16", "bf16")}
    roles = {
        (case.variant.cache, launch.kernel.role)
        for case in CASES
        for launch in plan(case.variant, build(case).shapes)
    }
    wanted = {"prepare", "prefill", "decode", "decode_tree", "merge"}
    assert roles >= {(cache, role) for cache in ("f16", "int8", "fp8") for role in wanted}
    assert roles >= {("f16", "prefill_tree"), ("fp8", "prefill_tree")}
    trees = {(case.variant.head_dim, "wide" in case.name) for case in CASES if case.kind.tree}
    assert trees == {(size, wide) for size in (64, 128, 256) for wide in (False, True)}
    splits = [launch.grid[2] for case in CASES for launch in plan(case.variant, build(case).shapes)]
    assert max(splits) == 32
    assert sum(PAD in case.kind.spans for case in CASES) > 20


def has_window(variant: AttentionVariant) -> bool:
    return variant.local_window_size > 0


def anything(variant: AttentionVariant) -> bool:
    return True


@pytest.mark.parametrize(
    ("wrong", "is_hit", "said"),
    [
        ("window", has_window, "output: "),
        ("heads", anything, "row 0, head 0 on"),
        ("nan", anything, "output: NaN or infinity from row"),
        ("norm", lambda variant: variant.q_norm, "output: "),
        (
            "cache scale",
            lambda variant: variant.scaled and variant.writes,
            "scales are wrong, by up to 1.00%",
        ),
        ("slot", lambda variant: variant.writes, "key_cache: "),
        ("lost", lambda variant: variant.writes, "value_cache: "),
        ("overrun", anything, "1 arrays were written beyond their end"),
    ],
)
def test_a_mistake_is_found_where_it_is(
    wrong: str, is_hit: Callable[[AttentionVariant], bool], said: str
) -> None:
    with paper_gpu(wrong) as gpu:
        rows = {case.name: check_case(gpu, case) for case in SMALL}
    failed = {name for name, row in rows.items() if row.status == "failed"}
    assert failed == {case.name for case in SMALL if is_hit(case.variant)}
    assert all(said in rows[name].detail for name in failed)


def test_kernels_that_do_nothing_fail_everywhere(tmp_path: Path) -> None:
    """Through the library that launches them, of a folder with a file for each kernel that is needed."""
    image, launched = b"\x7fELF", Counter[str]()
    cubin = CubinRecord(len(image), hashlib.sha256(image).hexdigest(), 32, 0, 0)
    records = {}
    (tmp_path / "sm_89").mkdir()
    for key, spec in needed().items():
        records[key] = KernelRecord(key, spec.role, spec.function, spec.warps, spec.arguments, {89: cubin})
        (tmp_path / records[key].file(89)).write_bytes(image)
    KernelTable({89: "none"}, records).write(tmp_path)
    counts = {record.entry: len(record.arguments) + 2 for record in records.values()}
    fake = FakeCuda(
        functions={
            entry: (count, lambda *launch, entry=entry: launched.update([entry]))
            for entry, count in counts.items()
        }
    )
    gpu = Gpu(Driver.open(bindings=fake), tmp_path)
    rows = [check_case(gpu, case) for case in SMALL]
    assert all("output: NaN or infinity from row 0, head 0 on (100.00%)" in row.detail for row in rows)
    assert launched == dict.fromkeys(("prepare", "attend", "merge"), len(SMALL))


def test_a_scale_that_is_1_percent_off_is_found() -> None:
    """In float16; bfloat16 rounds by nearly as much."""
    with paper_gpu("scale") as gpu:
        rows = {case: check_case(gpu, case) for case in SMALL if case.variant.activation == "f16"}
    assert len(rows) > 10
    assert all(row.status == "failed" and "output" in row.detail for row in rows.values())


def test_a_pool_that_begins_elsewhere() -> None:
    far = next(case for case in CASES if case.kind.before)
    assert far.first_block * far.variant.block_size * 2 * 64 >= 1 << 31
    near = Case("near", far.variant, replace(far.kind, before=100_000))
    with paper_gpu() as gpu:
        row = check_case(gpu, near)
    assert row.status == "ok", row


def test_without_kernels_it_is_skipped() -> None:
    with paper_gpu(kernels=None) as gpu:
        rows = [run_one(name, checks([])[name], gpu) for name in (f"kernels/{SMALL[0].name}", "graph")]
    assert all(row.status == "skipped" and "triton is not installed" in row.detail for row in rows)
    assert not is_good(rows)


# A CUDA graph


def test_a_graph_follows_the_arrays() -> None:
    with paper_gpu() as gpu:
        row = check_graph(gpu, replays=30)
    assert row.status == "ok", row
    assert row.figures["replays"] == 30


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("frozen", "replay 0: output"),
        ("lost", "replay 0: key_cache"),
        ("waits", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED|cuStreamSynchronize failed"),
    ],
)
def test_a_graph_that_does_not_is_found(wrong: str, said: str) -> None:
    import re

    with paper_gpu(wrong) as gpu:
        row = run_one("graph", lambda gpu: check_graph(gpu, replays=5), gpu)
        gpu.wait()  # the stream works again
    assert row.status == "failed"
    assert re.search(said, row.detail)


# Timing


def test_what_a_load_reads_and_multiplies() -> None:
    decode = Load(QWEN3_8B, 16, 1, 1023)
    assert decode.read_bytes == 16 * 1024 * 8 * 2 * 128 * 2  # KV heads, key and value, elements, bytes
    assert Load(LLAMA_1B_INT8, 1, 1, 1023).read_bytes == 1024 * 8 * 2 * (64 + 4)
    assert Load(LLAMA_1B, 1, 3, 10).flops == (11 + 12 + 13) * 32 * 64 * 2 * 2
    assert decode.shapes.table_width == 32
    assert Load(LLAMA_1B, 1, 512, 8192).shapes.table_width == 512
    assert len({load.name for load in timing.LOADS}) == len(timing.LOADS) == 40


@pytest.mark.parametrize("load", [Load(LLAMA_1B_INT8, 2, 1, 40), Load(QWEN3_8B, 1, 9, 3)])
def test_a_load_is_timed(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setattr(timing, "POOL_BYTES", 3 * load.read_bytes)
    monkeypatch.setattr(timing, "_TRIES", 1)
    with paper_gpu() as gpu:
        row = check_load(gpu, load)
    assert row.status == "ok", row
    seconds = row.figures["seconds"]
    assert isinstance(seconds, float)
    assert row.figures["cache_bytes_per_second"] == load.read_bytes / seconds
    assert row.figures["flops_per_second"] == load.flops / seconds
    assert ("GB/s" in row.detail) == load.is_decode


def test_a_load_that_does_not_fit_is_skipped() -> None:
    with paper_gpu(total_memory=1 << 26) as gpu:
        row = check_load(gpu, Load(QWEN3_8B, 16, 1, 8191))
    assert row.status == "skipped"
    assert "and 64 MiB are free" in row.detail


def test_a_copy_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TRIES", 1)
    with paper_gpu(total_memory=1 << 26) as gpu:
        row = check_copy(gpu)
    assert row.status == "ok"
    assert "a copy of 8 MiB" in row.detail


def test_loads_are_compared_with_what_was_measured() -> None:
    rows = [
        Row("timing/copy", "ok", "4000 GB/s", figures={"bytes_per_second": 4e12}),
        Row("timing/a", "ok", "1000 GB/s", figures={"cache_bytes_per_second": 1e12, "flops_per_second": 1.0}),
        Row("timing/b", "ok", "9 TFLOP/s", figures={"flops_per_second": 9e12}),
    ]
    copy, decode, prefill = with_shares(rows)
    assert (copy, prefill) == (rows[0], rows[2])  # there is no matrix
    assert decode.detail == "1000 GB/s; 25% of the copy"
    assert decode.figures["share_of_copy"] == 0.25


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
    from pagelet.tools.gpu import units

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
        import warnings

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
