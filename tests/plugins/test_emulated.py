"""Kernels for other CPUs, emulated: AVX-512 and AVX-VNNI through SIMDe, aarch64 through QEMU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagelet.plugins import native

REPOSITORY = Path(__file__).parents[2]
BUILDS = REPOSITORY / "build"  # kept: later runs compile only what changed

pytestmark = pytest.mark.slow


def run(command: list[str], **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def build(folder: str, target: str, *options: str) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    run(["cmake", "-S", str(REPOSITORY / "plugins"), "-B", str(BUILDS / folder), *options])
    run(["cmake", "--build", str(BUILDS / folder), "--target", target, "--parallel", "2"])
    return BUILDS / folder


@pytest.mark.parametrize(
    ("isa", "names"),
    [
        (
            "avx512",
            (
                "attention_reference",
                "attention_invariance",
                "attention_trees",
                "attention_heads",
                "attention_shared",
                "linear",
                "linear_fused",
                "activations",
                "experts",
                "float_linear",
            ),
        ),
        ("avxvnni", ("linear", "linear_fused")),  # where it differs from AVX2
    ],
)
def test_x86_through_simde(isa: str, names: tuple[str, ...]) -> None:
    if "avx2" not in native.available_isas():
        pytest.skip("the emulation needs AVX2")
    if not Path("/usr/include/simde/x86/avx512.h").is_file():
        pytest.skip("needs SIMDe's headers (Debian: libsimde-dev)")
    folder = build("emulated-avx512", "pagelet_ops", "-DPAGELET_EMULATE_AVX512=ON")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not instruction_set"]
    run([*pytest_command, *files], PAGELET_ISA=isa, PAGELET_TEST_OPS=str(folder))


def test_aarch64_through_qemu() -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    system = (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
    )
    options = (*system, "-DCMAKE_EXE_LINKER_FLAGS=-static", "-DPAGELET_KERNEL_CHECK=ON")
    folder = build("emulated-aarch64", "pagelet_kernel_check", *options)
    output = run([emulator, str(folder / "pagelet_kernel_check")])
    for cache_type in ("f32", "f16", "int8", "fp8"):
        assert f"neon     {cache_type}" in output
