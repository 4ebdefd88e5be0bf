"""Between text and token ids: the tokenizer, the chat template, and text that streams out whole."""

from pagelet.runtime.text.chat_template import ChatTemplate
from pagelet.runtime.text.stream import TextStream
from pagelet.runtime.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextStream", "Tokenizer"]
