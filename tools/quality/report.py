"""The table, as Markdown and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pagelet.tools.quality.measure import Row

_ABSENT = "–"


def recovered(row: Row, rows: Sequence[Row]) -> float | None:
    """1 − KL ÷ KL of plain rounding to the same format; None where that row, or its loss, is missing."""
    baseline = next((one for one in rows if one.name == row.baseline), None)
    if baseline is None or not baseline.result.mean_kl or row.result.mean_kl is None:
        return None
    return 1 - row.result.mean_kl / baseline.result.mean_kl


def markdown(rows: Sequence[Row], left_out: Sequence[str] = ()) -> str:
    """A line for each row; a column that no row has anything for is left out."""
    columns = _columns(rows)
    table = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    shown = {title: cells for title, cells in table.items() if set(cells) != {_ABSENT}}
    lines = [f"| {' | '.join(shown)} |", f"|---|{'---:|' * (len(shown) - 1)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*shown.values(), strict=True)]
    return "\n".join([*lines, "", *_notes(rows), *(f"Left out: {reason}." for reason in left_out)])


def _columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    return {
        "": lambda row: row.name,
        "bits per weight": lambda row: f"{row.storage.bits_per_weight:.2f}",
        "without embedding and head": lambda row: f"{row.storage.layer_bits_per_weight:.2f}",
        "MB": lambda row: f"{row.storage.bytes / 1e6:.1f}",
        "perplexity": lambda row: f"{row.result.perplexity:.3f}",
        "mean KL": lambda row: _format(row.result.mean_kl, "{:.3g}"),
        "p99 KL": lambda row: _format(row.result.p99_kl, "{:.3g}"),
        "top-1": lambda row: _format(row.result.top1_agreement, "{:.2%}"),
        "of RTN's KL recovered": lambda row: _format(recovered(row, rows), "{:.0%}"),
        "export, s": lambda row: f"{row.cost.seconds:.1f}" if row.cost else _ABSENT,
        "export's peak, MB": _peak,
    }


def _peak(row: Row) -> str:
    peak = row.cost.peak_rss_bytes if row.cost else None
    return _format(peak and peak / 1e6, "{:.0f}")


def _format(value: float | None, form: str) -> str:
    return _ABSENT if value is None else form.format(value)


def _notes(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    result = rows[0].result
    notes = [f"{result.tokens} tokens scored"]
    if result.reference_perplexity is not None:
        notes[0] += f"; KL in nats, from the reference, whose perplexity is {result.reference_perplexity:.3f}"
    if exact := [row.name for row in rows if row.storage.exact]:
        notes.append(f"the checkpoint's own numbers, nothing was rounded: {', '.join(exact)}")
    return [f"{note[0].upper()}{note[1:]}." for note in notes]


def document(rows: Sequence[Row], left_out: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Everything that the table has, unrounded."""
    entries = [{**asdict(row), "recovered": recovered(row, rows)} for row in rows]
    return {"settings": settings, "rows": entries, "left_out": list(left_out)}
