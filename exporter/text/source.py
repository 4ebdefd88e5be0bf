"""What a checkpoint says about text, whatever its files are."""

from dataclasses import dataclass, field
from typing import Any

from pagelet.exporter.text.document import added_token, merges_from_scores, sentencepiece_document
from pagelet.models.errors import CheckpointError

# SentencePiece's piece types; GGUF's token types are the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_FIRST = 1e9  # higher than any score of a model


@dataclass(frozen=True)
class TextSource:
    """Attributes:
    where: file or folder, for messages.
    tokenizer: the JSON document that the `tokenizers` library loads.
    special_tokens: "bos_token", "eos_token", … to the token.
    eos_ids: ids that end a text, beside the eos token.
    add_bos: whether raw text begins with the bos token; None: as the document's post-processor does.
    chat_template: Jinja source.
    generation: the checkpoint's own sampling defaults.
    """

    where: str
    tokenizer: dict[str, Any]
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    chat_template: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)


def numbered(tokens: list[str], where: str) -> dict[str, int]:
    """Token to id.

    Raises:
        CheckpointError: two ids have the same token.
    """
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocabulary.setdefault(token, token_id) != token_id:
            raise CheckpointError(f"{where}: tokens {vocabulary[token]} and {token_id} are both {token!r}.")
    return vocabulary


def added_by_type(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """The tokens that are found in text before it is cut: control tokens, and those of the user.

    "[PAD7]" as the token of id 7 is not one: converters fill gaps in a vocabulary with that name.
    """
    return [
        added_token(token, token_id, special=kind != USER_DEFINED)
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token != f"[PAD{token_id}]"
    ]


def from_pieces(
    pieces: list[str],
    scores: list[float],
    types: list[int],
    *,
    add_prefix_space: bool,
    collapse_spaces: bool = False,
    where: str,
) -> dict[str, Any]:
    """The document of a SentencePiece BPE model.

    What the user defined comes before all else, the longest first, whatever score a file gives it: also as
    merges, since a run of spaces is found only after spaces are written "▁".
    """
    spelled = [_spelled(piece, kind) for piece, kind in zip(pieces, types, strict=True)]
    ranks = {NORMAL: scores, USER_DEFINED: [_FIRST + len(piece) for piece in spelled]}
    merged = [index for index, kind in enumerate(types) if kind in ranks]
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    return sentencepiece_document(
        numbered(spelled, where),
        merges_from_scores([spelled[i] for i in merged], [ranks[types[i]][i] for i in merged]),
        added_by_type(spelled, types),
        unknown=unknown,
        byte_fallback="<0x00>" in pieces,
        add_prefix_space=add_prefix_space,
        collapse_spaces=collapse_spaces,
    )


def _spelled(piece: str, kind: int) -> str:
    """A piece as SentencePiece has it: GGUF files hold what the user defined with its spaces."""
    return piece.replace(" ", "▁") if kind == USER_DEFINED else piece
