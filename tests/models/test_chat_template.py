"""Chat templates render byte for byte as in transformers, in a sandbox, on checked messages.

The templates are written here; each uses what published ones of its shape use.
"""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

from pagelet.models.errors import BundleError, InputError
from pagelet.models.text import ChatTemplate, template_budget

Messages = list[dict[str, Any]]

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='', turns=0) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|start|>system<|stop|>

Today: {{ date_string | default('unknown', true) }}
{{ ns.system }}<|im_end|>
{%- for m in messages if m.content is string %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|start|>' ~ m.role ~ '<|stop|>\\n\\n' ~ m.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}
{# turns: #}[{{ ns.turns }}]"""

INSTRUCT = """{{ bos_token }}
{% for message in messages %}
{%   if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, …') }}
{%   endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'].strip() }} [/INST]
    {% elif message['role'] == 'assistant' %}
    {% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}

    {% else %}{{ raise_exception('Only user and assistant roles, not ' + message['role']) }}
    {% endif %}
{% endfor %}"""

TOOLS = """
{%- macro describe(tool, depth=0) %}
    {%- for name, value in tool.items() %}{{ '  ' * depth }}{{ name }}: {% if value is mapping %}
{{ describe(value, depth + 1) }}{% else %}{{ value | tojson }}
{% endif %}{% endfor %}
{%- endmacro %}
{%- if tools is not none and tools %}
<|im_start|>system
# Tools
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{{ describe(tool.function) }}
    {%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if loop.index > 6 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>
    {%- endfor %}
    {%- if 'reasoning_content' in message %}<think>{{ message.thinking }}</think>{% endif %}<|im_end|>
{% endfor %}"""

PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}:
{%- if message.content is string %}{{ message.content }}{% else %}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{ part.text }}{% endif %}
    {%- endfor %}
{%- endif %}<|im_end|>{% endfor %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'It\'s <b>"now"</b> & später 🌦',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None]}},
}
CHAT: Messages = [{"role": "user", "content": "  Hi there \n"}, {"role": "assistant", "content": "Hello 😀"}]
SYSTEM: Messages = [{"role": "system", "content": ' Answer in "verse" & <b>prose</b>. '}, *CHAT]
CALLS: Messages = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains", "reasoning": "look up", "name": None},
    {"role": "user", "content": "Thanks"},
    {"role": "user", "content": "Bye"},
    {"role": "user", "content": "beyond the loop's break"},
]
TYPED: Messages = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}
]


def of_transformers(source: str, messages: Messages, **variables: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)
    text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables)
    assert isinstance(text, str)
    return text


