"""The loader, the choice of the instruction set, and the C ABI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from pagelet.plugins import native

CSRC = Path(__file__).parents[2] / "plugins" / "csrc"
HEADERS = [f"{folder}onnxruntime_c_api.h" for folder in ("", "onnxruntime/", "onnxruntime/core/session/")]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_library_is_found_and_registers() -> None:
    assert native.ops_library().stem == "pagelet_ops"
    for _ in range(3):  # every session shares one domain
        native.register_ops(ort.SessionOptions())


def test_missing_library_says_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagelet.plugins.__path__", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"is not in .*: build it with `pip install"):
        native.ops_library()


def test_available_isas() -> None:
    isas = native.available_isas()
    assert isas[0] == "portable"
    assert native.selected_isa() in isas


@pytest.mark.parametrize("isa", native.available_isas())
def test_an_isa_can_be_forced(isa: str) -> None:
    done = run_python("from pagelet.plugins import native; print(native.selected_isa())", PAGELET_ISA=isa)
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize(
    "call", ["native.selected_isa()", "native.register_ops(onnxruntime.SessionOptions())"]
)
def test_unknown_isa_is_an_error(call: str) -> None:
    done = run_python(f"import onnxruntime\nfrom pagelet.plugins import native\n{call}", PAGELET_ISA="mmx")
    assert done.returncode == 1
    assert re.search(r"RuntimeError: .*PAGELET_ISA is 'mmx'.*set one of: portable", done.stderr), done.stderr


def test_import_loads_neither_onnx_nor_onnxruntime() -> None:
    loaded = "{'onnx', 'onnxruntime'} & set(sys.modules)"
    done = run_python(f"import sys; from pagelet.plugins import native; print({loaded})")
    assert done.stdout.strip() == "set()", done.stderr


def compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def official_header() -> Path:
    """The header of ONNX Runtime, where Debian's libonnxruntime-dev or PAGELET_ORT_INCLUDE has it."""
    folders = [os.environ.get("PAGELET_ORT_INCLUDE"), "/usr/include", "/usr/local/include"]
    for folder in filter(None, folders):
        for name in HEADERS:
            if (header := Path(folder) / name).is_file():
                return header
    pytest.skip("ONNX Runtime's C header is not installed (libonnxruntime-dev, or set PAGELET_ORT_INCLUDE)")


def test_slots_match_the_official_header(tmp_path: Path) -> None:
    program = r"""
    #include "ort_api.h"
    #include <onnxruntime_c_api.h>
    namespace ours = pagelet::ort;
    #define CHECK(name, slot, result, parameters) \
      static_assert(offsetof(OrtApi, name) == slot * sizeof(void*) && ours::Api::k##name == slot, #name);
    PAGELET_ORT_FUNCTIONS(CHECK)
    static_assert(sizeof(ours::CustomOp) == sizeof(OrtCustomOp));
    #define MEMBER(name, theirs) \
      static_assert(offsetof(ours::CustomOp, name) == offsetof(OrtCustomOp, theirs));
    MEMBER(GetName, GetName) MEMBER(GetInputType, GetInputType) MEMBER(KernelDestroy, KernelDestroy)
    MEMBER(GetInputCharacteristic, GetInputCharacteristic) MEMBER(GetInputMemoryType, GetInputMemoryType)
    MEMBER(CreateKernelV2, CreateKernelV2) MEMBER(KernelComputeV2, KernelComputeV2)
    MEMBER(InferOutputShape, InferOutputShapeFn) MEMBER(GetAliasMap, GetAliasMap)
    MEMBER(ReleaseAliasMap, ReleaseAliasMap)
    #define VALUE(name, theirs) static_assert(int(ours::name) == int(theirs));
    VALUE(kFail, ORT_FAIL) VALUE(kInvalidArgument, ORT_INVALID_ARGUMENT)
    VALUE(kFloat, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) VALUE(kUint8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8)
    VALUE(kInt8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) VALUE(kInt32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32)
    VALUE(kInt64, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) VALUE(kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16)
    VALUE(kFloat8E4M3FN, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN)
    VALUE(kRequired, INPUT_OUTPUT_REQUIRED) VALUE(kOptional, INPUT_OUTPUT_OPTIONAL)
    """
    source = tmp_path / "slots.cc"
    source.write_text(program)
    folders = ["-I", str(CSRC), "-I", str(official_header().parent)]
    command = [compiler(), "-std=c++17", "-Winvalid-offsetof", "-fsyntax-only", *folders, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_share_no_symbol_between_instruction_sets(tmp_path: Path) -> None:
    """The linker keeps one copy of a weak symbol: one from AVX-512 code would crash older CPUs."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    for source in sorted(CSRC.glob("*_kernel.cc")):
        target = tmp_path / "kernel.o"
        flags = ["-std=c++17", "-O0", "-fPIC", "-DPAGELET_ISA=portable", "-DPAGELET_SIMD_PORTABLE"]
        subprocess.run([compiler(), *flags, "-c", str(source), "-o", str(target)], check=True)
        symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout
        shared = [line for line in symbols.splitlines() if " W " in line or " V " in line or " u " in line]
        assert [line for line in shared if "pagelet::portable::" not in line] == []
