"""Two pictures: quality against size, and where in the model it was lost. They need matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagelet.models.errors import InputError
from pagelet.tools.quality.measure import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")
_BARS = "#4c72b0"
_LABEL_INCHES = 0.19  # of height for one label


def check_plot(path: Path) -> None:
    """What a picture needs, before the long work that it shows.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'pagelet[plot]'.")
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"--plot is {path}; expected a name that ends in {', '.join(_FORMATS)}.")
    if not path.parent.is_dir():
        raise InputError(f"--plot: the folder {path.parent} does not exist; make it first.")


def plot_sizes(rows: Sequence[Row], path: Path) -> None:
    """Bits per weight and mean KL divergence of each row, both on logarithmic axes.

    The names stand in a column at the right, in the order of their points from top to bottom; squares are
    other engines'.
    """
    rows = sorted(rows, key=_kl, reverse=True)
    figure, axis = _canvas(9.0, max(4.5, 1.2 + _LABEL_INCHES * len(rows)))
    figure.subplots_adjust(left=0.09, right=0.7, top=0.92, bottom=0.6 / figure.get_figheight())
    heights = [max(_kl(row), _floor(rows)) for row in rows]
    for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
        marker = "s" if row.name.startswith("llama.cpp") else "o"
        axis.plot(row.storage.bits_per_weight, height, marker, color=f"C{index % 10}", markersize=5)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _bits_ticks(axis, [row.storage.bits_per_weight for row in rows])
    _distance_ticks(axis, heights)
    axis.set_xlabel("bits per weight, embedding and head included")
    axis.set_ylabel("mean KL divergence from the reference, nats")
    axis.set_title("Quality against size (lower left is better)", fontsize=11)
    _label(axis, rows, heights)
    figure.savefig(path, dpi=130)


def _kl(row: Row) -> float:
    return row.result.mean_kl or 0.0


def _floor(rows: Sequence[Row]) -> float:
    """Where a logarithmic axis shows a distance of zero: below all others."""
    return min((_kl(row) for row in rows if _kl(row) > 0), default=1e-6) / 3


def _bits_ticks(axis: Any, bits: Sequence[float]) -> None:
    low, high = 0.9 * min(bits), 1.1 * max(bits)
    ticks = [tick for tick in (3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9, 12, 16, 24, 32) if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(low, high)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _distance_ticks(axis: Any, heights: Sequence[float]) -> None:
    """1, 2 and 5 of each decade, of at least one decade."""
    low, high = min(heights), max(heights)
    wide = max(1.3, (10 * low / high) ** 0.5)
    low, high = low / wide, high * wide
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [first * 10.0**decade for decade in decades for first in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_yticks(shown, [f"{tick:.6f}".rstrip("0") for tick in shown])
    axis.set_ylim(low, high)
    axis.minorticks_off()


def _label(axis: Any, rows: Sequence[Row], heights: Sequence[float]) -> None:
    """Names beside the axes, as near to their points' heights as they fit, each with a thin line."""
    low, high = np.log(axis.get_ylim())
    places = spread([float((np.log(height) - low) / (high - low)) for height in heights], 0.97 / len(rows))
    for index, (row, height, place) in enumerate(zip(rows, heights, places, strict=True)):
        line = {"arrowstyle": "-", "color": f"C{index % 10}", "linewidth": 0.6, "relpos": (0, 0.5)}
        axis.annotate(
            f"{row.name}  {_kl(row):.2g}",
            xy=(row.storage.bits_per_weight, height),
            xytext=(1.05, place),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            arrowprops=line,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in 0 to 1 at least `gap` apart, near the wanted ones, which fall; gap · count is at most 1."""
    places: list[float] = []
    for count, place in enumerate(wanted, start=1):
        room = (len(wanted) - count) * gap  # for those that follow, below
        places.append(max(min([place, *(before - gap for before in places[-1:])]), room))
    return places


def plot_layers(kl: Sequence[float], name: str, path: Path) -> None:
    """Bars of the KL divergence that each layer alone causes."""
    figure, axis = _canvas(max(6.0, 1.5 + 0.22 * len(kl)), 4.0)
    axis.bar(range(len(kl)), kl, color=_BARS)
    axis.set_xlabel("layer")
    axis.set_ylabel("mean KL divergence, nats")
    axis.set_title(f"{name}: only this layer's weights, all others the reference's", fontsize=11)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(x=0.01)
    axis.set_ylim(0, 1.05 * max(kl) or 1e-6)
    axis.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _canvas(width: float, height: float) -> "tuple[Figure, Any]":
    """Without pyplot: no window system, and nothing stays behind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()