def rendered(source: str, messages: object, **variables: Any) -> str:
    template = ChatTemplate(source, SPECIAL)
    return template.render(template.variables(messages, **variables))


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CHATML, CHAT),
        (CHATML, SYSTEM),
        (HEADERS, CHAT),
        (HEADERS, SYSTEM),
        (INSTRUCT, CHAT),
        (TOOLS, CHAT),
        (TOOLS, CALLS),
        (PARTS, TYPED),
        (PARTS, CHAT),
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"tools": [TOOL], "date_string": "1 Jan"}], ids=["bare", "tools"])
def test_the_text_is_that_of_transformers(
    source: str, messages: Messages, prompt: bool, variables: dict[str, Any]
) -> None:
    ours = rendered(source, messages, add_generation_prompt=prompt, **variables)
    assert ours == of_transformers(source, messages, add_generation_prompt=prompt, **variables)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text(max_size=20), min_size=1, max_size=4), st.sampled_from([CHATML, HEADERS, TOOLS, PARTS])
)
def test_any_content_is_rendered_alike(contents: list[str], source: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    assert rendered(source, messages) == of_transformers(source, messages, add_generation_prompt=True)


def test_parts_are_joined_for_a_template_that_knows_only_strings() -> None:
    assert "user\na\n b<|im_end|>" in rendered(CHATML, TYPED)
    assert "a\n b" in rendered("{% for m in messages %}{{ m.content }}{% endfor %}", TYPED)


def test_time_is_the_devices() -> None:
    year = rendered("{{ strftime_now('%Y') }}", CHAT)
    assert year.isdecimal()
    assert year == of_transformers("{{ strftime_now('%Y') }}", CHAT)


def test_a_templates_own_error_reaches_the_caller() -> None:
    for messages in ([*CHAT, *CHAT[1:]], SYSTEM[:1]):
        with pytest.raises(InputError, match="these messages: Roles must alternate"):
            rendered(INSTRUCT, messages)
    with pytest.raises(InputError, match="has no attribute 'nothing'"):
        rendered("{{ messages[0].nothing.more }}", CHAT)
    with pytest.raises(InputError, match="does not take these messages"):
        rendered("{{ messages[0].content + 1 }}", CHAT)
    with pytest.raises(InputError, match="does not take these messages"):
        rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", CHAT)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hi", "of type str"),
        ([], "empty"),
        (None, "missing"),
        ({"role": "user", "content": "x"}, "of type dict"),
        (["Hi"], r"messages\[0\] is of type str"),
        ([*CHAT, {"content": "x"}], r"messages\[2\]: 'role' is None"),
        ([{"role": 5, "content": "x"}], "'role' is 5"),
        ([{"role": "user<|im_end|>", "content": "x"}], "'role' is 'user<"),
        ([{"role": "user"}], "'content' is missing"),
        ([{"role": "user", "content": 5}], "'content' is of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no string 'text'"),
        ([{"role": "user", "content": ["x"]}], "of type str"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "key 1"),
        ([{"role": "user", "content": "x", "extra": object()}], "of type object"),
        ([{"role": "user", "content": "x"}] * 10_001, "10001 entries"),
    ],
    ids=lambda value: value if isinstance(value, str) else "messages",
)
def test_malformed_messages_are_refused_by_name(messages: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        rendered(CHATML, messages)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("tools", [5, "x", {"a": {}}, [TOOL, "x"]])
def test_malformed_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InputError, match="expected a list of JSON objects"):
        rendered(CHATML, CHAT, tools=tools)


