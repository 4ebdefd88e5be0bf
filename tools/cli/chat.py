"""`pagelet chat`: a conversation on the terminal."""

import argparse
import sys
from typing import Any

from pagelet.models.errors import InputError, PageletError
from pagelet.tools.cli import common

_HELP = "Ctrl-D or /exit ends, Ctrl-C stops an answer, /new begins again."


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("chat", help="a conversation on the terminal", description=__doc__)
    common.add_engine_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    common.add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    params = common.sampling_params(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with common.open_engine(args) as engine:
        if not engine.tokenizer.has_chat_template:
            raise InputError(f"{args.bundle} has no chat template; use `pagelet generate --raw`.")
        print(_HELP, file=sys.stderr)
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/new":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                messages.append({"role": "assistant", "content": _answer(engine, messages, params)})


def _ask() -> str | None:
    """The user's next line; None at the end."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/exit" else line


def _answer(engine: Any, messages: list[dict[str, str]], params: Any) -> str:
    """Show the reply; what was shown is kept, also after Ctrl-C or an error."""
    shown: list[str] = []
    try:
        for chunk in engine.stream(messages, params):
            print(chunk.text, end="", flush=True)
            shown.append(chunk.text)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except PageletError as error:
        print(f"\n{error}", file=sys.stderr)
    print()
    return "".join(shown)
