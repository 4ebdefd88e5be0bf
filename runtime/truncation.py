"""A conversation that has outgrown the context: drop its oldest turns, keep system prompt and last one."""

from collections.abc import Sequence
from typing import Literal

from pagelet.models.errors import InputError, PromptTooLongError
from pagelet.models.text import Tokenizer
from pagelet.runtime.prompts import (
    EncodedPrompt,
    LengthLimits,
    Message,
    Prompt,
    check_prompt,
    encode_prompt,
    is_conversation,
)

OnContextFull = Literal["refuse", "truncate"]
# Without max_tokens, this share of the context is kept free for the reply.
_RESERVE = 8


def encode_truncated(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, limits: LengthLimits, max_tokens: int | None
) -> EncodedPrompt:
    """Token ids of a conversation without as few of its oldest turns as leave room for the reply.

    A turn is a user's message and all up to the next one: answers, tool calls and their results. The room is
    `max_tokens`, or an eighth of the context.

    Raises:
        InputError: no messages, or as `encode_prompt`.
        PromptTooLongError: the system prompt and the last turn alone leave too little room.
    """
    if not is_conversation(prompt):
        raise InputError("on_context_full='truncate' drops turns, and this prompt is not a list of messages.")
    room = min(limits.context, limits.cache + 1)
    reserve = max(1, room // _RESERVE) if max_tokens is None else max_tokens
    whole = encode_prompt(prompt, tokenizer, vocab_size)
    if len(whole.token_ids) + reserve <= room:
        return whole
    system, starts = _turns(prompt)

    def encoded(turn: int) -> EncodedPrompt:
        """The prompt from this turn on."""
        messages = [*prompt[:system], *prompt[starts[turn] :]]
        ids = check_prompt(tokenizer.encode_chat(messages), vocab_size)
        return EncodedPrompt(ids, [], dropped_messages=starts[turn] - system)

    # Fewer turns are fewer tokens, so the first that fits is found by bisection.
    low, high = 0, len(starts) - 1
    best = encoded(high)
    if len(best.token_ids) + reserve > room:
        raise PromptTooLongError(
            f"the system prompt and the last turn have {len(best.token_ids)} tokens and the reply needs room "
            f"for {reserve}, but the context has {room}. Shorten the message, or lower max_tokens."
        )
    while high - low > 1:
        middle = (low + high) // 2
        shorter = encoded(middle)
        if len(shorter.token_ids) + reserve <= room:
            high, best = middle, shorter
        else:
            low = middle
    return best


def _turns(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """Messages of the system prompt, and where each turn begins; the first one right after the system."""
    roles = [message.get("role") for message in messages]
    system = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    users = [index for index in range(system, len(roles)) if roles[index] == "user"]
    return system, [system, *users[1:]]
