"""Between text and token ids: the tokenizer, the chat template, and text that streams out whole."""

from pagelet.models.text.chat_template import ChatTemplate
from pagelet.models.text.stream import TextStream
from pagelet.models.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextStream", "Tokenizer"]
