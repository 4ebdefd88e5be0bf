"""Imports TensorRT or TensorRT-RTX, whose Python packages differ, in a state that plugins can work with.

TensorRT-RTX 1.7 for Linux: the ONNX parser opens ``libtensorrt_rtx.so`` by that name when it meets a plugin
node, while its wheel has only ``libtensorrt_rtx.so.1``; the process is then killed by the parser. Before the
package is imported, the parser is therefore loaded from a private folder of links in which both names exist:
the loader looks for the libraries that a library asks for beside it (its RPATH is ``$ORIGIN``), and takes the
file behind a link for the library that is loaded already.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_RTX, _RTX_LIBRARIES = "tensorrt_rtx", "tensorrt_rtx_libs"
_CORE = "libtensorrt_rtx.so"
_PARSER = "libtensorrt_onnxparser_rtx.so"
_INSTALL = {
    _RTX: "run `pip install tensorrt-rtx-cu13`",
    "tensorrt": "run `pip install tensorrt-cu13`; on a Jetson it is JetPack's package python3-libnvinfer",
}


class TensorRTError(RuntimeError):
    """TensorRT or TensorRT-RTX is missing, or cannot be used as it is installed."""


def import_tensorrt(package: str, *, parser: bool = True) -> Any:
    """The module ``tensorrt`` or ``tensorrt_rtx``.

    Args:
        parser: whether its ONNX parser will be used: what only runs engines can do without.

    Raises:
        TensorRTError: it is not installed, its libraries do not load, or its parser would end the process at
            the first plugin node (it was imported before, by other code, and lacks a file); the message says
            what mends it.
    """
    if package == _RTX and sys.platform == "linux":
        with _lock:
            _prepare_rtx_parser(needed=parser)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TensorRTError(f"{package} cannot be imported ({error}): {_INSTALL[package]}") from error


def _prepare_rtx_parser(*, needed: bool) -> None:
    """Sees to it that the parser will find the core library; if that is too late and it is needed, raises."""
    spec = importlib.util.find_spec(_RTX_LIBRARIES)
    if spec is None or not spec.submodule_search_locations:
        return  # installed from an archive: its folder of libraries has every name
    folder = Path(next(iter(spec.submodule_search_locations)))
    core, parser = _versioned(folder, _CORE), _versioned(folder, _PARSER)
    if (folder / _CORE).exists() or core is None or parser is None:
        return
    if _is_loaded(parser):
        if not needed or _linked_parser == parser or _is_found_by_name(_CORE):
            return
        raise TensorRTError(
            f"{_RTX} was imported before pagelet could prepare it, and {folder} lacks {_CORE}, without which "
            f"its ONNX parser ends the process: import it through pagelet first, or run `ln -s {core.name} "
            f"{shlex.quote(str(folder / _CORE))}`"
        )
    _load_through_links(core, parser)


_lock = threading.Lock()
_linked_parser: Path | None = None  # the one that this process loaded through links


def _load_through_links(core: Path, parser: Path) -> None:
    global _linked_parser
    links = Path(tempfile.mkdtemp(prefix="pagelet-tensorrt-rtx-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)  # the parser looks there at any time
    try:
        for name, target in ((_CORE, core), (parser.name, parser)):
            (links / name).symlink_to(target)
        ctypes.CDLL(str(links / parser.name))
    except OSError as error:
        raise TensorRTError(
            f"the ONNX parser of {_RTX} does not load ({error}). Run `ln -s {core.name} "
            f"{shlex.quote(str(core.with_name(_CORE)))}` if only that file is missing"
        ) from error
    _linked_parser = parser


def _versioned(folder: Path, name: str) -> Path | None:
    """The file that ``name.1`` (``name.1.7.1``, …) is in a folder; ``None`` if there is none."""
    found = sorted(path for path in folder.glob(f"{name}.*") if path.is_file())
    return found[0].resolve() if found else None


def _is_found_by_name(library: str) -> bool:
    """Whether the loader takes the bare name for a loaded library: ``LD_LIBRARY_PATH`` can make it so."""
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _is_loaded(library: Path) -> bool:
    """Whether this process has mapped the file."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        return any(line.rstrip("\n").endswith(f" {library}") for line in lines)
