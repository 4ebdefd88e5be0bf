"""Token ids to calibrate on and to certify with: a file of the user's, or texts written for this project.

The built-in texts are English prose, code, other languages and conversations, which go through the model's
chat template where it has one. What certifies a model is held out: nothing is ever calibrated on it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pagelet.exporter.options import ExportOptions
from pagelet.models.errors import InputError, PageletError
from pagelet.models.text import Tokenizer

MIN_TOKENS = 1024
"""Fewer say little about the inputs of a layer: they are refused."""
WINDOW = 512
_MAX_BYTES = 64 << 20
_TEXTS = Path(__file__).parent / "texts"
_SEPARATOR = "\n---\n"


def calibration_texts(
    options: ExportOptions, tokenizer: Tokenizer, max_context: int = WINDOW
) -> list[list[int]]:
    """Texts of up to WINDOW tokens: of the user's file, or of each built-in kind in turn; none if not needed.

    Raises:
        InputError: the file is empty, binary, too large or too short.
    """
    return texts_of_calibration(options, tokenizer, max_context) if options.is_calibrated else []


def texts_of_calibration(
    options: ExportOptions, tokenizer: Tokenizer, max_context: int = WINDOW
) -> list[list[int]]:
    """The same, whether the quantizer asks for them or not."""
    file, num_tokens = options.calibration, options.calibration_tokens
    size = min(WINDOW, max_context)
    if file is not None:
        windows = _windows([tokenizer.encode(read_text(file))], size)
        found = _usable(windows)
        if found < MIN_TOKENS:
            raise InputError(
                f"{file} has {found} tokens; calibration needs at least {MIN_TOKENS}, better 10,000. "
                "Give a longer text, or leave --calibration out for the built-in texts."
            )
        return _first(windows, num_tokens)
    kinds = [
        _windows((tokenizer.encode(passage) for passage in _passages("english.txt")), size),
        _windows(_conversations(tokenizer), size),
        _windows((tokenizer.encode(passage) for passage in _passages("code.txt")), size),
        _windows((tokenizer.encode(passage) for passage in _passages("multilingual.txt")), size),
    ]
    windows = _in_turn(kinds)
    if (found := _usable(windows)) < MIN_TOKENS:
        raise InputError(
            f"the tokenizer and the context leave {found} tokens of the built-in texts; calibration needs at "
            f"least {MIN_TOKENS}. Give a text that it knows with --calibration, or take --quantizer rtn."
        )
    return _first(windows, num_tokens)


def held_out_texts(tokenizer: Tokenizer, window: int) -> list[list[int]]:
    """The held-out passages, in texts of up to `window` tokens; at least two tokens each."""
    windows = _windows((tokenizer.encode(passage) for passage in _passages("held_out.txt")), window)
    return [ids for ids in windows if len(ids) > 1]


def golden_prompts(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """The beginnings of a few held-out passages: `length` tokens each."""
    passages = _passages("held_out.txt")
    step = max(len(passages) // count, 1)
    chosen = [tokenizer.encode(passage)[:length] for passage in passages[::step][:count]]
    return [ids for ids in chosen if len(ids) > 1]


def read_text(file: Path) -> str:
    """A text file in UTF-8.

    Raises:
        InputError: it cannot be read, is empty, binary, or larger than 64 MiB.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise InputError(f"{file} has {file.stat().st_size} bytes; expected at most {_MAX_BYTES}.")
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no UTF-8 text ({error.reason} at byte {error.start}).") from error
    if "\0" in text:
        raise InputError(f"{file} holds NUL bytes: it is binary. Expected a text file in UTF-8.")
    if not text.strip():
        raise InputError(f"{file} is empty; expected a text to calibrate on.")
    return text


def _passages(name: str) -> list[str]:
    text = (_TEXTS / name).read_text(encoding="utf-8")
    return [passage.strip() + "\n" for passage in text.split(_SEPARATOR)]


def _conversations(tokenizer: Tokenizer) -> Iterable[list[int]]:
    conversations = json.loads((_TEXTS / "chat.json").read_text(encoding="utf-8"))
    for messages in conversations:
        yield _encode_chat(tokenizer, messages)


def _encode_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """Through the template where there is one that takes them; some refuse a system message."""
    without_system = [message for message in messages if message["role"] != "system"]
    for attempt in (messages, without_system) if tokenizer.has_chat_template else ():
        try:
            return tokenizer.encode_chat(attempt, add_generation_prompt=False)
        except PageletError:
            continue
    return tokenizer.encode("\n\n".join(f"{message['role']}: {message['content']}" for message in messages))


def _windows(texts: Iterable[Sequence[int]], size: int) -> list[list[int]]:
    """The texts one after another, cut into pieces of `size`: the short ones share a window."""
    tokens = [token for text in texts for token in text]
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def _in_turn(kinds: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """One of each kind, again and again, until all are used."""
    longest = max(map(len, kinds))
    return [kind[index] for index in range(longest) for kind in kinds if index < len(kind)]


def _usable(windows: Sequence[list[int]]) -> int:
    """Tokens in windows of more than one."""
    return sum(len(window) for window in windows if len(window) > 1)


def _first(windows: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Windows of at least two tokens: one alone has nothing to attend to."""
    chosen: list[list[int]] = []
    for window in windows:
        rest = num_tokens - sum(map(len, chosen))
        if rest < 2:
            break
        if len(window) > 1:
            chosen.append(window[:rest])
    return chosen
