"""Cubins that were compiled before, on this machine: models with the same heads share their kernels.

One file each, its name a digest of everything that the cubin depends on; what is damaged is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from pagelet.plugins.kernels.assembler import Assembled

_SOURCES = ("attention.py", "merge.py", "prepare.py", "compile.py", "assembler.py")


def default_folder() -> Path:
    """Where the system keeps what can be made anew."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(home) / "pagelet" / "kernels"


def cache_key(*parts: object) -> str:
    """Of a kernel's specification and the tools, and of all sources that a cubin depends on."""
    found = hashlib.sha256(repr(parts).encode())
    for name in _SOURCES:
        found.update((Path(__file__).parent / name).read_bytes())
    return found.hexdigest()


class CubinCache:
    """A folder; None remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str) -> tuple[Assembled, int] | None:
        """(cubin with its resources, bytes of shared memory), or None."""
        if self._folder is None:
            return None
        try:
            head, cubin = (self._folder / key).read_bytes().split(b"\n", 1)
            fields = json.loads(head)
            sizes = [fields[name] for name in ("registers", "spills", "shared")]
            known = fields["key"] == key and fields["sha256"] == hashlib.sha256(cubin).hexdigest()
            if not known or not all(type(size) is int for size in sizes):
                return None
            return Assembled(cubin, *sizes[:2]), sizes[2]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, assembled: Assembled, shared: int) -> None:
        """Appears whole or not at all; a folder that cannot be written is no error."""
        if self._folder is None:
            return
        fields = {
            "key": key,
            "sha256": hashlib.sha256(assembled.cubin).hexdigest(),
            "registers": assembled.registers,
            "spills": assembled.spills,
            "shared": shared,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(json.dumps(fields).encode() + b"\n" + assembled.cubin)
            Path(file.name).replace(self._folder / key)
        except OSError:
            return
