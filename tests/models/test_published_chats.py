"""Chats of published tokenizers and templates: transformers' ids, and markup in a message is text."""

import json
from typing import Any

import pytest
import tokenizers
from conversations import CONVERSATIONS, TOOL, of_transformers
from vocabularies import LLAMA_CPP, fetched, published

from pagelet.models.manifest import TextSettings
from pagelet.models.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.slow

TEMPLATES = {
    "qwen3": "Qwen-Qwen3-0.6B",
    "llama3_2": "meta-llama-Llama-3.2-3B-Instruct",
    "gemma3": "google-gemma-2-2b-it",  # Gemma 3's has the same markup
    "gptoss": "openai-gpt-oss-120b",
    "deepseek_v3": "deepseek-ai-DeepSeek-V3.1",
    "llama2": "mistralai-Mistral-Nemo-Instruct-2407",  # the vocabulary is Mistral's
}


class Family:
    def __init__(self, name: str) -> None:
        path = fetched(f"{LLAMA_CPP}/models/templates") / f"{TEMPLATES[name]}.jinja"
        self.source = path.read_text(encoding="utf-8")
        text = json.dumps(published(name))
        self.theirs = tokenizers.Tokenizer.from_str(text)
        tokens = self.theirs.get_added_tokens_decoder().values()
        self.special = sorted({token.content for token in tokens if token.special or "｜" in token.content})
        self.named = named_tokens(name)
        template = ChatTemplate(self.source, self.named)
        self.ours = Tokenizer(tokenizers.Tokenizer.from_str(text), TextSettings(), template)

    def control(self, ids: list[int]) -> list[str]:
        """The special tokens among ids."""
        return [token for token in map(self.theirs.id_to_token, ids) if token in self.special]


def named_tokens(name: str) -> dict[str, str]:
    config = json.loads((fetched(name) / "tokenizer_config.json").read_text(encoding="utf-8"))
    values = {key: config.get(key) for key in ("bos_token", "eos_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if text}


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def test_chats_have_the_ids_of_transformers(family: Family) -> None:
    compared = 0
    for kind, messages in CONVERSATIONS.items():
        variables: dict[str, Any] = {"tools": [TOOL]} if "call" in kind else {}
        asked = {**variables, **family.named, "add_generation_prompt": True}
        outcome, text = of_transformers(family.source, messages, **asked)
        if outcome == "text":
            expected = family.theirs.encode(text, add_special_tokens=False).ids
            assert family.ours.encode_chat(messages, **variables) == expected
            compared += 1
    assert compared >= 5


def test_markup_in_a_message_is_text(family: Family) -> None:
    plain = family.control(family.ours.encode_chat([{"role": "user", "content": "Hi"}]))
    assert plain
    spoken = [
        "".join(family.special[:40]),
        *family.special[-40:],
        f"a {plain[-1]}\n\n{plain[0]} b",
        "</s><s>",
    ]
    for content in spoken:
        ids = family.ours.encode_chat([{"role": "user", "content": content}])
        assert family.control(ids) == plain
        assert content in family.ours.decode(ids, skip_special=False)


def test_markup_in_raw_text_is_read_on_request(family: Family) -> None:
    for token in family.special[:20] + family.special[-20:]:
        assert family.ours.encode(token, parse_special=True) == [family.theirs.token_to_id(token)]
        assert family.control(family.ours.encode(f"a{token}b")) == []
