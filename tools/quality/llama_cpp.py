"""llama.cpp beside us: its own quantized files of the same weights, the same tokens, our arithmetic after."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagelet.models.errors import InputError, PageletError
from pagelet.runtime.cores import physical_cores
from pagelet.tools.evaluate import Logits
from pagelet.tools.peers.prepare import installed
from pagelet.tools.quality.entrants import identity
from pagelet.tools.quality.export_process import ExportCost
from pagelet.tools.quality.storage import Storage, gguf_storage

PACKAGE = "llama-cpp-python"
_WORKER = Path(__file__).parent.parent / "peers" / "workers" / "quality_llama_cpp.py"


@dataclass(frozen=True)
class PeerForm:
    """A file type of llama.cpp; `pure`: of all matrices, the embedding and the head too."""

    name: str
    kind: str
    pure: bool = False


# F16 says how far its arithmetic alone is from ours: the others cannot come closer.
FORMS = (
    PeerForm("llama.cpp F16", "F16"),
    PeerForm("llama.cpp Q8_0", "Q8_0"),
    PeerForm("llama.cpp Q4_K_M", "Q4_K_M"),
    PeerForm("llama.cpp Q4_0", "Q4_0"),
    PeerForm("llama.cpp Q4_0 pure", "Q4_0", pure=True),
)


class PeerMissing(PageletError):
    """llama.cpp cannot be measured; says why."""


class Peer:
    """A file of llama.cpp's own making, as an entrant."""

    baseline = ""

    def __init__(self, form: PeerForm, python: Path, source: Path, threads: int | None) -> None:
        self.name = form.name
        self.file = form.name.replace(" ", "-") + ".gguf"
        self._form = form
        self._python = python
        self._source = source
        self._threads = threads or physical_cores()

    @property
    def made_from(self) -> dict[str, Any]:
        return {
            "source": identity(self._source),
            "options": asdict(self._form),
            "made_by": f"{PACKAGE} {installed(self._python)[PACKAGE]}",
        }

    def make(self, out: Path) -> ExportCost:
        began = time.perf_counter()
        quantize(self._python, self._source, self._form, out, out.with_suffix(".log"))
        return ExportCost(time.perf_counter() - began)

    def storage(self, path: Path) -> Storage:
        return gguf_storage(path)

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator["PeerScorer"]:
        with tempfile.TemporaryDirectory(prefix=".scoring-", dir=path.parent) as folder:
            scorer = PeerScorer(self._python, path, self._threads, Path(folder))
            try:
                yield scorer
            finally:
                scorer.close()


def peers(python: Path, source: Path, threads: int | None) -> list[Peer]:
    """All of FORMS.

    Raises:
        InputError: that Python cannot be run.
        PeerMissing: the package, or a source that its files can be made from.
    """
    if PACKAGE not in installed(python):
        raise PeerMissing(f"{PACKAGE} is not installed in {python}")
    if source.suffix.lower() != ".gguf":
        raise PeerMissing(f"its files are made from a GGUF file, and {source} is none")
    return [Peer(form, python, source, threads) for form in FORMS]


def quantize(python: Path, source: Path, form: PeerForm, out: Path, log: Path) -> None:
    """Write `form` of the GGUF file `source` to `out`; each tensor is dequantized to float32 first.

    Raises:
        PageletError: it failed; its output is in `log`.
    """
    options = [form.kind, *(["--pure"] if form.pure else [])]
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [python, _WORKER, "quantize", source, out, *options], stdout=output, stderr=output
        )
    if done.returncode:
        raise PageletError(f"its file could not be made: {_last_line(log)}")


class PeerScorer:
    """llama.cpp in a process of its own; logits come through a file in `folder`.

    Raises:
        PageletError: the model cannot be opened.
    """

    def __init__(self, python: Path, model: Path, threads: int, folder: Path) -> None:
        self._exchange = folder / "logits.f32"
        self._log = folder / "log"
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, _WORKER, "score", model, "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        try:
            self.vocab_size = int(self._reply()["vocab_size"])
        except BaseException:
            self.close()
            raise

    def logits(self, token_ids: Sequence[int]) -> Logits:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # then no reply comes, which says more
            self._process.stdin.write(
                json.dumps({"tokens": list(token_ids), "out": str(self._exchange)}) + "\n"
            )
            self._process.stdin.flush()
        rows = self._reply()["rows"]
        return np.fromfile(self._exchange, np.float32).reshape(rows, self.vocab_size)

    def close(self) -> None:
        self._process.kill()  # it holds nothing that must be saved
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            reply: dict[str, Any] = json.loads(line)
            return reply
        raise PageletError(f"its process ended with status {self._process.wait()}: {_last_line(self._log)}")


def check_peers(names: str | None, python: Path | None) -> None:
    """Refuse what --peers and --peer-python cannot mean.

    Raises:
        InputError: an unknown peer, or no Python to run it in.
    """
    if names not in (None, "llama_cpp"):
        raise InputError(f"--peers is {names}; this version knows llama_cpp.")
    if names and python is None:
        raise InputError("--peers needs --peer-python: the interpreter with llama-cpp-python.")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
