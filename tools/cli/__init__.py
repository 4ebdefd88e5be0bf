"""The one program `pagelet`: its subcommands are the modules beside this one.

Exit status: 0; 1 for a PageletError; 2 for bad usage; 130 after Ctrl-C.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from pagelet.tools.cli.guard import guarded

_COMMANDS = ("export", "generate", "chat", "plan", "bench", "evaluate", "bundle")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagelet",
        description="Exports models to compiled graphs with quantized weights, and runs them on any CPU.",
    )
    parser.add_argument("--version", action="version", version=f"pagelet {version('pagelet')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"pagelet.tools.cli.{name}").add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded("pagelet", lambda: _run(arguments), debug="--debug" in arguments)


def _run(arguments: list[str]) -> None:
    # The commands are imported in here: that takes most of a second, in which Ctrl-C may come.
    args = build_parser().parse_args(arguments)
    args.run(args)
