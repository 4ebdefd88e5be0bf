"""TextStream: the text of a running generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagelet.models.text.detokenizer import Detokenizer
from pagelet.models.text.stop import StopMatcher

if TYPE_CHECKING:
    from pagelet.models.text.tokenizer import Tokenizer

_CONTEXT_IDS = 8


class TextStream:
    """Ids in, text out; never half a character, never part of a stop string.

    Special tokens and ids without a token show nothing. Without a stop string, all that is returned is
    `tokenizer.decode` of all ids.

    Attributes:
        stopped: a stop string was completed; the text ends right before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_tail: Sequence[int] = ()
    ) -> None:
        """`prompt_tail`: last ids of the prompt that the text goes on from; with it, a SentencePiece
        vocabulary keeps the space before the first word."""
        context = [token_id for token_id in prompt_tail if tokenizer.has_text(token_id)][-_CONTEXT_IDS:]
        self._has_text = tokenizer.has_text
        self._detokenizer = Detokenizer(tokenizer.decode_text, context)
        self._matcher = StopMatcher(stop)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._matcher.found

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now safe to show, "" while it is held back."""
        if self.stopped or not self._has_text(token_id):
            return ""
        return self._show(self._matcher.feed(self._detokenizer.push(token_id)))

    def finish(self) -> str:
        """No more tokens: returns the held-back tail, incomplete bytes as U+FFFD, a partial stop as text."""
        if self.stopped:
            return ""
        last = self._matcher.feed(self._detokenizer.flush())
        return self._show(last + self._matcher.release())

    def _show(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
