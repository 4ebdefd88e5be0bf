"""What a check found: one row each, as JSON and as a line of a table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
Figure = float | int | str | bool | None


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        name: the part, and what of it, "kernels/int8 trees/tree".
        detail: what was found, or why it failed or was skipped, in one line.
        figures: by name; the unit is part of the name.
    """

    name: str
    status: Status
    detail: str
    seconds: float = 0.0
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def part(self) -> str:
        return self.name.split("/")[0]

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN and no infinity: such figures are texts."""
        content = asdict(self)
        content["figures"] = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.figures.items()
        }
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        return cls(**content)


def is_good(rows: Sequence[Row]) -> bool:
    """Nothing failed, and something was checked: the device alone is no check."""
    checked = [row for row in rows if row.part != "device" and row.status == "ok"]
    return bool(checked) and all(row.status != "failed" for row in rows)


def table(rows: Sequence[Row]) -> str:
    """A line per row, what failed at the end once more in the count."""
    width = max((len(row.name) for row in rows), default=0)
    lines = [
        f"{_MARKS[row.status]:7} {row.name:<{width}} {row.seconds:6.1f} s  {row.detail}".rstrip()
        for row in rows
    ]
    counts = Counter(row.status for row in rows)
    failed = ", ".join(row.name for row in rows if row.status == "failed")
    total = ", ".join(f"{counts[status]} {status}" for status in _MARKS)
    return "\n".join([*lines, f"{total}{': ' + failed if failed else ''}"])


_MARKS: dict[Status, str] = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


def document(rows: Sequence[Row]) -> str:
    """All rows as one JSON document."""
    return json.dumps({"ok": is_good(rows), "checks": [row.to_json() for row in rows]}, indent=1) + "\n"
