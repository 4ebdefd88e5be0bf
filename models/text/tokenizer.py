"""Tokenizer: a bundle's vocabulary, text to ids and back, and its chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pagelet.models.errors import BundleError, InputError
from pagelet.models.manifest import TextSettings
from pagelet.models.text.chat_template import ChatTemplate
from pagelet.models.text.control import ControlTokens, LiteralVocabulary, is_markup
from pagelet.models.text.detokenizer import Detokenizer

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
# The largest vocabularies in use (262,144 tokens) take 35 MB.
_MAX_TOKENIZER_BYTES = 512 << 20
_MAX_TEMPLATE_BYTES = 1 << 20


class Tokenizer:
    """Text to token ids and back. May be used from several threads at once.

    Attributes:
        vocab_size: number of tokens, special ones included; a model's logits may have more rows.
        eos_token_ids: tokens that end a text.
        bos_token_id: token that begins one, if there is one.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, text: TextSettings, template: ChatTemplate | None = None
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._template = template
        self._add_bos = text.add_bos
        self.bos_token_id = text.bos_token_id
        self.eos_token_ids = frozenset(text.eos_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._control = ControlTokens(
            {i: token for i, token in added.items() if token.special or is_markup(token.content)}
        )
        self._control_ids = frozenset(self._control.ids.values())

    @classmethod
    def open(cls, folder: Path, text: TextSettings) -> "Tokenizer":
        """Read `tokenizer.json`, and `chat_template.jinja` where there is one.

        Raises:
            BundleError: a file is missing, too large or damaged.
        """
        path = folder / TOKENIZER_NAME
        source = _read(path, _MAX_TOKENIZER_BYTES)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path} is not a valid tokenizer ({error}); export it again.") from error
        template = None
        if (folder / TEMPLATE_NAME).is_file():
            template = ChatTemplate(_read(folder / TEMPLATE_NAME, _MAX_TEMPLATE_BYTES), text.special_tokens)
        return cls(tokenizer, text, template)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of raw text. The spelling of a control token is text like any other, unless `parse_special`.

        Control tokens are those that the vocabulary marks as special, and added ones that look like markup
        ("<|user|>"), however they are marked. Other added tokens are words: they are found in any text, as
        Qwen's "<think>" or Gemma's runs of line breaks.

        Args:
            add_bos: begin with the beginning-of-sequence token; None: as the model expects it.

        Raises:
            InputError: `text` is no string, or not valid Unicode.
        """
        ids = self._encode_parsed(text)
        if not parse_special and not self._control_ids.isdisjoint(ids):
            ids = self._literal.encode(text)
        if self._add_bos if add_bos is None else add_bos:
            if self.bos_token_id is None:
                raise InputError("add_bos is set, but this model has no beginning-of-sequence token.")
            return [self.bos_token_id, *ids]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> str:
        """The chat template's text, equal to transformers' `apply_chat_template(tokenize=False)`.

        Raises:
            InputError: no template, messages of the wrong form, or the template refuses them.
        """
        template = self._need_template()
        return template.render(
            template.variables(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_variables
            )
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[int]:
        """Ids of the rendered chat. Control tokens (see `encode`) are those that the template writes; in
        messages, tools and variables their spelling is text.

        A token is the template's if its first and its last character are. If no message spells one, in one
        piece or across pieces, the ids are those of transformers.

        Raises:
            InputError: as `render_chat`.
        """
        template = self._need_template()
        variables = template.variables(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_variables
        )
        text = marked = template.render(variables)
        shielded, restore = self._control.shield(variables, avoid=text)
        if restore:
            marked = template.render(shielded)
            # A template may look for other markup in a message: where it is safe, it sees it as it is.
            same = self._control.written_in(text) == self._control.written_in(marked)
            if same and not self._control.mentioned_in(variables):
                marked, restore = text, {}
        return self._encode_marked(marked, restore)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; ids without a token have none.

        Bytes that are no character become U+FFFD. In a vocabulary with byte tokens, valid characters before
        an invalid byte stay, which is the one difference to `tokenizers`.

        Raises:
            InputError: an id is no whole number of 32 bits.
        """
        try:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        except (TypeError, OverflowError) as error:
            raise InputError(f"ids can't be decoded ({error}); expected whole numbers from 0.") from error
        if "\ufffd" not in text:
            return text
        detokenizer = Detokenizer(self.decode_text)
        shown = [i for i in ids if self.has_text(i) or (not skip_special and i in self._special_ids)]
        return "".join(map(detokenizer.push, shown)) + detokenizer.flush()

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` shows this id: it has a token, and not a special one."""
        return token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of ids in one go, as `tokenizers` gives it; special tokens are shown."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _encode_parsed(self, text: str) -> list[int]:
        """Ids of text in which every spelling of a special token is that token."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            kind = type(text).__name__
            found = "has half a surrogate pair" if isinstance(text, str) else f"is of type {kind}"
            raise InputError(f"The text {found}; expected a string of valid Unicode.") from error
        return ids

    def _encode_marked(self, marked: str, restore: dict[int, str]) -> list[int]:
        """Ids of `marked` after `restore`, where only control tokens spelled out before it are control."""
        ids = self._encode_parsed(marked.translate(restore))
        if [i for i in ids if i in self._control_ids] == self._control.written_in(marked):
            return ids
        return self._literal.encode(self._control.renamed(marked, self._literal.names).translate(restore))

    @cached_property
    def _literal(self) -> LiteralVocabulary:
        return LiteralVocabulary(self._tokenizer, self._control.ids)

    def _need_template(self) -> ChatTemplate:
        if self._template is None:
            raise InputError("This bundle has no chat template; pass a string or token ids, not messages.")
        return self._template


def _read(path: Path, limit: int) -> str:
    try:
        size = path.stat().st_size
        if size > limit:
            raise BundleError(f"{path} has {size} bytes; expected at most {limit}.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} can't be read ({error}); export or copy the bundle again.") from error
