"""Files from strangers: read at given offsets, or as JSON, and never more than was checked."""

import io
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import CheckpointError

MAX_JSON_BYTES = 16 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class SourceFile:
    """A file of a checkpoint, read piece by piece, from any thread.

    It is not mapped: mapped pages would count as the exporter's own memory.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self._stream = open_regular(path)
        self.path = path
        self.size = os.fstat(self._stream.fileno()).st_size
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """uint8 [nbytes] from `offset`.

        Raises:
            CheckpointError: the file ends before that.
        """
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise CheckpointError(
                f"{self.path} is truncated: bytes {offset} to {offset + nbytes} were expected in it, "
                f"it has {self.size}. Download it again."
            )
        buffer = np.empty(nbytes, np.uint8)
        rest = buffer.data
        with self._lock:
            self._stream.seek(offset)
            while rest:
                count = self._stream.readinto(rest)
                if not count:
                    raise CheckpointError(f"{self.path} became shorter while it was read. Export again.")
                rest = rest[count:]
        return buffer

    def close(self) -> None:
        self._stream.close()


def open_regular(path: Path) -> io.FileIO:
    """A regular file, or a link to one, opened for reading.

    A pipe would keep the exporter waiting, a device would give bytes without end.

    Raises:
        CheckpointError: it cannot be opened, or is something else.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no regular file; expected the file itself or a link to it.")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from error


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """A whole file.

    Raises:
        CheckpointError: it cannot be opened, is no regular file, or is larger than `max_bytes`.
    """
    with io.BufferedReader(open_regular(path)) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are read.")
        try:
            return stream.read(size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A whole UTF-8 file; errors as in `read_bytes`, and CheckpointError where it is not UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}). Download it again.") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file that holds an object; errors as in `read_text`."""
    return parse_json(read_text(path, max_bytes), str(path))


def parse_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        CheckpointError: names `where`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails where half a character stands alone
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}; expected an object.")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found
