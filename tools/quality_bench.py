"""What each way to store one checkpoint's weights costs: its size, and the distance from the original.

Every configuration is exported in a process of its own and then scored on a text, window by window, against
the same model in fp32. With --bundles FOLDER what was done is kept there, and a run that was cut goes on.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagelet.models.errors import InputError, PageletError
from pagelet.tools.cli.common import read_text
from pagelet.tools.cli.guard import guarded
from pagelet.tools.evaluate import windows
from pagelet.tools.peers.report import machine
from pagelet.tools.progress import bar
from pagelet.tools.quality.charts import check_plot, plot_sizes
from pagelet.tools.quality.configurations import REFERENCE, chosen, configurations
from pagelet.tools.quality.entrants import Bundle, Entrant
from pagelet.tools.quality.kept_logits import KeptLogits, check_room
from pagelet.tools.quality.llama_cpp import PeerMissing, check_peers, peers
from pagelet.tools.quality.measure import Row, Workshop
from pagelet.tools.quality.report import document, markdown


@dataclass
class Findings:
    """What the run has so far."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return guarded("quality_bench", lambda: run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagelet.tools.quality_bench", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to score")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="score only the text's beginning")
    parser.add_argument(
        "--window", type=int, default=1024, metavar="N", help="tokens of context; default: %(default)s"
    )
    parser.add_argument(
        "--only", metavar="NAME,…", help="these configurations; names or patterns (int4-*-rtn)"
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="for awq, gptq and auto")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the scoring; default: the physical cores"
    )
    parser.add_argument("--bundles", type=Path, metavar="FOLDER", help="keep bundles and results here")
    parser.add_argument("--peers", metavar="NAME", help="llama_cpp: its files of the same weights too")
    parser.add_argument("--peer-python", type=Path, metavar="FILE", help="interpreter with llama-cpp-python")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs the extra: plot)")
    return parser


def run(args: argparse.Namespace) -> None:
    _check(args)
    text = read_text(args.text)
    found = Findings()
    entrants = _entrants(args, found)
    with _folder(args.bundles) as folder:
        try:
            _measure(entrants, text, args, folder, found)
        finally:  # after Ctrl-C the table has what was finished by then
            if found.rows or found.left_out:
                _print(args, found)
    if args.plot and found.rows:
        plot_sizes(found.rows, args.plot)


def _check(args: argparse.Namespace) -> None:
    """Refuse now what would fail after the long work."""
    if args.window < 2:
        raise InputError(f"--window is {args.window}; expected at least 2 tokens.")
    if args.max_tokens is not None and args.max_tokens < 2:
        raise InputError(f"--max-tokens is {args.max_tokens}; expected at least 2.")
    check_peers(args.peers, args.peer_python)
    if args.plot:
        check_plot(args.plot)


def _entrants(args: argparse.Namespace, found: Findings) -> list[Entrant]:
    calibration = str(args.calibration.resolve()) if args.calibration else None
    ours = chosen(args.only, configurations(calibration))
    entrants: list[Entrant] = [Bundle(one, args.source, args.window, args.threads) for one in ours]
    if args.peers:
        try:
            entrants += peers(args.peer_python, args.source, args.threads)
        except PeerMissing as error:
            found.left_out.append(f"llama.cpp: {error}")
    return entrants


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """Where bundles and results go: the user's folder, or one that does not outlive the run."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="pagelet-quality-") as folder:
            yield Path(folder)
        return
    kept.mkdir(parents=True, exist_ok=True)
    yield kept


def _measure(
    entrants: Sequence[Entrant], text: str, args: argparse.Namespace, folder: Path, found: Findings
) -> None:
    workshop = Workshop(folder, _show)
    original = Bundle(REFERENCE, args.source, args.window, args.threads)
    path, _ = workshop.make(original)
    with original.open(path) as engine, tempfile.TemporaryDirectory(prefix=".logits-", dir=folder) as logits:
        size = min(args.window, engine.max_context)
        pieces = list(windows(engine.tokenizer.encode(text), size, args.max_tokens))
        check_room(folder, sum(map(len, pieces)), engine.vocab_size)
        reference = KeptLogits(engine, Path(logits))
        for entrant in entrants:
            try:
                with bar(entrant.name, "window") as on_piece:
                    found.rows.append(workshop.score(entrant, pieces, reference, on_piece))
            except PageletError as error:
                found.left_out.append(f"{entrant.name}: {error}")
            if args.bundles is None:
                workshop.remove(entrant)


def _print(args: argparse.Namespace, found: Findings) -> None:
    if not args.json:
        print(markdown(found.rows, found.left_out))
        return
    settings = {"source": args.source.name, "text": args.text.name, "window": args.window}
    whole = document(found.rows, found.left_out, machine=machine(), **settings, max_tokens=args.max_tokens)
    print(json.dumps(whole, indent=1, ensure_ascii=False))


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
