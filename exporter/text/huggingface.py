"""Text settings from the files of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_json, read_text
from pagelet.exporter.text.generation import end_ids, read_generation
from pagelet.exporter.text.hf_document import mark_special, read_document, tokens_by_id
from pagelet.exporter.text.source import TextSource
from pagelet.models.errors import CheckpointError

MAX_TEMPLATE_BYTES = 1 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder(folder: Path) -> TextSource:
    """The folder's tokenizer, its special tokens, chat template and sampling defaults.

    Raises:
        CheckpointError: no tokenizer there, or a damaged file; by its name.
        UnsupportedError: a tokenizer of a kind that is not known.
    """
    config = _optional(folder / "tokenizer_config.json")
    document = read_document(folder, config)
    special = _special_tokens(folder, config, tokens_by_id(document))
    mark_special(document, special)
    return TextSource(
        where=str(folder),
        tokenizer=document,
        special_tokens=special,
        eos_ids=end_ids(folder / "config.json") + end_ids(folder / "generation_config.json"),
        add_bos=_adds_bos(folder, config),
        chat_template=_chat_template(folder, config),
        generation=read_generation(folder / "generation_config.json"),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(folder: Path, config: Mapping[str, Any], tokens: Mapping[int, str]) -> dict[str, str]:
    """The named tokens; ids of the model's configs stand in where no tokenizer file speaks of a name."""
    named = _optional(folder / "special_tokens_map.json") | dict(config)
    ids = _optional(folder / "config.json") | _optional(folder / "generation_config.json")
    found = {}
    for name in _SPECIAL:
        value = named[name] if name in named else _first_token(ids.get(f"{name}_id"), tokens)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{folder}: {name} is {value!r:.80}; expected a token.")
        if value:
            found[name] = value
    return found


def _first_token(value: object, tokens: Mapping[int, str]) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    return tokens.get(first) if isinstance(first, int) else None


def _adds_bos(folder: Path, config: Mapping[str, Any]) -> bool | None:
    """An explicit flag decides; a tokenizer.json knows by itself (None); of the others SentencePiece does."""
    explicit = config.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    if (folder / "tokenizer.json").exists():
        return None
    return not (folder / "vocab.json").exists()


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's own file, or tokenizer_config.json's; of several the one named "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is not text.")
    return template
