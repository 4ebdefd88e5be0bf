"""The table, as Markdown, as JSON and as a picture."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagelet.tools.peers.figures import Figure, Value, evaluate
from pagelet.tools.peers.measure import Record


def markdown(figures: Sequence[Figure], records: Sequence[Record], left_out: Sequence[str]) -> str:
    """A row per entrant: median [least–most], and the first entrant's median ÷ this one in bold."""
    columns = [evaluate(figure, records) for figure in figures]
    lines = [
        "| | " + " | ".join(figure.title for figure in figures) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for index, record in enumerate(records):
        cells = [cell(column[index]) for column in columns]
        lines.append(f"| {record.entrant.name} | " + " | ".join(cells) + " |")
    notes = [f"{record.entrant.name}: {record.failure}" for record in records if record.failure]
    bold = (
        f"Median [range] of the runs; bold: {records[0].entrant.name} ÷ this row: over 1 is better in tok/s, "
        "under 1 in s and MB."
    )
    return "\n".join([*lines, "", bold, *(f"Left out: {note}." for note in (*left_out, *notes))])


def cell(value: Value | None) -> str:
    if value is None:
        return "–"
    text = number(value.median)
    if value.least != value.most:
        text += f" [{number(value.least)}–{number(value.most)}]"
    return text if value.ratio is None else f"{text} **{value.ratio:.2f}×**"


def number(value: float) -> str:
    """Three digits that count: 1234, 123, 12.3, 1.23, 0.123."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def document(
    figures: Sequence[Figure], records: Sequence[Record], left_out: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything: the machine, the settings, each run, and the figures made of them."""
    columns = {figure.key: evaluate(figure, records) for figure in figures}
    entrants = []
    for index, record in enumerate(records):
        entrant = record.entrant
        values = {key: column[index] for key, column in columns.items()}
        entrants.append(
            {
                "name": entrant.name,
                "engine": entrant.engine,
                "version": entrant.version,
                "model": entrant.model.name,
                "failure": record.failure,
                "load_s": record.load_s,
                "peak_rss_bytes": record.peak_rss_bytes,
                "figures": {key: asdict(value) for key, value in values.items() if value},
                "runs": {key: [asdict(run) for run in runs] for key, runs in record.runs.items()},
            }
        )
    titles = {figure.key: figure.title for figure in figures}
    return {
        "machine": machine(),
        "settings": settings,
        "titles": titles,
        "entrants": entrants,
        "left_out": list(left_out),
    }


def machine() -> dict[str, str]:
    """The processor and the system, as far as they tell."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return {"processor": name, "system": platform.platform(), "python": platform.python_version()}


def plot(figures: Sequence[Figure], records: Sequence[Record], path: Path) -> None:
    """Bars of each figure that the peers have too, with the range of the runs. Needs matplotlib."""
    import matplotlib.pyplot as plt

    shown = [figure for figure in figures if _has_peers(figure, records)]
    columns = 4
    rows = -(-len(shown) // columns)
    size = (3.6 * columns, 0.32 * rows * (len(records) + 3))
    canvas, axes = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, figure in zip(axes.flat, shown, strict=False):
        _bars(axis, figure, records)
    axes.flat[0].invert_yaxis()  # which all share: the first row on top
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _has_peers(figure: Figure, records: Sequence[Record]) -> bool:
    values = zip(records, evaluate(figure, records), strict=True)
    return any(value and not record.entrant.is_ours for record, value in values)


def _bars(axis: Any, figure: Figure, records: Sequence[Record]) -> None:
    absent = Value(0, 0, 0, None)
    values = [value or absent for value in evaluate(figure, records)]
    names = [record.entrant.name for record in records]
    medians = [value.median for value in values]
    ranges = [
        [value.median - value.least for value in values],
        [value.most - value.median for value in values],
    ]
    colors = ["#4c72b0" if record.entrant.is_ours else "#b0b0b0" for record in records]
    axis.barh(names, medians, xerr=ranges, color=colors, error_kw={"linewidth": 1})
    direction = "more is better" if figure.higher_is_better else "less is better"
    axis.set_title(f"{figure.title}\n({direction})", fontsize=10)
    axis.grid(alpha=0.3, axis="x")
