"""The one program `pagelet`: subcommands, exit codes, errors in one line.

Exit status: 0; 1 for a PageletError; 2 for bad usage; 130 after Ctrl-C.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType

from pagelet.models.errors import PageletError
from pagelet.tools.cli import bench, bundle, chat, evaluate, export, generate, plan

_COMMANDS = (export, generate, chat, plan, bench, evaluate, bundle)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagelet", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"pagelet {version('pagelet')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        args.run(args)
    except PageletError as error:
        if args.debug:
            raise
        print(f"pagelet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pagelet: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`pagelet … | head`): nothing is left to say, and nobody to say it to.
        sys.stderr.close()
        return 1
    return 0


def _terminate(signum: int, frame: FrameType | None) -> None:
    """A polite end takes the same road as Ctrl-C, so that temporary files are removed."""
    raise KeyboardInterrupt
