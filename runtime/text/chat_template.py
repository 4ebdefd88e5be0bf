"""ChatTemplate: a bundle's Jinja template, run in a sandbox as transformers runs it.

A template is code from whoever made the model. The sandbox keeps it from Python's internals, the data it
sees is plain, and what it writes, makes and does is bounded (`template_sandbox`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser

from pagelet.models.errors import BundleError, InputError
from pagelet.runtime.text.messages import checked_messages, joined_parts, plain
from pagelet.runtime.text.template_budget import (
    MAX_RENDERED_CHARACTERS,
    budget,
    check_numbers,
    extent,
    new_budget,
)
from pagelet.runtime.text.template_sandbox import Sandbox


class ChatTemplate:
    """Messages in, the prompt's text out."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: variables that the template may use, `bos_token` and the like.

        Raises:
            BundleError: the template is not valid Jinja.
        """
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", "unknown")
            raise BundleError(f"The chat template is not valid, line {line}: {error}; correct it.") from error

    def variables(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **others: Any,
    ) -> dict[str, Any]:
        """The template's variables, checked and plain; contents in parts are joined if it can't read parts.

        Raises:
            InputError: messages, tools or variables of the wrong form.
        """
        checked = checked_messages(messages)
        listed = tools is None or isinstance(tools, (list, tuple))
        if not listed or not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise InputError(f"tools is {tools!r:.80}; expected a list of JSON objects, one per tool.")
        if any(isinstance(message.get("content"), list) for message in checked) and not self._reads_parts:
            checked = joined_parts(checked)
        return {
            **plain({"documents": None, **others}, "template variables"),
            "messages": checked,
            "tools": plain(tools, "tools"),
            "add_generation_prompt": bool(add_generation_prompt),
        }

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for `variables`, equal to transformers' `apply_chat_template(tokenize=False)`.

        Raises:
            InputError: the template raised (its message is in the error's), or used too much:
                characters, steps or time.
        """
        pieces, size = [], 0
        try:
            with new_budget():
                for piece in self._template.generate({**self._special_tokens, **variables}):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED_CHARACTERS:
                        raise SecurityError(f"it wrote more than {MAX_RENDERED_CHARACTERS} characters")
        except Exception as error:  # a template is code: it may raise anything
            reason = str(error) or type(error).__name__
            raise InputError(f"The chat template does not take these messages: {reason}") from error
        return "".join(pieces)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template renders a list of text parts as their text, found by trying."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        variables = {"messages": probe, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            text = self.render(variables)
        except InputError:
            return False
        return "probe" in text and "'text'" not in text and '"text"' not in text


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    budget().step()
    check_numbers(indent)
    budget().charge(extent(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    return Sandbox.concat(budget().made(piece) for piece in encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
