"""JSON into frozen dataclasses, strictly: a wrong type or an unknown key is an error with its path.

`json.loads` gives dicts of anything; what comes out of here has the types that the dataclass declares.
"""

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MakeError = Callable[[str], Exception]
_type_hints = lru_cache(get_type_hints)  # a manifest decodes one class hundreds of times


def decode(kind: type[T], data: object, where: str, error: MakeError) -> T:
    """`data` (out of JSON) as an instance of the dataclass `kind`; `where` names it in messages.

    Fields may be str, bool, int, float, None, Any, tuple[X, ...], dict[str, X], X | None, and dataclasses.

    Raises:
        `error`, with the path of the first value that does not fit.
    """
    if not isinstance(data, dict):
        raise error(f"{where} is {_short(data)}; expected an object.")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    reject_unknown(data, fields, where, error)
    hints = _type_hints(kind)  # type: ignore[arg-type]  # a class is hashable
    values = {
        name: _value(hints[name], data[name], f"{where}: {name!r}", error) for name in fields if name in data
    }
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise error(f"{where} has no {name!r}; it must be there.")
    return kind(**values)


def _value(hint: Any, value: object, where: str, error: MakeError) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(next(arg for arg in args if arg is not type(None)), value, where, error)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return decode(hint, value, where, error)
    if origin is dict and isinstance(value, dict):
        return {key: _value(args[1], item, f"{where}[{key!r}]", error) for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_value(args[0], item, f"{where}[{index}]", error) for index, item in enumerate(value))
    if hint is float and _is(int, value):
        return float(value)  # type: ignore[arg-type]
    if isinstance(hint, type) and _is(hint, value):
        return value
    names = {dict: "an object", tuple: "a list"}
    raise error(f"{where} is {_short(value)}; expected {names.get(origin or hint) or hint.__name__}.")


def require(
    data: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str, error: MakeError
) -> Any:
    """Value of `key`, checked for its type.

    Raises:
        `error`, with a message that names `where` and `key`.
    """
    if key not in data:
        raise error(f"{where} has no {key!r}; it must be there.")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not any(_is(k, data[key]) for k in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise error(f"{where}: {key!r} is {_short(data[key])}; expected {names}.")
    return data[key]


def reject_unknown(found: Iterable[str], known: Iterable[str], where: str, error: MakeError) -> None:
    """Raise `error` for the first key that is not known, with the nearest known one."""
    names = list(known)
    for key in found:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(names))}."
            raise error(f"{where}: unknown key {_short(key)}; {hint}")


def _is(kind: type, value: object) -> bool:
    """isinstance, but True and False are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
