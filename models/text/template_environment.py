"""The environment that compiles and runs chat templates; imported at the first chat, for it imports Jinja."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser

from pagelet.models.errors import BundleError, InputError
from pagelet.models.text.template_budget import (
    MAX_RENDERED_CHARACTERS,
    budget,
    check_numbers,
    extent,
    new_budget,
)
from pagelet.models.text.template_sandbox import Sandbox


def compile_template(source: str) -> jinja2.Template:
    """A template that may run in the sandbox.

    Raises:
        BundleError: it is not valid Jinja.
    """
    try:
        return _ENVIRONMENT.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", "unknown")
        raise BundleError(f"The chat template is not valid, line {line}: {error}; correct it.") from error


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a compiled template.

    Raises:
        InputError: the template raised (its message is in the error's), or used too much:
            characters, steps or time.
    """
    pieces, size = [], 0
    try:
        with new_budget():
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise SecurityError(f"it wrote more than {MAX_RENDERED_CHARACTERS} characters")
    except Exception as error:  # a template is code: it may raise anything
        reason = str(error) or type(error).__name__
        raise InputError(f"The chat template does not take these messages: {reason}") from error
    return "".join(pieces)


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
