"""The tokenizer document of a Hugging Face folder: taken as it is, or built from its older files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_json, read_text
from pagelet.exporter.text.document import added_token, byte_level_document
from pagelet.exporter.text.sentencepiece import read_model
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import require

# The largest published tokenizer.json files have 33 MB.
MAX_TOKENIZER_BYTES = 64 << 20
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
# With vocab.json and merges.txt alone, the class says how text is cut.
_PRE_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def read_document(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json, or the same from vocab.json and merges.txt or from tokenizer.model.

    `config` is tokenizer_config.json; the tokens that it declares are added.

    Raises:
        CheckpointError: no tokenizer there, or a damaged file; by its name.
        UnsupportedError: a tokenizer of a kind that is not known.
    """
    if (folder / "tokenizer.json").exists():
        document = _own_document(folder / "tokenizer.json")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        document = _from_vocabulary(folder, config)
    elif (folder / "tokenizer.model").exists():
        document = read_model(folder / "tokenizer.model")
    else:
        raise CheckpointError(
            f"{folder} has no tokenizer; expected tokenizer.json, vocab.json with merges.txt, "
            "or tokenizer.model."
        )
    _add(document, _declared(folder, config))
    return document


def mark_special(document: dict[str, Any], tokens: Mapping[str, str]) -> None:
    """Find named tokens in text as a whole also where only the vocabulary lists them."""
    vocabulary = document["model"]["vocab"]
    listed = [token for token in tokens.values() if isinstance(vocabulary, dict) and token in vocabulary]
    _add(document, [added_token(token, vocabulary[token], special=True) for token in listed])


def tokens_by_id(document: Mapping[str, Any]) -> dict[int, str]:
    """Id to token, of the vocabulary and the added tokens."""
    vocabulary = document["model"]["vocab"]
    listed = vocabulary.items() if isinstance(vocabulary, dict) else ()
    tokens = {token_id: token for token, token_id in listed}
    return tokens | {token["id"]: token["content"] for token in document["added_tokens"]}


def _own_document(path: Path) -> dict[str, Any]:
    """tokenizer.json, checked as far as it is looked into here."""
    document = read_json(path, MAX_TOKENIZER_BYTES)
    model = require(document, "model", dict, str(path), CheckpointError)
    vocabulary = require(model, "vocab", (dict, list), str(path), CheckpointError)
    if isinstance(vocabulary, dict):
        _check_ids(vocabulary, path)
    document["added_tokens"] = document.get("added_tokens") or []
    for token in require(document, "added_tokens", list, str(path), CheckpointError):
        if not isinstance(token, dict):
            raise CheckpointError(f"{path}: added_tokens holds {token!r:.80}; expected objects.")
        require(token, "id", int, f"{path}: added_tokens", CheckpointError)
        require(token, "content", str, f"{path}: added_tokens", CheckpointError)
    return document


def _from_vocabulary(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in _PRE_OF_CLASS:
        raise UnsupportedError(
            f"{folder}: tokenizer_class {name!r} cannot be built from vocab.json and merges.txt "
            f"(known: {', '.join(_PRE_OF_CLASS)}); add the model's tokenizer.json."
        )
    vocabulary = read_json(folder / "vocab.json", MAX_TOKENIZER_BYTES)
    _check_ids(vocabulary, folder / "vocab.json")
    lines = read_text(folder / "merges.txt", MAX_TOKENIZER_BYTES).replace("\r", "").split("\n")
    merges = [_merge(line, folder) for line in lines if line and not line.startswith("#version")]
    prefix = config.get("add_prefix_space") is True
    return byte_level_document(_PRE_OF_CLASS[name], vocabulary, merges, [], add_prefix_space=prefix)


def _check_ids(vocabulary: dict[str, Any], path: Path) -> None:
    for token in vocabulary:
        require(vocabulary, token, int, f"{path}: vocabulary", CheckpointError)


def _merge(line: str, folder: Path) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right or " " in right:
        where = folder / "merges.txt"
        raise CheckpointError(f"{where}: the line {line!r:.80} is not two tokens with a space between.")
    return left, right


def _declared(folder: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens of tokenizer_config.json's added_tokens_decoder and of the older added_tokens.json."""
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CheckpointError(f"{where} is not an object of objects.")
    tokens = []
    for token_id, entry in entries.items():
        content = require(entry, "content", str, where, CheckpointError)
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            raise CheckpointError(f"{where}: {token_id!r:.80} is not a token id.")
        flags = {name: entry[name] is True for name in _FLAGS if name in entry}
        tokens.append(added_token(content, int(token_id), special=entry.get("special") is True, **flags))
    older = folder / "added_tokens.json"
    if older.exists():
        ids = read_json(older)
        _check_ids(ids, older)
        tokens += [added_token(content, token_id, special=False) for content, token_id in ids.items()]
    return tokens


def _add(document: dict[str, Any], tokens: list[dict[str, Any]]) -> None:
    """Add those that are not there yet, in the order of ids that the library wants."""
    present = {token["content"] for token in document["added_tokens"]}
    for token in tokens:
        if token["content"] not in present:
            document["added_tokens"].append(token)
            present.add(token["content"])
    document["added_tokens"].sort(key=lambda token: token["id"])
