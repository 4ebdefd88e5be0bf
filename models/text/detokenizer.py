"""Detokenizer: token ids in, one at a time; characters out, whole."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no character, or not one yet
# An incomplete character has at most 3 bytes, so as many tokens; more that end in U+FFFD are invalid bytes.
_WINDOW = 8


class Detokenizer:
    """Decodes a growing sequence by decoding only its end again: the ids not given out yet, after those that
    were given out last. The latter are there for decoders whose output depends on what comes before
    (SentencePiece's drop the first space of a text only).

    What it gives out, joined, is `decode` of all ids. One difference: where a vocabulary spells characters as
    byte tokens, `tokenizers` drops valid ones with an invalid byte after them. Those are kept here, since
    they may have been shown already.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """`decode` maps ids to text; `context` are ids before the first, whose text is not given out."""
        self._decode = decode
        self._pending: list[int] = []
        self._remember(list(context))

    def push(self, token_id: int) -> str:
        """The text that is complete with this id and was not given out yet; often one word, or ""."""
        self._pending.append(token_id)
        text = self._text_of(self._pending)
        if text and not text.endswith(_REPLACEMENT):
            return self._give_out(len(self._pending), text)
        return self._give_out_part(text) if len(self._pending) > _WINDOW else ""

    def flush(self) -> str:
        """What is held back, bytes of incomplete characters as U+FFFD."""
        text = self._text_of(self._pending)
        return self._give_out(len(self._pending), text)

    def _text_of(self, ids: list[int]) -> str:
        """The text that `ids` add after the remembered ones."""
        text = self._decode(self._context + ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(ids)

    def _give_out_part(self, text: str) -> str:
        """Give out all but the last few ids: up to where decoding the two sides apart changes nothing."""
        for count in range(len(self._pending) - 1, 0, -1):
            head = self._text_of(self._pending[:count])
            if head + self._decode(self._pending[count:]) == text:
                return self._give_out(count, head)
        return self._give_out(len(self._pending), text)

    def _give_out(self, count: int, text: str) -> str:
        if count:
            self._remember(self._pending[:count])
            self._pending = self._pending[count:]
        return text

    def _remember(self, ids: list[int]) -> None:
        self._context = ids
        self._context_text = self._decode(ids) if ids else ""
