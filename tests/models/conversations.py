"""Conversations that chat templates are tried on, and the text that transformers makes of them."""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

Messages = list[dict[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather in a "city" <b>now</b> & später 🌦',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "description": "How many", "default": 1},
                "unit": {"type": "string", "description": "Scale", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
NOTHING = {"type": "object", "properties": {}}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "description": "Time", "parameters": NOTHING}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def call(arguments: Any, identity: str = "call00001") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Answer briefly."}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"sky": "clear"}'}
TURNS = [user("Hi"), assistant("Hello!"), user("How are you?")]
ASKED = [user("Weather in Zürich?"), assistant("", tool_calls=[call({"city": "Zürich", "days": 2})]), RESULT]
CONVERSATIONS: dict[str, Messages] = {
    "user": [user("Hi")],
    "system": [SYSTEM, user("Hi")],
    "turns": TURNS,
    "system, turns": [SYSTEM, *TURNS],
    "assistant last": [*TURNS, assistant("Fine.")],
    "unicode": [
        user("你好 👩‍👩‍👧‍👦 <b>\"é\" & 'x'</b>\u2028\n\n  tail \t"),
        assistant("  مرحبا \n"),
        user("…"),
    ],
    "empty": [user(""), assistant(""), user("")],
    "thinking": [user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello!"), user("Go on")],
    "reasoning": [user("Hi"), assistant("Hello!", reasoning_content="Hm.", thinking="Hm."), user("Go on")],
    "tools": [SYSTEM, user("Weather in Zürich?")],
    "called": ASKED,
    "answered": [SYSTEM, *ASKED, assistant("It is clear."), user("Thanks")],
    "two calls": [
        user("Weather?"),
        assistant("Let me see.", tool_calls=[call({"city": "Bern"}), call({"city": "Oslo"}, "call00002")]),
        RESULT,
        {**RESULT, "tool_call_id": "call00002"},
    ],
    "arguments as text": [
        user("Weather?"),
        assistant(None, tool_calls=[call('{"city": "Bern"}')]),
        RESULT,
    ],
    "two users": [user("Hi"), user("Again")],
    "assistant first": [assistant("Hello!"), user("Hi")],
    "late system": [user("Hi"), assistant("Hello!"), SYSTEM, user("Go on")],
}
WITH_TOOLS = ("tools", "called", "answered", "two calls", "arguments as text")


def of_transformers(source: str, messages: Messages, **variables: Any) -> tuple[str, str]:
    """("text", the text) or ("error", the message)."""
    try:
        texts, _ = render_jinja_template([messages], chat_template=source, **{**SPECIAL, **variables})
    except Exception as error:  # templates are code
        return "error", str(error) or type(error).__name__
    return "text", texts[0]
