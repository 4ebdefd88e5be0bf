"""Text settings and tokenizer from a GGUF file's metadata."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pagelet.exporter.text.document import byte_level_document, sentencepiece_document
from pagelet.exporter.text.pre_tokenizers import pre_tokenizer
from pagelet.exporter.text.source import (
    CONTROL,
    UNKNOWN,
    TextSource,
    added_by_type,
    from_pieces,
    numbered,
)
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import require
from pagelet.models.text.control import is_markup

_PREFIX = "tokenizer.ggml."
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_IDS = ("eot_token_id", "eom_token_id")
# Files older than the key `pre`.
_PRE_OF_ARCHITECTURE: dict[object, str] = {"gptneox": "olmo"}
# Phi-3's other special tokens take the whitespace after them away.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def read_metadata(metadata: dict[str, Any], where: str) -> TextSource:
    """Build the tokenizer that the metadata describes.

    Known are "gpt2": byte-level BPE, "llama": SentencePiece BPE by scores, and "gemma4": the same by merges.
    The file does not tell some of what a tokenizer.json does: how text is normalized and cut follows from
    the name of the pre-tokenizer, and which tokens swallow the whitespace after them from the architecture.

    Raises:
        CheckpointError: a key is missing or makes no sense.
        UnsupportedError: a tokenizer or pre-tokenizer that is not known.
    """
    reader = _Reader(metadata, where)
    model = reader.get("model", str)
    if model not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        kind = f"{model!r} (Unigram)" if model == "t5" else repr(model)
        raise UnsupportedError(f"{where}: tokenizer {kind} is not known; known are {known}.")
    tokens = reader.strings("tokens")
    document, adds_bos = _KINDS[model](reader, tokens, reader.numbers("token_type", len(tokens)))
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

    @property
    def where(self) -> str:
        return self._where

    @property
    def architecture(self) -> object:
        return self._metadata.get("general.architecture")

    def merges(self) -> list[tuple[str, str]]:
        return [_pair(merge, self._where) for merge in self.strings("merges")]

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


_Built = tuple[dict[str, Any], bool]


def _byte_level(reader: _Reader, tokens: list[str], types: list[int]) -> _Built:
    default = _PRE_OF_ARCHITECTURE.get(reader.architecture, "default")
    pre = reader.get("pre", str, default)
    vocabulary = numbered(tokens, reader.where)
    document = byte_level_document(pre, vocabulary, reader.merges(), added_by_type(tokens, types))
    return document, pre_tokenizer(pre).add_bos


def _by_scores(reader: _Reader, tokens: list[str], types: list[int]) -> _Built:
    document = from_pieces(
        tokens,
        reader.numbers("scores", len(tokens)),
        types,
        add_prefix_space=reader.get("add_space_prefix", bool, True),
        collapse_spaces=reader.get("remove_extra_whitespaces", bool, False),
        where=reader.where,
    )
    if reader.architecture == "phi3":
        for token in document["added_tokens"]:
            token["rstrip"] = token["content"] not in _PHI3_KEEPS_SPACE
    return document, True


def _by_merges(reader: _Reader, tokens: list[str], types: list[int]) -> _Built:
    """Gemma 4. Files mark markup of tools and channels as the user's, so that other programs show it."""
    special = [CONTROL if is_markup(token) else kind for token, kind in zip(tokens, types, strict=True)]
    document = sentencepiece_document(
        numbered(tokens, reader.where),
        reader.merges(),
        added_by_type(tokens, special),
        unknown=next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None),
        byte_fallback="<0x00>" in tokens,
        add_prefix_space=reader.get("add_space_prefix", bool, False),
    )
    return document, True


_KINDS: dict[str, Callable[[_Reader, list[str], list[int]], _Built]] = {
    "gpt2": _byte_level,
    "llama": _by_scores,
    "gemma4": _by_merges,
}
