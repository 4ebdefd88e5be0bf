"""The one program `pagelet`: its subcommands are the modules beside this one.

Exit status: 0; 1 for a PageletError; 2 for bad usage; 130 after Ctrl-C.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pagelet.tools.cli.guard import guarded

# command: the module that has it
_COMMANDS = {
    "export": "export",
    "build": "build",
    "generate": "generate",
    "chat": "chat",
    "plan": "plan",
    "bench": "bench",
    "eval": "evaluate",
    "inspect": "bundle",
    "verify": "bundle",
}


class _Version(argparse.Action):
    """Prints the version; to look it up takes longer than to parse the arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"pagelet {version('pagelet')}")
        parser.exit()


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; of `command` alone where that is one, since each imports what it needs."""
    parser = argparse.ArgumentParser(
        prog="pagelet",
        description="Exports models to compiled graphs with quantized weights, and runs them.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = [_COMMANDS[command]] if command in _COMMANDS else dict.fromkeys(_COMMANDS.values())
    for name in chosen:
        importlib.import_module(f"pagelet.tools.cli.{name}").add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded("pagelet", lambda: _run(arguments), debug="--debug" in arguments)


def _run(arguments: list[str]) -> None:
    # The commands are imported in here: that takes most of a second, in which Ctrl-C may come.
    args = build_parser(arguments[0] if arguments else None).parse_args(arguments)
    args.run(args)
