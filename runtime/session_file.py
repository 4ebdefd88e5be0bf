"""The session file: a sequence's tokens and blocks on disk, checked before anything of it is used.

    magic 16 bytes | version u32 | header length u32 | header, JSON | tokens, int64 each
    | the blocks of each group in turn | SHA-256 of all before it

Numbers are little-endian. A block is the bytes of its layers' arrays, in the backend's order.
"""

import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import InputError, SessionError
from pagelet.models.spec import LIMITS
from pagelet.models.strict import decode

MAGIC = b"pagelet-session\n"
VERSION = 1
MAX_HEADER_BYTES = 16 << 20
_PREAMBLE = struct.Struct("<16sII")
_DIGEST_BYTES = 32
_CHUNK = 1 << 20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class SavedSampler:
    """A SamplerState as JSON has it."""

    params: dict[str, Any]
    seed: int
    sample_index: int
    prompt_tokens: int


@dataclass(frozen=True)
class SessionHeader:
    """What a session file says of itself.

    Attributes:
        fingerprint: of the model, as the backend names it.
        windows: of each group of layers.
        num_tokens: of the sequence.
        num_blocks: of each group, the last full blocks of the first `saved_tokens` tokens.
        metadata: the caller's own.
    """

    fingerprint: str
    cache_type: str
    block_size: int
    windows: tuple[int, ...]
    num_tokens: int
    saved_tokens: int
    num_blocks: tuple[int, ...]
    sampler: SavedSampler | None
    metadata: dict[str, Any]


def write_session(path: Path, header: SessionHeader, tokens: list[int], blocks: Iterable[Bytes]) -> int:
    """Write a session file whole or not at all; returns its bytes. `blocks` are those of each group.

    Raises:
        InputError: the header cannot be stored, or the file not be written.
    """
    try:
        text = json.dumps(asdict(header)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"metadata is not JSON: {error}.") from error
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(f"metadata makes a header of {len(text)} bytes; at most {MAX_HEADER_BYTES} fit.")
    digest = sha256()
    try:
        with _replacing(path) as stream:
            head = _PREAMBLE.pack(MAGIC, VERSION, len(text)) + text + np.array(tokens, "<i8").tobytes()
            for part in (np.frombuffer(head, np.uint8), *blocks):
                digest.update(part.data)
                stream.write(part.data)
            stream.write(digest.digest())
            return stream.tell()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from error


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, for this user alone, that takes its place once it is safely on disk."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    if sys.platform != "win32":  # where a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class SessionFile:
    """An open session file whose checksum and sizes are right.

    Attributes:
        header: not yet compared with the engine.
    """

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        """Check the whole file, in constant memory.

        Raises:
            SessionError: no session file, of another version, truncated or changed.
        """
        self._stream = stream
        self._path = path
        self._size = os.fstat(stream.fileno()).st_size
        header_bytes = self._check_preamble()
        self._check_digest()
        self._tokens_at = _PREAMBLE.size + header_bytes
        self.header = self._parse(self._read(_PREAMBLE.size, header_bytes))

    def tokens(self, block_bytes: tuple[int, ...]) -> list[int]:
        """The token ids, after a check that tokens and blocks of these sizes make up the file exactly.

        Raises:
            SessionError: they do not.
        """
        header = self.header
        self._blocks_at = self._tokens_at + 8 * header.num_tokens
        sizes = (count * size for count, size in zip(header.num_blocks, block_bytes, strict=True))
        expected = self._blocks_at + sum(sizes) + _DIGEST_BYTES
        if expected != self._size:
            raise SessionError(f"{self._path} has {self._size} bytes, its header describes {expected}.")
        ids: list[int] = np.frombuffer(self._read(self._tokens_at, 8 * header.num_tokens), "<i8").tolist()
        return ids

    def blocks(self, group: int, count: int, block_bytes: tuple[int, ...]) -> Bytes:
        """The first `count` blocks of a group, uint8 [count, block_bytes]; `tokens` was called before."""
        before = sum(n * size for n, size in zip(self.header.num_blocks[:group], block_bytes, strict=False))
        data = self._read(self._blocks_at + before, count * block_bytes[group])
        return np.frombuffer(data, np.uint8).reshape(count, block_bytes[group])

    def _check_preamble(self) -> int:
        """Bytes of the header."""
        if self._size < _PREAMBLE.size + _DIGEST_BYTES:
            raise SessionError(f"{self._path} has {self._size} bytes: no session file, or truncated.")
        magic, version, header_bytes = _PREAMBLE.unpack(self._read(0, _PREAMBLE.size))
        if magic != MAGIC:
            raise SessionError(f"{self._path} is not a pagelet session: it begins with {magic!r}.")
        if version != VERSION:
            raise SessionError(
                f"{self._path} is a session of version {version}; this pagelet reads version {VERSION}. "
                "Begin the conversation anew, or use the pagelet that saved it."
            )
        room = self._size - _PREAMBLE.size - _DIGEST_BYTES
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, room):
            raise SessionError(f"{self._path} claims a header of {header_bytes} bytes: damaged or truncated.")
        return int(header_bytes)

    def _check_digest(self) -> None:
        digest, end = sha256(), self._size - _DIGEST_BYTES
        for start in range(0, end, _CHUNK):
            digest.update(self._read(start, min(_CHUNK, end - start)))
        if digest.digest() != self._read(end, _DIGEST_BYTES):
            raise SessionError(f"{self._path} does not have its own SHA-256: truncated or changed.")

    def _parse(self, data: bytes) -> SessionHeader:
        where = f"{self._path}: the header"
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SessionError(f"{where} is not valid JSON ({error}).") from error
        header = decode(SessionHeader, values, where, SessionError)
        counts = (header.block_size, header.saved_tokens, *header.windows, *header.num_blocks)
        if not 1 <= header.num_tokens <= LIMITS["max_context"]:
            raise SessionError(f"{where} names {header.num_tokens} tokens; expected 1 to 2**24.")
        if not all(0 <= count <= LIMITS["max_context"] for count in counts):
            raise SessionError(f"{where} has a count out of range: {counts[:20]}.")
        return header

    def _read(self, start: int, count: int) -> bytes:
        self._stream.seek(start)
        data = self._stream.read(count)
        if len(data) != count:
            raise SessionError(f"{self._path} changed while it was read.")
        return data


@contextmanager
def open_session(path: Path) -> Iterator[SessionFile]:
    """The checked file at `path`.

    Raises:
        InputError: it cannot be read.
        SessionError: as SessionFile.
    """
    try:
        with path.open("rb") as stream:
            yield SessionFile(stream, path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
