"""The table of compiled kernels, `kernels.json`, beside the folders of cubins: written and read here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = "kernels.json"
_VERSION = 1
_LARGEST_TABLE = 16 << 20  # bytes; one of 64 kernels for 8 GPUs has 100 KB
_KEY = re.compile(r"[a-z0-9_]{1,64}")
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_TYPE = re.compile(r"\*[a-z0-9]{2,16}|i32")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KernelError(RuntimeError):
    """Kernels could not be compiled, read or used."""


class KernelTableError(KernelError):
    """The table of kernels is missing, damaged, or of another version."""


@dataclass(frozen=True)
class CubinRecord:
    """A kernel for one GPU.

    Attributes:
        bytes, sha256: of the file.
        registers: 32 bit registers of a thread.
        spills: bytes of a thread that did not fit into them and travel through memory.
        shared: bytes of dynamic shared memory that a launch needs.
    """

    bytes: int
    sha256: str
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class KernelRecord:
    """A kernel, compiled for each of some GPUs.

    Attributes:
        key: `KernelSpec.key`.
        entry: the function's name in a cubin.
        warps: of 32 threads, per program.
        arguments: names and Triton types; two null pointers follow them in a launch.
        cubins: by compute capability, times ten.
    """

    key: str
    role: str
    entry: str
    warps: int
    arguments: tuple[tuple[str, str], ...]
    cubins: Mapping[int, CubinRecord]

    def file(self, sm: int) -> str:
        """Of a cubin, relative to the table's folder."""
        return f"sm_{sm}/{self.key}.cubin"


@dataclass(frozen=True)
class KernelTable:
    """
    Attributes:
        toolchains: what assembled the kernels of a compute capability.
        kernels: by key.
    """

    toolchains: Mapping[int, str]
    kernels: Mapping[str, KernelRecord]

    def write(self, folder: Path) -> None:
        """Writes the table, whole or not at all."""
        content = {
            "version": _VERSION,
            "toolchains": {str(sm): name for sm, name in sorted(self.toolchains.items())},
            "kernels": {key: _to_json(record) for key, record in sorted(self.kernels.items())},
        }
        partial = folder / f"{TABLE}.partial"
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, folder / TABLE)  # noqa: PTH105 (a Path's replace is this)

    @classmethod
    def read(cls, folder: Path) -> KernelTable:
        """
        Raises:
            KernelTableError: there is no table, or something in it is not as this version writes it.
        """
        path = folder / TABLE
        try:
            if (size := path.stat().st_size) > _LARGEST_TABLE:
                raise KernelTableError(f"{path} has {size} bytes, expected at most {_LARGEST_TABLE}")
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise KernelTableError(
                f"the table of kernels {path} cannot be read ({error}): export again"
            ) from error
        try:
            return _table(content)
        except ValueError as error:
            raise KernelTableError(f"{path} is damaged: {error}; export again") from error


def _to_json(record: KernelRecord) -> dict[str, Any]:
    return {
        "role": record.role,
        "entry": record.entry,
        "warps": record.warps,
        "shared": max(cubin.shared for cubin in record.cubins.values()),
        "arguments": [list(argument) for argument in record.arguments],
        "sms": {
            str(sm): {"file": record.file(sm), **vars(cubin)} for sm, cubin in sorted(record.cubins.items())
        },
    }


def _table(content: Any) -> KernelTable:
    top = _object(content, "the table")
    if top.get("version") != _VERSION:
        raise ValueError(f"its version is {top.get('version')!r}, expected {_VERSION}")
    toolchains = {_number(sm): str(name) for sm, name in _object(top.get("toolchains"), "toolchains").items()}
    kernels = {key: _kernel(key, value) for key, value in _object(top.get("kernels"), "kernels").items()}
    return KernelTable(toolchains, kernels)


def _kernel(key: str, value: Any) -> KernelRecord:
    where = f"kernel {key!r}"
    item = _object(value, where)
    arguments = item.get("arguments")
    if not isinstance(arguments, list):
        raise ValueError(f"{where}: arguments is no list")
    record = KernelRecord(
        _text(key, _KEY, "a key"),
        _text(item.get("role"), _KEY, f"{where}: role"),
        _text(item.get("entry"), _ENTRY, f"{where}: entry"),
        _count(item, "warps", where, most=32),
        tuple(_argument(argument, where) for argument in arguments),
        {_number(sm): _cubin(cubin, where) for sm, cubin in _object(item.get("sms"), where).items()},
    )
    for sm in record.cubins:
        # So a path in the table cannot lead out of the folder.
        if (file := item["sms"][str(sm)].get("file")) != record.file(sm):
            raise ValueError(f"{where}: the file for SM {sm} is {file!r}, expected {record.file(sm)!r}")
    return record


def _cubin(value: Any, where: str) -> CubinRecord:
    item = _object(value, where)
    sha256 = _text(item.get("sha256"), _SHA256, f"{where}: sha256")
    counts = {name: _count(item, name, where) for name in ("bytes", "registers", "spills", "shared")}
    return CubinRecord(sha256=sha256, **counts)


def _argument(value: Any, where: str) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}: an argument is {value!r}, expected a name and a type")
    return _text(value[0], _ENTRY, f"{where}: an argument"), _text(value[1], _TYPE, f"{where}: a type")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, expected an object")
    return value


def _text(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {value!r:.80}")
    return value


def _number(sm: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{1,2}", sm, re.ASCII):
        raise ValueError(f"a compute capability is {sm!r:.80}")
    return int(sm)


def _count(item: dict[str, Any], name: str, where: str, most: int = 1 << 31) -> int:
    value = item.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{where}: {name} is {value!r:.80}, expected a whole number up to {most}")
    return value
