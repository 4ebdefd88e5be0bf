"""Control tokens: which of a rendered chat the template wrote, and encoding text that only mentions some.

A message is data: "<|im_end|>" in it must not end the turn. Two means, neither of which changes the text:

- *Shielding*. The template is run on messages in which characters that begin or end a control token are
  exchanged for unused private ones. Whatever control token the output still has is the template's own.
- *A literal vocabulary*. A copy of the tokenizer in which each control token has a secret name, so that its
  usual spelling is ordinary text and only the secret name makes the token.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from pagelet.models.text.messages import map_strings

_PRIVATE_USE = range(0xE000, 0xF900)


def is_markup(token: str) -> bool:
    """Whether a token looks like markup of a chat: "<|im_end|>", "<｜User｜>", "<|turn>", "<turn|>"."""
    return token.startswith(("<|", "<｜")) or (token.startswith("<") and token.endswith(("|>", "｜>")))


class ControlTokens:
    """The control tokens of one vocabulary.

    Attributes:
        ids: spelling to token id.
    """

    def __init__(self, tokens: Mapping[int, tokenizers.AddedToken]) -> None:
        self.ids = {token.content: token_id for token_id, token in tokens.items() if token.content}
        longest_first = sorted(tokens.values(), key=lambda token: len(token.content), reverse=True)
        self._pattern = re.compile("|".join(map(_expression, longest_first)) or "(?!)")
        self._edges = {edge for spelling in self.ids for edge in (spelling[0], spelling[-1])}

    def written_in(self, text: str) -> list[int]:
        """Ids of the control tokens spelled out in `text`, in order."""
        return [self.ids[spelling] for spelling in self._pattern.findall(text)]

    def renamed(self, text: str, names: Mapping[str, str]) -> str:
        return self._pattern.sub(lambda match: names[match[0]], text)

    def shield(self, variables: dict[str, Any], avoid: str) -> tuple[dict[str, Any], dict[int, str]]:
        """Template variables without a character that begins or ends a control token, and how to undo it.

        Returns:
            The shielded copy, and a table for `str.translate` that restores the characters; it is empty, and
            the copy equal, if there was none. No character of `avoid` stands for another.
        """
        used = set().union(*_strings(variables))
        found = sorted(used & self._edges)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used and chr(code) not in avoid)
        stand_ins = dict(zip(found, free, strict=False))
        table = str.maketrans(stand_ins)
        shielded = map_strings(variables, lambda text: text.translate(table))
        return shielded, {ord(stand_in): character for character, stand_in in stand_ins.items()}

    def mentioned_in(self, variables: dict[str, Any]) -> bool:
        """Whether a string of the variables spells out a control token."""
        return any(self._pattern.search(text) for text in _strings(variables))


def _expression(token: tokenizers.AddedToken) -> str:
    """Regular expression of the places where the tokenizer would find `token`."""
    spelling = re.escape(token.content) or "(?!)"
    return rf"(?<!\w){spelling}(?!\w)" if token.single_word else spelling


def _strings(variables: dict[str, Any]) -> list[str]:
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    map_strings(variables, collect)
    return texts


class LiteralVocabulary:
    """The copy of a tokenizer that takes control tokens by their secret names only."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, spellings: Iterable[str]) -> None:
        nonce = secrets.token_hex(8)  # so that no message can hold a name
        # Private characters that no stand-in of a shielded text is.
        left, right = "\U000f0000", "\U000f0001"
        self.names = {spelling: f"{left}{nonce}:{index}{right}" for index, spelling in enumerate(spellings)}
        self._tokenizer = tokenizers.Tokenizer.from_str(self._rename(json.loads(tokenizer.to_str())))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, whose control tokens are spelled by their secret names."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _rename(self, data: dict[str, Any]) -> str:
        names, model = self.names, data["model"]
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # A model may list the control tokens too; renamed there as well, no text can make them.
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
        return json.dumps(data)
