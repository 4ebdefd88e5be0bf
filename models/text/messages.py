"""Chat messages as they arrive, checked and turned into plain JSON values that a template may see."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagelet.models.errors import InputError

MAX_MESSAGES = 10_000
MAX_DEPTH = 64

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Names under which a message's reasoning is passed; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as plain dicts without keys of value None, but for an assistant's content: templates ask
    for that.

    Raises:
        InputError: no list, empty, too long, or a message that is not well formed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InputError(
            f"messages is {_kind(messages)}; expected a list with at least one {{'role': …, 'content': …}}."
        )
    if len(messages) > MAX_MESSAGES:
        raise InputError(f"messages has {len(messages)} entries; expected at most {MAX_MESSAGES}.")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {_kind(message)}; expected an object with 'role' and 'content'.")
    given = plain(message, where)
    known = {key: value for key, value in given.items() if value is not None or key == "content"}
    role, content = known.get("role"), known.get("content")
    if not _is_role("role", role):
        raise InputError(
            f"{where}: 'role' is {role!r:.80}; expected a name like 'system', 'user' or 'assistant' "
            "(letters, digits, _ and -; at most 64)."
        )
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}: content[{index}]")
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise InputError(f"{where}: 'content' is {_kind(content)}; expected a string or text parts.")
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    if reasoning is not None:
        known = {"thinking": reasoning, **known, "reasoning_content": reasoning}
    return known


def _check_part(part: object, where: str) -> None:
    kind = part.get("type", "text") if isinstance(part, dict) else _kind(part)
    if kind != "text":
        raise InputError(f"{where} is {kind!r:.80}; only {{'type': 'text', 'text': …}} is served.")
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise InputError(f"{where} has no string 'text'; expected {{'type': 'text', 'text': …}}.")


def joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with lists of text parts joined by line breaks, for templates that know only strings."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None alone.

    A template gets no other object: the sandbox does not know which methods of theirs are harmless.

    Raises:
        InputError: another type, a key that is no string, or nesting deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise InputError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise InputError(f"{where} has the key {odd[0]!r:.80}; expected strings.")
        return {str.__str__(key): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, depth + 1) for item in value]
    raise InputError(f"{where} holds {_kind(value)}; expected JSON values (text, numbers, lists, objects).")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with `change` applied to every string a caller wrote.

    Roles, which `checked_messages` has bounded, and keys that are identifiers stay: templates compare those.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        pairs = ((key if key.isidentifier() else change(key), item) for key, item in value.items())
        return {key: item if _is_role(key, item) else map_strings(item, change) for key, item in pairs}
    return value


def _is_role(key: str, value: object) -> bool:
    return key == "role" and isinstance(value, str) and _ROLE.fullmatch(value) is not None


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)) and not value:
        return "empty"
    return "missing" if value is None else f"of type {type(value).__name__}"
