"""The Jinja environment of chat templates: its sandbox, in which every render has a budget.

Bounded, before they are made: the results of operators, of filters and of the methods of text, and the text
of every value that is printed or joined. Counted: loop rounds, calls, filters; with each the time is checked.
A render may hold `MAX_MADE_CHARACTERS` or so, each of up to four bytes.
Not bounded: the time of one filter or comparison by itself. It grows with the bounded values it is given,
but for a comparison of lists that hold each other many times, made otherwise than by literals (a macro's
`varargs`, `dict()`), it doubles with each level.
"""

import inspect
from collections.abc import Callable, Iterable, Sized
from functools import update_wrapper, wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from pagelet.models.text.template_budget import (
    ITEM,
    MAX_RENDERED_CHARACTERS,
    POINTER,
    budget,
    check_numbers,
    extent,
    lines,
    operator_size,
    percent_size,
    shallow,
    widths,
)

_MAX_PARTS = MAX_RENDERED_CHARACTERS // ITEM
_LONG_LITERAL = 16
_PASSED = ("eval_ctx", "context", "environment")  # what Jinja itself passes to a filter


def _text(value: Any) -> Any:
    """`value`, of which the text may be taken."""
    if type(value) is not str:
        budget().charge(extent(value))
    return value


def _joined(value: str) -> Any:
    budget().charge(extent(value))
    return value


def _made(value: Any) -> Any:
    return budget().made(value)


def _literal(value: Any) -> Any:
    """A list, tuple or dict as written in the template; one inside it twice must not double without end."""
    if extent(value) > MAX_RENDERED_CHARACTERS:
        raise SecurityError("the template used too much: a list of lists is too large")
    return budget().made(value)


def _step(value: Any) -> Any:
    budget().step()
    return value


class _Counted(NodeTransformer):
    """Puts the counting filters into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), "_step"), lineno=node.lineno))
        if node.test is not None:
            node.test = _filtered(cast(nodes.Expr, node.test), "_step")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_joined") for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _counted_literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _counted_literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _counted_literal(node)


def _counted_literal(node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Expr:
    """Short ones of constants stay: they are folded, and made once."""
    constant = all(isinstance(item, nodes.Const) for item in node.items)
    return node if constant and len(node.items) <= _LONG_LITERAL else _filtered(node, "_literal")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Usable only in `with new_budget()`; a SecurityError says what was too much."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_text)
        del self.globals["lipsum"]  # writes text without a limit
        counting = {"_joined": _joined, "_literal": _literal, "_made": _made, "_step": _step}
        bounded = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters.update(bounded)
        self.filters.update(counting)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What a macro or a block wrote."""
        listed = list(pieces)
        budget().charge(sum(map(len, listed)))
        return "".join(listed)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget().charge(operator_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            named = args[0] if value.__name__ == "format_map" else kwargs
            _MeasuringFormatter(self).vformat(str(value.__self__), args, named)
            return format_text(*args, **kwargs)

        return update_wrapper(bounded, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget().step()
        check_numbers(*args, *kwargs.values())
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes)) and inspect.isbuiltin(__obj):
            if __obj.__name__ == "join":
                args = tuple(map(_sized, args))
            budget().charge(_method_size(owner, __obj.__name__, [*args, *kwargs.values()]))
        return budget().made(super().call(__context, __obj, *args, **kwargs))


class _MeasuringFormatter(SandboxedFormatter):
    """Charges each field before it is written."""

    def format_field(self, value: Any, format_spec: str) -> str:
        budget().charge(widths(format_spec, ()) + extent(value))
        return str(super().format_field(value, format_spec))


def _sized(value: Any) -> Any:
    """What is looked at twice: a generator becomes a list."""
    return value if isinstance(value, Sized) else list(value)


def _method_size(owner: Any, method: str, args: list[Any]) -> int:
    """At least the size of a text method's result, where it can be more than that of its input."""
    match method, args:
        case "join", [parts]:
            return sum(map(shallow, parts)) + len(owner) * len(parts)
        case "replace", [old, new, *_]:
            return len(owner) + int(owner.count(old)) * len(new)
        case "expandtabs", _:
            return len(owner) * (1 + max(8, *map(int, args)))
        case "translate", [dict() as table]:
            return len(owner) * (1 + max(map(shallow, table.values()), default=0))
        case "split" | "rsplit", _:
            separator = next((arg for arg in args if isinstance(arg, (str, bytes))), None)
            return ITEM * len(owner.split(separator, _MAX_PARTS))
        case "splitlines", _:
            return ITEM * (lines(owner) if isinstance(owner, str) else len(owner))
    return 0


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, its arguments and its result checked."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    size = _FILTER_SIZES.get(name)
    parameters = inspect.signature(function).parameters.values()
    signature = inspect.Signature([part for part in parameters if part.name not in _PASSED])

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget().step()
        check_numbers(*args[skipped + 1 :], *kwargs.values())
        if name in ("join", "sum", "batch", "slice"):
            args = (*args[:skipped], _sized(args[skipped]), *args[skipped + 1 :])
        if size:
            bound = signature.bind(*args[skipped:], **kwargs)
            bound.apply_defaults()
            budget().charge(size(list(bound.arguments.values())))
        return budget().made(function(*args, **kwargs))

    return bounded


def _indent_size(arguments: list[Any]) -> int:
    text, width = arguments[:2]
    return extent(text) + lines(str(text)) * (width if isinstance(width, int) else len(width))


def _replace_size(arguments: list[Any]) -> int:
    text, old, new = (str(_text(argument)) for argument in arguments[:3])
    return len(text) + text.count(old) * len(new)


def _round_size(arguments: list[Any]) -> int:
    """Ten to the precision is taken."""
    return operator_size("**", 10, abs(arguments[1]))


def _product(arguments: list[Any]) -> int:
    """For filters that may write their texts once for each character or so."""
    return extent(arguments[0]) * (1 + sum(len(text) for text in arguments[1:] if isinstance(text, str)))


def _text_size(arguments: list[Any]) -> int:
    return extent(arguments[0])


_FILTER_SIZES: dict[str, Callable[[list[Any]], int]] = {
    **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "pprint", "string"), _text_size),
    **dict.fromkeys(("striptags", "sum", "title", "trim", "truncate", "upper", "urlencode"), _text_size),
    **dict.fromkeys(("center", "wordcount", "xmlattr"), _text_size),
    **dict.fromkeys(("urlize", "wordwrap"), _product),
    "batch": lambda arguments: len(arguments[0]) * POINTER + arguments[1] * extent(arguments[2]),
    "format": lambda arguments: percent_size(str(arguments[0]), arguments[2] or arguments[1]),
    "indent": _indent_size,
    "join": lambda arguments: extent(arguments[0]) + len(arguments[0]) * extent(arguments[1]),
    "list": lambda arguments: ITEM * len(arguments[0]) if isinstance(arguments[0], str) else 0,
    "replace": _replace_size,
    "round": _round_size,
    "slice": lambda arguments: ITEM * arguments[1],
}
