"""Published chat templates render as in transformers, or fail for the same reason; `make tokenizers`."""

from itertools import product
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from vocabularies import LLAMA_CPP, vocabularies_folder

from pagelet.models.errors import InputError
from pagelet.models.text import ChatTemplate

FOLDER = vocabularies_folder() / LLAMA_CPP / "templates"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.jinja"))
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


# Variables of the templates' own; the first set is empty.
DOCUMENTS = [{"doc_id": 1, "title": "Sky", "text": "It is blue.", "content": "It is blue."}]
VARIABLES: list[dict[str, Any]] = [
    {},
    {
        "enable_thinking": False,
        "thinking": True,
        "reasoning_effort": "low",
        "documents": DOCUMENTS,
        "date_string": "1 Jan 2026",
        "datetime": "today",
        "functions": "[]",
    },
]


def of_transformers(source: str, messages: Messages, **variables: Any) -> tuple[str, str]:
    """("text", the text) or ("error", the message)."""
    try:
        texts, _ = render_jinja_template([messages], chat_template=source, **{**SPECIAL, **variables})
    except Exception as error:  # templates are code
        return "error", str(error) or type(error).__name__
    return "text", texts[0]


def ours(template: ChatTemplate, messages: Messages, **variables: Any) -> tuple[str, str]:
    try:
        return "text", template.render(template.variables(messages, **variables))
    except InputError as error:
        return "error", str(error).removeprefix("The chat template does not take these messages: ")


@pytest.mark.skipif(not TEMPLATES, reason=f"{FOLDER} is not there; `make tokenizers` fetches it")
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_a_published_template_renders_as_in_transformers(name: str) -> None:
    source = (FOLDER / name).read_text(encoding="utf-8")
    template = ChatTemplate(source, SPECIAL)
    rendered = 0
    for (kind, messages), others, prompt in product(CONVERSATIONS.items(), VARIABLES, (True, False)):
        tools = [TOOL, PLAIN_TOOL] if kind in WITH_TOOLS else None
        variables = {"tools": tools, "add_generation_prompt": prompt, **others}
        expected = of_transformers(source, messages, **variables)
        assert ours(template, messages, **variables) == expected, (kind, others)
        rendered += expected[0] == "text"
    assert rendered
