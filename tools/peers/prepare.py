"""The peers' model files, made once from what is there by `workers/convert.py` in the peers' Python."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pagelet.models.errors import InputError, PageletError
from pagelet.tools.peers.entrants import PEERS, Entrant, Peer

CONVERT = Path(__file__).with_name("workers") / "convert.py"


@dataclass(frozen=True)
class Sources:
    """Where the peers' models come from, and where they go.

    Attributes:
        checkpoint: a Hugging Face folder; None: one is made of the GGUF.
        python: the interpreter that has the peers; `convert_python`, the one that makes OpenVINO's model.
    """

    gguf: Path | None
    checkpoint: Path | None
    work: Path
    python: Path
    convert_python: Path


@dataclass
class Prepared:
    """Entrants that can be opened, and a line for each peer that cannot."""

    entrants: list[Entrant] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def prepare(sources: Sources, engines: Iterable[str], on_step: Callable[[str], None]) -> Prepared:
    """Make the models that are not there yet, for those of `engines` that are installed."""
    prepared, wanted = Prepared(), set(engines)
    versions = installed(sources.python)
    for peer in PEERS:
        if peer.engine not in wanted:
            continue
        if peer.package not in versions:
            prepared.left_out.append(f"{peer.name}: {peer.package} is not installed in {sources.python}")
            continue
        try:
            model = _model(sources, peer, on_step)
        except PageletError as error:
            prepared.left_out.append(f"{peer.name}: {error}")
            continue
        version = f"{peer.package} {versions[peer.package]}"
        prepared.entrants.append(Entrant(peer.name, peer.engine, model, sources.python, version, peer.many))
    return prepared


def installed(python: Path) -> dict[str, str]:
    """Versions of the peers' packages in that interpreter.

    Raises:
        InputError: it cannot be run.
    """
    try:
        done = subprocess.run([python, CONVERT, "versions"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(
            f"--python {python} cannot be run ({error}); expected a Python 3.10 or newer."
        ) from error
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _model(sources: Sources, peer: Peer, on_step: Callable[[str], None]) -> Path:
    source = sources.gguf if peer.source == "gguf" else _checkpoint(sources, on_step)
    if source is None:
        raise InputError("needs --gguf")
    if peer.step is None:
        return source
    return convert(sources, peer.step, source, on_step) / peer.file


def _checkpoint(sources: Sources, on_step: Callable[[str], None]) -> Path | None:
    if sources.checkpoint or sources.gguf is None:
        return sources.checkpoint
    return convert(sources, "huggingface", sources.gguf, on_step)


def convert(sources: Sources, step: str, source: Path, on_step: Callable[[str], None]) -> Path:
    """The folder `step` makes of `source` in the work folder; one that is there already is kept.

    Raises:
        PageletError: the step failed; its output is in the log that the message names.
    """
    folder = sources.work / f"{source.stem}.{step}"
    if folder.exists():
        return folder
    on_step(f"making {folder}")
    half, log = folder.with_suffix(f".{step}-part"), sources.work / f"{step}.log"
    shutil.rmtree(half, ignore_errors=True)
    python = sources.convert_python if step == "openvino" else sources.python
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run([python, CONVERT, step, source, half], stdout=output, stderr=output)
    if done.returncode:
        raise PageletError(f"its model could not be made from {source}; see {log}")
    half.rename(folder)  # only a whole one has the name
    return folder