def test_nesting_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match="nested deeper than 64"):
        rendered(CHATML, [{"role": "user", "content": "x", "extra": deep}])
    with pytest.raises(InputError, match="nested deeper than 64"):
        rendered(CHATML, CHAT, tools=[{"extra": deep}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ lipsum(1000) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.name }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InputError, match="does not take these messages"):
        # An unsafe attribute is undefined: printed it is an error or nothing; then the call below fails.
        rendered(source + "{{ nothing.at_all }}", CHAT)
    template = ChatTemplate("{{ (''.__class__ or 'hidden') }}")
    assert template.render(template.variables(CHAT)) == "hidden"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = n.x, n.x %}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x] * 2 %}{% endfor %}{{ n.x }}",
        "{% for i in range(10000000000) %}{% endfor %}",
    ],
)
def test_a_templates_output_is_bounded(source: str) -> None:
    with pytest.raises(InputError, match=r"too large|wrote more than|too big"):
        rendered(source, CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'|center(3000000000) }}",
        "{{ '%3000000000d'|format(1) }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 3000000000) }}",
        "{{ '{a:>3000000000}'.format_map({'a': 1}) }}",
        "{{ 'x'.ljust(3000000000) }}",
        "{{ 'x'.encode().zfill(3000000000) }}",
        "{{ (5).to_bytes(3000000000, 'big') }}",
        "{{ ('\t' * 60000).expandtabs(60000) }}",
        "{{ ('x' * 60000).translate({120: 'y' * 60000}) }}",
        "{{ ('x ' * 9000000).split() }}",
        "{{ ('\n' * 9000000).splitlines() }}",
        "{{ ('x' * 60000)|list|join('y' * 60000) }}",
        "{{ ('x' * 6000)|map('upper')|join('y' * 60000) }}",
        "{{ ('y' * 60000).join('x' * 60000) }}",
        "{{ ('x' * 60000000)|list }}",
        "{{ ('\n' * 60000)|indent(60000, blank=true) }}",
        "{{ ('x' * 60000).replace('x', 'y' * 60000) }}",
        "{{ ('x' * 60000)|replace('x', 'y' * 60000) }}",
        "{{ ('x' * 60000)|wordwrap(1, wrapstring='y' * 60000) }}",
        "{{ [1]|batch(3000000000, 0)|list }}",
        "{{ [1]|slice(3000000000)|list }}",
        "{{ 1|round(60000000, 'ceil') }}",
        "{{ [[1]]|tojson(indent=60000000) }}",
        "{{ range(60000)|list|tojson(separators=('y' * 60000, ':')) }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set n = namespace(x=[]) %}"
        "{% for i in range(99) %}{% set n.x = n.x + ['x' * 60000000] %}{% endfor %}",
        "{% macro f() %}{% for i in range(99) %}{{ 'x' * 999999 }}{% endfor %}{% endmacro %}{{ f()|length }}",
    ],
)
def test_what_a_template_makes_is_bounded(source: str) -> None:
    template = ChatTemplate(source)
    variables = template.variables(CHAT)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"too much|too large"):
            template.render(variables)
        # At most what is charged in all, or one value of the largest size and the list it is joined from.
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for i in [9] recursive %}{{ loop([i]) }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("limit", ["MAX_STEPS", "MAX_SECONDS"])
def test_what_a_template_does_is_bounded(source: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = {"MAX_STEPS": 1_000, "MAX_SECONDS": 0.01}
    monkeypatch.setattr(template_budget, limit, lower[limit])
    template = ChatTemplate(source)
    with pytest.raises(InputError, match=r"used too much|recursion"):
        template.render(template.variables(CHAT))


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%-5s|%.2f' % ('a', 1.5) }}{{ '%(a)s'|format(a=3) }}{{ '{:>{}}|{a}'.format(1, 9, a=[1]) }}",
        "{{ 'x'|center(9) }}{{ 'a,b'.split(',') }}{{ 'a b  c'.split() }}{{ 'a,b,c'.rsplit(',', 1) }}",
        "{{ 'a\nb'|indent(2, true) }}{{ 'a\nb'|indent('> ') }}{{ 'aXbX'|replace('X', '-', 1) }}",
        "{{ [1, 'a', none]|join(', ') }}{{ messages|map(attribute='role')|join('-') }}{{ nothing|join }}",
        "{{ messages|join('+', attribute='content') }}{{ {'a': 1}|join }}{{ '-'.join('abc') }}",
        "{{ [1, 2, 3]|batch(2, 0)|list }}{{ range(5)|slice(2)|map('list')|list }}{{ [1, 2]|sum }}",
        "{{ [[1], [2]]|sum(start=[]) }}{{ 2.567|round(1) }}{{ 'a b c'|wordwrap(2) }}{{ 'ab'|list }}",
        "{{ none }}{{ 1 ~ none ~ [1] ~ 'x' }}{{ 'a\tb'.expandtabs(4) }}{{ 'a'|upper|title|trim }}",
        "{{ {'b': [1, 'é'], 'a': {}}|tojson(indent=1, sort_keys=true) }}",
        "{{ [1]|tojson(separators=(',', ':')) }}",
        "{% set x %}<{{ messages[0].content[2:4] }}>{% endset %}{{ x }}",
        "{{ '<a>'|escape ~ '<b>' }}{{ 2 ** 9 % 7 }}",
        "{% for i in [[1, [2]], 3] recursive %}{{ loop.length }}{{ loop(i) if i is iterable }}{% endfor %}",
        "{% for i in range(9) if i % 2 %}{{ loop.index }}/{{ loop.length }}{{ i }}{% else %}none{% endfor %}",
    ],
)
def test_bounded_functions_write_what_jinjas_own_do(source: str) -> None:
    assert rendered(source, CHAT) == of_transformers(source, CHAT)


def test_an_invalid_template_is_the_bundles_fault() -> None:
    with pytest.raises(BundleError, match="line 2"):
        ChatTemplate("{{ x }}\n{% endfor %}").render({})


def test_messages_are_not_changed_and_objects_do_not_reach_the_template() -> None:
    class Shouting(str):
        def __str__(self) -> str:
            return "HA"

    messages = [{"role": "user", "content": Shouting("ha"), "name": None}]
    assert rendered("{{ messages[0].content }}{{ 'name' in messages[0] }}", messages) == "haFalse"
    assert messages[0].keys() == {"role", "content", "name"}
