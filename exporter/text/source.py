"""What a checkpoint says about text, whatever its files are."""

from dataclasses import dataclass, field
from typing import Any

from pagelet.exporter.text.document import added_token, merges_from_scores, sentencepiece_document
from pagelet.models.errors import CheckpointError

# SentencePiece's piece types; GGUF's token types are the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


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
    """The tokens that are found in text before it is cut: control tokens, and those of the user."""
    return [
        added_token(token, token_id, special=kind != USER_DEFINED)
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def from_pieces(
    pieces: list[str], scores: list[float], types: list[int], *, add_prefix_space: bool, where: str
) -> dict[str, Any]:
    """The document of a SentencePiece BPE model."""
    normal = [index for index, kind in enumerate(types) if kind == NORMAL]
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    return sentencepiece_document(
        numbered(pieces, where),
        merges_from_scores([pieces[i] for i in normal], [scores[i] for i in normal]),
        added_by_type(pieces, types),
        unknown=unknown,
        byte_fallback="<0x00>" in pieces,
        add_prefix_space=add_prefix_space,
    )
