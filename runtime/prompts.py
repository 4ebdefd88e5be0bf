"""Prompts and their limits: what a caller may pass, as token ids that fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import CapacityError, InputError, PromptTooLongError
from pagelet.models.text import Tokenizer

Message: TypeAlias = Mapping[str, Any]
# Raw text, the messages of a conversation (they go through the chat template), or token ids.
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int] | NDArray[np.integer[Any]]"

# More than a text stream looks back on.
_TAIL_TOKENS = 32


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes:
        token_ids: at least one.
        tail: the last few of them, where the reply goes on in the middle of the same text; empty after
            messages, where it begins a text of its own.
        dropped_messages: messages that were left out, see `truncation`.
    """

    token_ids: list[int]
    tail: list[int]
    dropped_messages: int = 0


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> EncodedPrompt:
    """Token ids of a prompt.

    Raises:
        InputError: of another kind, empty, or with an id outside the vocabulary.
    """
    if is_conversation(prompt):
        return EncodedPrompt(check_prompt(tokenizer.encode_chat(prompt), vocab_size), [])
    token_ids = check_prompt(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, vocab_size)
    return as_continued(token_ids)


def as_continued(token_ids: list[int]) -> EncodedPrompt:
    """Token ids whose text the reply goes on from."""
    return EncodedPrompt(token_ids, token_ids[-_TAIL_TOKENS:])


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def check_prompt(ids: Any, vocab_size: int) -> list[int]:
    """`ids` as a list of at least one int, each in the vocabulary.

    Raises:
        InputError: none, not whole numbers in one dimension, or the first id outside 0 to vocab_size - 1.
    """
    if not isinstance(ids, Iterable) or isinstance(ids, Mapping | bytes | set):
        raise InputError(f"the prompt is {type(ids).__name__}; expected text, messages or token ids.")
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        array = np.empty((0, 0))
    if array.shape == (0,):
        raise InputError("the prompt is empty; it needs at least one token.")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"the prompt is an array of {array.dtype} with {array.ndim} dimensions; expected text, messages "
            "or one list of token ids. For several prompts use generate_all."
        )
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise InputError(f"token id {array[at]} at position {at} is outside the vocabulary of {vocab_size}.")
    tokens: list[int] = array.tolist()
    return tokens


@dataclass(frozen=True)
class LengthLimits:
    """The most tokens of one sequence: `context` by the model, `cache` by the pool's size."""

    context: int
    cache: int

    def max_length(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens, prompt included, at which a reply ends; None runs to the end of context or cache.

        The last token is generated and never read, so it needs no room in the cache.

        Raises:
            PromptTooLongError: the context leaves no room for a reply.
            CapacityError: prompt and reply do not fit into the whole cache.
        """
        if prompt_tokens >= self.context:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens and the context {self.context}, which must hold at "
                "least one more. Shorten the prompt."
            )
        wanted = min(prompt_tokens + (1 if max_tokens is None else max_tokens), self.context)
        if wanted > self.cache + 1:
            raise CapacityError(
                f"the request needs room for {wanted - 1} tokens ({prompt_tokens} of the prompt), the whole "
                f"KV cache has {self.cache}. Raise kv_memory, or shorten the prompt or max_tokens."
            )
        return min(self.context, self.cache + 1) if max_tokens is None else wanted

    def check_scoring(self, num_tokens: int) -> None:
        """Raise PromptTooLongError or CapacityError if a text of so many tokens cannot be scored."""
        if num_tokens > self.context:
            raise PromptTooLongError(
                f"the text has {num_tokens} tokens, the context {self.context}. Shorten it."
            )
        if num_tokens > self.cache:
            raise CapacityError(
                f"the text has {num_tokens} tokens, the whole KV cache has room for {self.cache}. "
                "Raise kv_memory."
            )
