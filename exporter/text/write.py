"""The bundle's text files, written from a checkpoint of either kind."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagelet.exporter.checkpoint.base import Checkpoint
from pagelet.exporter.text.gguf import read_metadata
from pagelet.exporter.text.huggingface import read_folder
from pagelet.exporter.text.source import TextSource
from pagelet.exporter.text.turn_ends import turn_ends
from pagelet.models.errors import CheckpointError
from pagelet.models.manifest import TextSettings

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"


def write_text_files(checkpoint: Checkpoint, folder: Path) -> tuple[TextSettings, dict[str, Any]]:
    """Write tokenizer.json, and chat_template.jinja if there is one; return the settings beside them.

    The second value holds the checkpoint's own sampling defaults. `add_bos` is about raw text: encode it
    with `add_special_tokens=False` and put the bos token first; a chat template writes its own. Added
    tokens that the model has no embedding for are left out.

    Raises:
        CheckpointError: no tokenizer, a damaged one, or one with more tokens than the model.
        UnsupportedError: a tokenizer of a kind that is not known.
    """
    source = _read(checkpoint)
    document = _trimmed(source.tokenizer, checkpoint.spec.vocab_size)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    tokenizer = _load(text, source.where)
    _check_ids(tokenizer, document["added_tokens"], source.where, checkpoint.spec.vocab_size)
    (folder / TOKENIZER_NAME).write_text(text, encoding="utf-8", newline="\n")
    if source.chat_template is not None:
        (folder / TEMPLATE_NAME).write_text(source.chat_template, encoding="utf-8", newline="")
    return _settings(source, tokenizer, checkpoint.spec.vocab_size), source.generation


def _read(checkpoint: Checkpoint) -> TextSource:
    if isinstance(checkpoint.text_source, Path):
        return read_folder(checkpoint.text_source)
    return read_metadata(checkpoint.text_source, str(checkpoint.path))


def _trimmed(document: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The document without tokens that the model lacks, and without a length limit.

    A length that was set for training would cut prompts in silence.
    """
    added = [token for token in document["added_tokens"] if token["id"] < vocab_size and token["content"]]
    return {**document, "truncation": None, "padding": None, "added_tokens": added}


def _load(text: str, where: str) -> Tokenizer:
    """The tokenizer, after a trial: some faults show only when it encodes."""
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exceptions, and its panics are not even those
        raise CheckpointError(f"{where}: the tokenizer cannot be loaded ({error}).") from error
    return tokenizer


def _check_ids(tokenizer: Tokenizer, added: list[dict[str, Any]], where: str, vocab_size: int) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer's largest id is {largest}, the model has {vocab_size} tokens. "
            "Do tokenizer and weights belong together?"
        )
    for token in added:
        # The library numbers an added token anew where the ids before it leave a gap.
        token_id = tokenizer.token_to_id(token["content"])
        if token_id != token["id"]:
            raise CheckpointError(
                f"{where}: the added token {token['content']!r} has id {token['id']}, but {token_id} comes "
                "next or is its id in the vocabulary. The tokenizer's files do not belong together."
            )


def _settings(source: TextSource, tokenizer: Tokenizer, vocab_size: int) -> TextSettings:
    special = {name: token for name, token in source.special_tokens.items() if name != "pad_token"}
    ids = {name: tokenizer.token_to_id(token) for name, token in source.special_tokens.items()}
    for name in special:
        if ids[name] is None:
            raise CheckpointError(
                f"{source.where}: {name} is {special[name]!r}, which is not in the tokenizer."
            )
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    shown = turn_ends(source.chat_template, source.special_tokens, added) if source.chat_template else []
    ends = [ids.get("eos_token"), *source.eos_ids, *map(tokenizer.token_to_id, shown)]
    eos_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    for token_id in eos_ids:
        if not 0 <= token_id < vocab_size:
            raise CheckpointError(f"{source.where}: eos token {token_id}; expected 0 to {vocab_size - 1}.")
    bos_id = ids.get("bos_token")
    add_bos = _begins_with(tokenizer, bos_id) if source.add_bos is None else source.add_bos
    return TextSettings(bos_id, eos_ids, add_bos and bos_id is not None, source.special_tokens)


def _begins_with(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """Whether the tokenizer's own post-processor puts the bos token first."""
    return bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
