"""`pagelet chat`: a conversation on the terminal."""

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError, PageletError
from pagelet.runtime import Engine, Request, SamplingParams
from pagelet.tools.cli import common

with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401  (gives `input` its line editing)

_HELP = "Ctrl-D or /exit ends, Ctrl-C stops an answer (at the prompt it ends too), /new begins again."


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("chat", help="a conversation on the terminal", description=__doc__)
    common.add_engine_options(parser)
    common.add_speculation_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--session", type=Path, metavar="FILE", help="go on from this file if it exists; saved at the end"
    )
    common.add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.session:
        _check_session(args.session)
    params = common.sampling_params(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with common.open_engine(args, **common.speculation(args)) as engine:
        if not engine.tokenizer.has_chat_template:
            raise InputError(f"{args.bundle} has no chat template; use `pagelet generate --raw`.")
        chat = Chat(engine, params, list(opening))
        if args.session and args.session.exists():
            chat.load(args.session)
        if sys.stdin.isatty():
            print(_HELP, file=sys.stderr)
        while (line := _ask()) is not None:
            if line == "/new":
                chat = Chat(engine, params, list(opening))
                print("[a new conversation]", file=sys.stderr)
            elif line.startswith("/"):
                print(f"[{line} is not a command. {_HELP}]", file=sys.stderr)
            elif line:
                chat.answer(line)
        if args.session:
            chat.save(args.session)


def _ask() -> str | None:
    """The user's next line; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/exit" else line


def _check_session(path: Path) -> None:
    """Before a long conversation, not after it."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"--session {path}: its folder does not exist; make it first.")


@dataclass
class Chat:
    """A conversation: its messages, and the request that answered last, whose blocks a session keeps."""

    engine: Engine
    params: SamplingParams
    messages: list[dict[str, str]]
    last: Request | None = None
    loaded: bool = False

    def answer(self, line: str) -> None:
        """Show the reply; what was shown is kept, also after Ctrl-C. A refused line is forgotten."""
        self.messages.append({"role": "user", "content": line})
        before, shown = self.last, list[str]()
        try:
            with self.engine.stream(self.messages, self.params, on_context_full="truncate") as stream:
                self._drop(stream.request.dropped_messages)
                self.last = stream.request
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                    shown.append(chunk.text)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except PageletError as error:
            print(f"\n{error}", file=sys.stderr)
            self.last = before
            if not shown:
                self.messages.pop()
                return
        print()
        self.messages.append({"role": "assistant", "content": "".join(shown)})

    def load(self, path: Path) -> None:
        """Go on from a session that `save` wrote."""
        session = self.engine.load_session(path)
        messages = session.metadata.get("messages")
        if not isinstance(messages, list):
            raise InputError(f"{path} is a session without messages; `pagelet chat` did not save it.")
        self.messages, self.loaded = messages, True
        total = len(session.token_ids)
        print(f"[{path}: {session.restored_tokens} of {total} tokens restored]", file=sys.stderr)

    def save(self, path: Path) -> None:
        """Write the messages and what is cached of the last exchange; after /new alone, nothing is kept."""
        if self.last is None and not self.loaded:
            path.unlink(missing_ok=True)
        elif self.last is not None:
            self.engine.save_session(path, self.last, metadata={"messages": self.messages})

    def _drop(self, count: int) -> None:
        """Forget the oldest `count` messages after the system prompt, and say so."""
        if count:
            system = self.messages[0]["role"] == "system"
            del self.messages[system : system + count]
            print(f"[the context is full: the oldest {count} messages were dropped]", file=sys.stderr)
