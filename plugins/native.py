"""Finds the library of native ops, registers it with ONNX Runtime, and says which instruction sets it has.

The library is chosen and loaded only when asked for. The environment variable ``PAGELET_ISA`` (``portable``,
``avx2``, ``avxvnni``, ``avx512``, ``neon``, ``dotprod``) forces an instruction set; unset, the widest of
this CPU is used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pagelet.plugins

if TYPE_CHECKING:
    import onnxruntime

_SUFFIX = ".dll" if sys.platform == "win32" else ".so"  # a CMake MODULE ends in .so on macOS too

# What a kernel's bits depend on beside its inputs: whether a multiply-add rounds once, and the lanes that
# attention sums in. Integer dot products are exact: instructions for them change nothing.
_ARITHMETIC = {
    "portable": "rounded-4",
    "neon": "fused-4",
    "dotprod": "fused-4",
    "avx2": "fused-8",
    "avxvnni": "fused-8",
    "avx512": "fused-16",
}
# Raised when a kernel's order of operations changes: bundles that were certified before then drift.
_ORDER = 1


def ops_library() -> Path:
    """The path of the op library.

    Raises:
        FileNotFoundError: pagelet was not built, or the build was removed.
    """
    folders = list(pagelet.plugins.__path__)
    for folder in folders:
        path = Path(folder) / f"pagelet_ops{_SUFFIX}"
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"pagelet_ops{_SUFFIX} is not in {' or '.join(folders)}: build it with "
        "`pip install --no-build-isolation -e .` in the source checkout, or install a wheel of pagelet"
    )


def register_ops(session_options: onnxruntime.SessionOptions) -> None:
    """Makes the ops of the domain ``pagelet`` known to sessions created with ``session_options``.

    Raises:
        FileNotFoundError: the library is missing.
        RuntimeError: ``PAGELET_ISA`` names an instruction set that cannot run here, or ONNX Runtime is older
            than 1.21.
    """
    path = str(ops_library())
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # ONNX Runtime's exception classes are private
        raise RuntimeError(f"ONNX Runtime did not take the ops of {path}: {error}") from error


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this build has and this CPU runs, narrowest first."""
    names: list[str] = []
    while (name := _library().pagelet_available_isa(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def selected_isa() -> str:
    """The instruction set that the kernels use: settled once per process.

    Raises:
        RuntimeError: ``PAGELET_ISA`` names one that cannot run here.
    """
    name: bytes | None = _library().pagelet_selected_isa()
    if name is None:
        raise RuntimeError(
            f"PAGELET_ISA is {os.environ.get('PAGELET_ISA')!r}, which this build or this CPU does not have: "
            f"unset it, or set one of: {', '.join(available_isas())}"
        )
    return name.decode()


def kernel_arithmetic() -> str:
    """Names the arithmetic of the kernels that run here: where it is the same, so is every bit.

    Raises:
        RuntimeError: as `selected_isa`.
    """
    return f"{_ARITHMETIC[selected_isa()]}.{_ORDER}"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(ops_library()))
    library.pagelet_available_isa.argtypes = [ctypes.c_int]
    library.pagelet_available_isa.restype = ctypes.c_char_p
    library.pagelet_selected_isa.restype = ctypes.c_char_p
    return library
