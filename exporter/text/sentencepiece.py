"""A SentencePiece `tokenizer.model`: the few fields of its ModelProto that a BPE tokenizer needs.

Field numbers are those of sentencepiece_model.proto; the wire format is Protocol Buffers' own.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_bytes
from pagelet.exporter.text.source import NORMAL, from_pieces
from pagelet.models.errors import CheckpointError, UnsupportedError

_MODEL_BPE = 2
_OTHER_MODELS = {1: "Unigram", 3: "WORD", 4: "CHAR"}
_INSTEAD = "export from a folder with tokenizer.json."
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_model(path: Path) -> dict[str, Any]:
    """The tokenizer document of a `tokenizer.model` of type BPE.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedError: another type than BPE, or a text normalization that is not known.
    """
    try:
        fields = list(_fields(read_bytes(path)))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_fields(dict(fields).get(number, b""))) for number in (2, 3))
    except (ValueError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model ({error}). Download it again.") from error
    if trainer.get(3, 1) != _MODEL_BPE:
        kind = _OTHER_MODELS.get(trainer.get(3, 1), "unknown")
        raise UnsupportedError(f"{path} is not of type BPE but {kind}; {_INSTEAD}")
    # Fields of NormalizerSpec: 2 is a table of replacements; by 5 spaces are written "▁" (on by default).
    if normalizer.get(2) or not normalizer.get(5, 1):
        name = _text(normalizer.get(1, b""))
        raise UnsupportedError(f"{path} normalizes text ({name}), which is not known; {_INSTEAD}")
    if trainer.get(24, 0):
        raise UnsupportedError(f"{path} writes spaces behind words, which is not known; {_INSTEAD}")
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True)) if pieces else ([], [], [])
    return from_pieces(
        tokens,
        scores,
        types,
        add_prefix_space=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
        where=str(path),
    )


def _piece(data: Any) -> tuple[str, float, int]:
    """(text, score, type) of one SentencePiece."""
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    kind = fields.get(3, NORMAL)
    if not isinstance(kind, int) or score != score:
        raise ValueError("a piece has no proper score and type")
    return _text(fields.get(1, b"")), score, kind


def _text(data: Any) -> str:
    if not isinstance(data, bytes):
        raise ValueError("a number where text belongs")
    return data.decode("utf-8")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message: an int, or bytes for everything that is not a varint."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if tag & 7 == _BYTES:
            size, at = _varint(data, at)
        elif tag & 7 in (_FIXED32, _FIXED64):
            size = 4 if tag & 7 == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {tag & 7} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"truncated at byte {len(data)}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"truncated at byte {at}")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"a number of more than 70 bits at byte {at}")
