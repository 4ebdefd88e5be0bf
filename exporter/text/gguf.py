"""Text settings and tokenizer from a GGUF file's metadata."""

from typing import Any

import numpy as np

from pagelet.exporter.text.document import byte_level_document
from pagelet.exporter.text.source import TextSource, added_by_type, from_pieces, numbered
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import require

_PREFIX = "tokenizer.ggml."
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_IDS = ("eot_token_id", "eom_token_id")


def read_metadata(metadata: dict[str, Any], where: str) -> TextSource:
    """Build the tokenizer that the metadata describes ("gpt2": byte-level BPE, "llama": SentencePiece BPE).

    Raises:
        CheckpointError: a key is missing or makes no sense.
        UnsupportedError: a tokenizer or pre-tokenizer that is not known.
    """
    reader = _Reader(metadata, where)
    model = reader.get("model", str)
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(f"{where}: tokenizer {model!r} is not known; known are 'gpt2' and 'llama'.")
    tokens = reader.strings("tokens")
    types = reader.numbers("token_type", len(tokens))
    pre = reader.get("pre", str, "default")
    if model == "gpt2":
        merges = [_pair(merge, where) for merge in reader.strings("merges")]
        document = byte_level_document(pre, numbered(tokens, where), merges, added_by_type(tokens, types))
    else:
        scores = reader.numbers("scores", len(tokens))
        prefix = reader.get("add_space_prefix", bool, True)
        document = from_pieces(tokens, scores, types, add_prefix_space=prefix, where=where)
    adds_bos = model == "llama" or pre == "llama-bpe"
    return TextSource(
        where=where,
        tokenizer=document,
        special_tokens={name: tokens[i] for name, i in reader.special_ids(len(tokens)).items()},
        eos_ids=tuple(reader.get(key, int) for key in _END_IDS if _PREFIX + key in metadata),
        add_bos=reader.get("add_bos_token", bool, adds_bos),
        chat_template=require(metadata, "tokenizer.chat_template", str, where, CheckpointError)
        if "tokenizer.chat_template" in metadata
        else None,
    )


class _Reader:
    """The keys under "tokenizer.ggml.", each checked for its type."""

    def __init__(self, metadata: dict[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        if _PREFIX + key not in self._metadata and default is not None:
            return default
        return require(self._metadata, _PREFIX + key, kind, self._where, CheckpointError)

    def strings(self, key: str) -> list[str]:
        values: list[str] = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{self._where}: {_PREFIX}{key} is not an array of strings.")
        return values

    def numbers(self, key: str, count: int) -> list[Any]:
        values = self.get(key, np.ndarray)
        if len(values) != count or not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._where}: {_PREFIX}{key} has {len(values)} values; expected {count} finite ones."
            )
        return list(values.tolist())

    def special_ids(self, count: int) -> dict[str, int]:
        found = {
            name: self.get(key, int) for name, key in _SPECIAL.items() if _PREFIX + key in self._metadata
        }
        for name, token_id in found.items():
            if not 0 <= token_id < count:
                raise CheckpointError(f"{self._where}: {name} is {token_id}; expected 0 to {count - 1}.")
        return found


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise CheckpointError(f"{where}: the merge {merge!r:.80} is not two tokens with a space between.")
    return left, right
