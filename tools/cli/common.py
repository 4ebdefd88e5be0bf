"""Options that several commands share: how to open an engine, how to sample."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pagelet.models.errors import InputError
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.config import Speculate

_MAX_INPUT_BYTES = 64 << 20


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder made by `pagelet export`")
    parser.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory reserved for the KV cache, such as 512MiB; default: room for 4 x 8,192 tokens, at most "
        "a quarter of the free memory",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: the physical cores")


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculate",
        choices=get_args(Speculate),
        default="auto",
        help="who guesses ahead: the text itself (ngram), the draft, both (auto), nobody (off); the text "
        "is the same in any case. Default: auto",
    )
    parser.add_argument(
        "--draft",
        metavar="BUNDLE",
        help="a smaller model with the same tokenizer that guesses ahead",
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens; default: the model's own")


def speculation(args: argparse.Namespace) -> dict[str, Any]:
    """Of EngineConfig, what `add_speculation_options` asked for."""
    return {"speculate": args.speculate, "draft": args.draft, "max_context": args.max_context}


def open_engine(args: argparse.Namespace, **config: Any) -> Engine:
    return Engine.open(args.bundle, EngineConfig(kv_memory=args.kv_memory, threads=args.threads, **config))


# option, type, help; the names are SamplingParams' own
_SAMPLING = (
    ("max_tokens", int, "new tokens; default: until the model stops or the context ends"),
    ("temperature", float, "0 is greedy; default: 0"),
    ("top_k", int, "keep the K likeliest tokens; 0 is off"),
    ("top_p", float, "keep the likeliest tokens that reach this probability"),
    ("min_p", float, "keep tokens of at least this share of the likeliest one's probability"),
    ("repetition_penalty", float, "over 1 makes tokens that were used less likely"),
    ("presence_penalty", float, "subtracted once for a token that was generated"),
    ("frequency_penalty", float, "subtracted for each time that a token was generated"),
    ("seed", int, "the same seed gives the same text"),
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    for name, kind, text in _SAMPLING:
        metavar = "N" if kind is int else "X"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> SamplingParams:
    """What the user gave, over `defaults`, over SamplingParams' own defaults."""
    names = [*(name for name, _, _ in _SAMPLING), "logprobs"]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if args.stop:
        given["stop"] = tuple(args.stop)
    return SamplingParams(**{**(defaults or {}), **given, "ignore_eos": args.ignore_eos})


def read_text(path: Path) -> str:
    """A UTF-8 text file.

    Raises:
        InputError: it can't be read, is too large, or is not text.
    """
    try:
        if path.stat().st_size > _MAX_INPUT_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_INPUT_BYTES} are read.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def read_messages(path: Path) -> Any:
    """A JSON list of messages, each an object with "role" and "content"."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not valid JSON: {error}.") from error


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: names, then values."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def size(count: int) -> str:
    """Bytes for people: 512 B, 1.5 kB, 86.3 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
