"""Published chat templates render as in transformers, or fail for the same reason; `make tokenizers`."""

from itertools import product
from typing import Any

import pytest
from conversations import CONVERSATIONS, PLAIN_TOOL, SPECIAL, TOOL, WITH_TOOLS, Messages, of_transformers
from vocabularies import LLAMA_CPP, vocabularies_folder

from pagelet.models.errors import InputError
from pagelet.models.text import ChatTemplate

pytestmark = pytest.mark.slow

FOLDER = vocabularies_folder() / LLAMA_CPP / "models" / "templates"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.jinja"))
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
