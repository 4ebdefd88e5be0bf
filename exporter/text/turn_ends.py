"""Which tokens end an assistant's turn: a chat template shows them, whether or not a config declares them."""

import re
from collections.abc import Iterable, Mapping

from pagelet.models.errors import BundleError, InputError
from pagelet.models.text import ChatTemplate

# After these a tool's answer is expected; a template writes them in conversations with tools only.
_TOOL_ENDS = ("<|eom_id|>", "<|call|>", "<|calls|>", "<|tool_response>")
# For templates that take no plain conversation.
_KNOWN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>")
_THOUGHT, _ANSWER = "pagelet thinks", "pagelet answers"
_USER = {"role": "user", "content": "Hi"}
_ASSISTANT = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}


def turn_ends(template: str, special_tokens: Mapping[str, str], added: Iterable[str]) -> list[str]:
    """The added tokens that end a turn: the one that the template writes behind an answer, and those behind
    calls of tools.

    `special_tokens` are the template's variables; `added` are the tokens that are found in text as a whole.
    """
    tokens = {token for token in added if token.strip()}
    names = [name for name in _TOOL_ENDS if name in template]
    chat = ChatTemplate(template, special_tokens)
    try:
        # Some write the end of a turn only when another one follows.
        names += _behind_answer(chat, [], tokens) or _behind_answer(chat, [_USER], tokens)
    except (BundleError, InputError):
        names += [name for name in _KNOWN_ENDS if name in template]
    return [name for name in names if name in tokens]


def _behind_answer(chat: ChatTemplate, later: list[dict[str, str]], tokens: set[str]) -> list[str]:
    """The token that closes the answer: of several next to each other a known one, or the first.

    What also stands between a thought and its answer does not end the turn (GPT-OSS's "<|end|>").
    """
    messages = [_USER, _ASSISTANT, *later]
    text = chat.render(chat.variables(messages, add_generation_prompt=False))
    before, _, behind = text.rpartition(_ANSWER)
    _, thought, between = before.rpartition(_THOUGHT)
    longest_first = sorted(tokens, key=len, reverse=True)
    token = "|".join(map(re.escape, longest_first)) or "(?!)"
    run = re.match(rf"\s*((?:{token})*)", behind)
    closing = re.findall(token, run[1]) if run else []
    ends = [name for name in closing if name in _KNOWN_ENDS] + closing[:1]
    return [name for name in ends[:1] if not (thought and name in between)]
