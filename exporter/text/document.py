"""Tokenizer documents: the JSON that the `tokenizers` library loads, built from a vocabulary.

Two kinds cover the families: byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece BPE (Llama 2, Gemma).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagelet.exporter.text.pre_tokenizers import pre_tokenizer
from pagelet.models.errors import CheckpointError

# Cutting a piece everywhere takes time with the square of its length; real ones have under 100 characters.
MAX_PIECE_LENGTH = 1024


def added_token(token: str, token_id: int, *, special: bool, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`: found in the text before anything else is done to it."""
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **(defaults | flags), "special": special}


def byte_level_document(
    pre: str,
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    added_tokens: Iterable[dict[str, Any]],
    *,
    add_prefix_space: bool = False,
) -> dict[str, Any]:
    """A byte-level BPE tokenizer (GPT-2); `pre` names how the text is cut, as GGUF files do.

    Raises:
        UnsupportedError: `pre` is not known.
    """
    cut = pre_tokenizer(pre)
    return _document(
        _bpe(vocabulary, merges, ignore_merges=cut.ignore_merges),
        added_tokens,
        normalizer=cut.normalizer,
        pre_tokenizer=cut.before_merging(add_prefix_space=add_prefix_space),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def sentencepiece_document(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    added_tokens: Iterable[dict[str, Any]],
    *,
    unknown: str | None,
    byte_fallback: bool,
    add_prefix_space: bool,
    collapse_spaces: bool = False,
) -> dict[str, Any]:
    """A SentencePiece BPE tokenizer: spaces are written "▁", unknown characters as their bytes.

    `collapse_spaces`: spaces at both ends are dropped and several become one (`remove_extra_whitespaces`).
    """
    collapse = [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    prepend = {"type": "Prepend", "prepend": "▁"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    before = [*collapse * collapse_spaces, *[prepend] * add_prefix_space, _replace({"String": " "}, "▁")]
    after = [_replace({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _document(
        _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback),
        added_tokens,
        normalizer={"type": "Sequence", "normalizers": before},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [*after, *[strip] * add_prefix_space]},
    )


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def merges_from_scores(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model: every way to cut a piece into two others, best score first.

    SentencePiece joins the adjacent pair whose whole has the highest score (Kudo and Richardson 2018),
    which is what ranked merges do. Of pieces with one score the first comes first, and of the cuts of a piece
    the one with the longest left part: runs of one character grow from the left.

    Raises:
        CheckpointError: a piece is absurdly long.
    """
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE_LENGTH:
        raise CheckpointError(
            f"The tokenizer has a piece of {longest} characters; expected at most {MAX_PIECE_LENGTH}."
        )
    known = frozenset(pieces)
    merges = [
        (-score, index, -cut, piece[:cut], piece[cut:])
        for index, (piece, score) in enumerate(zip(pieces, scores, strict=True))
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _bpe(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], **options: Any) -> dict[str, Any]:
    defaults = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **(defaults | options),
        "vocab": dict(vocabulary),
        "merges": _written(list(merges)),
    }


def _written(merges: Sequence[tuple[str, str]]) -> list[str] | list[list[str]]:
    """As "left right" each, which takes half as long to read; as pairs where that could be misread.

    That is where a token holds a space, or looks like the header line of merges.txt.
    """
    if any(" " in left + right or left.startswith("#version") for left, right in merges):
        return [list(pair) for pair in merges]
    return [" ".join(pair) for pair in merges]


def _document(model: dict[str, Any], added_tokens: Iterable[dict[str, Any]], **steps: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added_tokens, key=lambda token: token["id"]),
        "post_processor": None,
        **steps,
        "model": model,
    }
