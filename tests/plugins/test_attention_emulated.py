"""The AVX-512 kernels through SIMDe, so that they are tested on any x86-64 CPU with AVX2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagelet.plugins import native

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "emulated-avx512"  # kept: later runs compile only what changed


@pytest.mark.slow
def test_avx512_kernels_emulated() -> None:
    if "avx2" not in native.available_isas():
        pytest.skip("the emulation needs AVX2")
    if not Path("/usr/include/simde/x86/avx512.h").is_file() or shutil.which("cmake") is None:
        pytest.skip("needs cmake and SIMDe's headers (Debian: libsimde-dev)")
    configure = ["cmake", "-S", str(REPOSITORY / "plugins"), "-B", str(BUILD), "-DPAGELET_EMULATE_AVX512=ON"]
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", "2"]):
        built = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    names = ("attention_reference", "attention_invariance", "linear")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not instruction_set", *files],
        env=os.environ | {"PAGELET_ISA": "avx512", "PAGELET_TEST_OPS": str(BUILD)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
