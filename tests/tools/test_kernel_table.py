"""The table of kernels: which are compiled, what is printed, and when it fails."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

pytest.importorskip("triton")

from pagelet.models.targets import KERNEL_SMS
from pagelet.plugins.kernels.assembler import KernelCompileError
from pagelet.tools import kernel_table
from pagelet.tools.kernel_table import Row, main, table, variants

DECODE = Row(128, "f16", "int8", "decode", 89, 96, 0, 20480)
PREFILL = Row(128, "f16", "int8", "prefill", 89, 255, 84, 24896)


def test_the_default_covers_each_dimension_and_every_covers_all() -> None:
    chosen, every = variants((64, 128), False), variants((64, 128), True)
    assert len(every) == 2 * 2 * 3
    assert set(chosen) < set(every)
    assert {(v.activation, v.cache) for v in chosen if v.head_dim == 128} == {
        (activation, cache) for activation in ("f16", "bf16") for cache in ("f16", "int8", "fp8")
    }
    assert [(v.activation, v.cache) for v in chosen if v.head_dim == 64] == [("f16", "f16")]


def test_a_line_has_every_gpu() -> None:
    other = Row(128, "f16", "int8", "prefill", 120, 200, 0, 1024)
    head, line, _ = table([PREFILL, other]).splitlines()
    assert head.split()[-4:] == ["SM", "89", "SM", "120"]
    assert line.split() == ["128", "f16", "int8", "prefill", "255!84", "24K", "200", "1K"]


@pytest.mark.parametrize(
    ("rows", "status"),
    [([DECODE, PREFILL], 0), ([Row(128, "f16", "int8", "decode_tree", 89, 255, 4, 0)], 1)],
)
def test_only_a_decode_kernel_that_spills_is_a_failure(
    rows: list[Row], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_table, "measure_all", lambda *arguments: rows)
    assert main(["--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out) == [asdict(row) for row in rows]
    assert ("decode_tree spills 4 bytes: head 128, f16, cache int8, SM 89" in err) == bool(status)


def test_what_does_not_compile_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> list[Row]:
        raise KernelCompileError("no ptxas")

    monkeypatch.setattr(kernel_table, "measure_all", fails)
    assert main([]) == 1
    assert capsys.readouterr() == ("", "kernel_table: no ptxas\n")


@pytest.mark.parametrize("argument", ["--sm=75", "--sm=x", "--head-dim=65", "--jobs=0"])
def test_what_is_unknown_is_bad_usage(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == 2


def test_kernels_are_really_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sm", "89", "--head-dim", "64", "--jobs", "1", "--json"])
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
    (variant,) = variants((64,), False)
    assert [row.role for row in rows] == [spec.role for spec in variant.kernels()]
    assert all((row.sm in KERNEL_SMS) and 8 <= row.registers <= 255 for row in rows)
