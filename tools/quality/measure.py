"""Make and score one entrant after another; what was done is kept and not done again."""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pagelet.tools.evaluate import EvalResult, OnPiece, Scorer, evaluate
from pagelet.tools.quality.entrants import Entrant
from pagelet.tools.quality.export_process import ExportCost
from pagelet.tools.quality.storage import Storage


@dataclass(frozen=True)
class Row:
    """What was found out about one entrant; `cost` is None where it was there already."""

    name: str
    storage: Storage
    result: EvalResult
    cost: ExportCost | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Record:
    """What is kept beside an entrant's file, and from what it came: if that changes, it is done again."""

    made_from: dict[str, Any]
    cost: ExportCost
    scored_on: str = ""
    result: EvalResult | None = None


class Workshop:
    """A folder of entrants' files, each with its record."""

    def __init__(self, folder: Path, on_step: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_step = on_step

    def make(self, entrant: Entrant) -> tuple[Path, Record]:
        """The entrant's file or folder, made now unless it is there."""
        path, made_from = self._folder / entrant.file, entrant.made_from
        record = self._read(entrant)
        if record and record.made_from == made_from and path.exists():
            return path, record
        self._on_step(f"{entrant.name}: exporting")
        with tempfile.TemporaryDirectory(prefix=".making-", dir=self._folder) as half:
            cost = entrant.make(Path(half) / entrant.file)
            self.remove(entrant)
            (Path(half) / entrant.file).rename(path)
        return path, self._write(entrant, Record(made_from, cost))

    def score(
        self, entrant: Entrant, pieces: Sequence[Sequence[int]], reference: Scorer, on_piece: OnPiece
    ) -> Row:
        """Make and evaluate the entrant, as far as that was not done before."""
        path, record = self.make(entrant)
        scored_on = hashlib.sha256(json.dumps(pieces).encode()).hexdigest()
        if record.result is None or record.scored_on != scored_on:
            self._on_step(f"{entrant.name}: scoring")
            with entrant.open(path) as scorer:
                result = evaluate(scorer, pieces, reference, on_piece)
            record = self._write(entrant, replace(record, scored_on=scored_on, result=result))
        assert record.result
        return Row(entrant.name, entrant.storage(path), record.result, record.cost, entrant.baseline)

    def remove(self, entrant: Entrant) -> None:
        """Of what is not there nothing has to be removed."""
        path = self._folder / entrant.file
        self._record(entrant).unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _record(self, entrant: Entrant) -> Path:
        return self._folder / f"{entrant.file}.json"

    def _read(self, entrant: Entrant) -> Record | None:
        """None where there is none that this version can read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(self._record(entrant).read_text(encoding="utf-8"))
            result = kept["result"] and EvalResult(**kept["result"])
            return Record(kept["made_from"], ExportCost(**kept["cost"]), kept["scored_on"], result)
        return None

    def _write(self, entrant: Entrant, record: Record) -> Record:
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False)
        self._record(entrant).write_text(text + "\n", encoding="utf-8")
        return record
