"""Tokenizer documents: the JSON that the `tokenizers` library loads, built from a vocabulary.

Two kinds cover the families: byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece BPE (Llama 2).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagelet.models.errors import CheckpointError, UnsupportedError

# Cutting a piece everywhere takes time with the square of its length; real ones have under 100 characters.
MAX_PIECE_LENGTH = 1024

# Text is cut before merging; merges never cross a cut. The patterns are those the families publish.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# `tokenizer.ggml.pre` to the steps before the bytes; None: the byte-level step's own GPT-2 pattern.
_PRE_TOKENIZERS: dict[str, dict[str, Any] | None] = {
    "gpt-2": None,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
# Qwen's tokenizer composes characters first; the others take the text as it is.
_NORMALIZERS = {"qwen2": {"type": "NFC"}}
# Llama 3 takes a whole word that is in the vocabulary without merging it together.
_IGNORE_MERGES = frozenset({"llama-bpe"})


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
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedError(
            f"The pre-tokenizer {pre!r} is not known (known: {known}). Text would be cut wrongly "
            "without it; export from a folder that holds the model's tokenizer.json."
        )
    step = _PRE_TOKENIZERS[pre]
    use_regex = step is None or step["type"] == "Digits"
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
    return _document(
        _bpe(vocabulary, merges, ignore_merges=pre in _IGNORE_MERGES),
        added_tokens,
        normalizer=_NORMALIZERS.get(pre),
        pre_tokenizer=byte_level
        if step is None
        else {"type": "Sequence", "pretokenizers": [step, byte_level]},
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
) -> dict[str, Any]:
    """A SentencePiece BPE tokenizer: spaces are written "▁", unknown characters as their bytes."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if add_prefix_space else []
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_prefix_space else []
    steps = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return _document(
        _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback),
        added_tokens,
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": steps},
    )


def merges_from_scores(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model: every way to cut a piece into two others, best score first.

    SentencePiece joins the adjacent pair whose whole has the highest score (Kudo and Richardson 2018),
    which is what ranked merges do.

    Raises:
        CheckpointError: a piece is absurdly long.
    """
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE_LENGTH:
        raise CheckpointError(
            f"The tokenizer has a piece of {longest} characters; expected at most {MAX_PIECE_LENGTH}."
        )
    known = frozenset(pieces)
    ranked = sorted(
        zip(scores, range(len(pieces)), pieces, strict=True), key=lambda item: (-item[0], item[1])
    )
    return [
        (piece[:cut], piece[cut:])
        for _, _, piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


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
