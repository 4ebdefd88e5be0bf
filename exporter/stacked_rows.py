"""The rows of several weights as if they were one matrix: read, rounded and packed a few tiles at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import Blocks, Checkpoint
from pagelet.exporter.options import FP8_BLOCK
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.models.errors import CheckpointError, PageletError
from pagelet.plugins import float_packing, packing
from pagelet.plugins.float_packing import FloatFormat, FloatParts
from pagelet.plugins.packing import TILE_COLUMNS, LinearFormat, Quantized

T = TypeVar("T", bound=np.generic)
Float32 = NDArray[np.float32]
WeightFormat = LinearFormat | FloatFormat
Round = Callable[[Float32], Quantized]

# Floats of one piece; bounds the exporter's memory whatever the tensor's size.
PIECE = 4 << 20
# Roles that one linear layer of the model stacks; more are experts.
_MOST_FUSED = 3
# The checkpoint's numbers that a plain float holds unchanged.
_EXACT = {"f32": {"F32", "F16", "BF16"}, "f16": {"F16"}, "bf16": {"BF16"}}


@dataclass(frozen=True)
class Treatment:
    """What becomes of a matrix on its way into the file.

    Attributes:
        round: rows float32 [rows, in] to codes, scales and minimums; None: as the checkpoint has them where
            the format holds that, else to the nearest.
        input_scales: float32 [in] or None; the columns are multiplied by them, because what computes the
            inputs was divided by them.
        output_scales: by role, float32 [out]; its rows (and its bias) are divided by them.
        fp8_blocks: FP8_BLOCK rows of a weight share the scale of a group.
    """

    round: Round | None = None
    input_scales: Float32 | None = None
    output_scales: Mapping[str, Float32] = field(default_factory=dict)
    fp8_blocks: bool = False

    @property
    def scales(self) -> bool:
        return self.input_scales is not None or bool(self.output_scales)


PLAIN = Treatment()


def nearest(format: WeightFormat, *, fp8_blocks: bool = False) -> Treatment:
    """To the nearest; in four bits the clip is searched, with eight that would gain nothing."""
    if fp8_blocks and isinstance(format, FloatFormat) and format.type == "fp8":
        return Treatment(fp8_blocks=True)
    if not isinstance(format, LinearFormat) or format.bits == 8:
        return PLAIN
    return Treatment(round=lambda rows: round_to_nearest(rows, format))


class StackedRows:
    """Weights that follow one another, or, `interleaved`, pairs of the same shape that alternate by tiles.

    Attributes:
        width: inputs.
        count: rows in all.
        kept: whether every weight has codes of its own that `format` holds, and nothing scales them.
        exact: whether their scales and minimums too are held unchanged.

    Raises:
        CheckpointError: the weights do not fit the format; by their names.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        roles: Sequence[str],
        format: WeightFormat,
        *,
        interleaved: bool,
        treatment: Treatment = PLAIN,
    ) -> None:
        self._checkpoint = checkpoint
        self._treatment = treatment
        self._roles = roles
        self._format = format
        self._interleaved = interleaved
        sizes = [checkpoint.weights[role].shape for role in roles]
        self.width = sizes[0][1]
        self._starts = np.cumsum([0, *(rows for rows, _ in sizes)]).tolist()
        self.count: int = self._starts[-1]
        self._check_shape()
        self._squared_error = self._squared = 0.0
        self._fp8_scales: dict[str, Float32] = {}
        self.kept = self.exact = False
        if not treatment.scales:
            self._compare()

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The packed bytes of all rows, in order."""
        unit = 2 * TILE_COLUMNS if self._interleaved else TILE_COLUMNS
        step = max(PIECE // self.width // unit, 1) * unit
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            with named(self._names()):
                packed = self._packed(start, stop)
            yield packed

    def _packed(self, start: int, stop: int) -> NDArray[np.uint8]:
        format = self._format
        if isinstance(format, FloatFormat):
            if self.exact and format.type == "fp8":
                own = self._own_fp8(start, stop, format.groups(self.width))
                return float_packing.pack(*own, format)
            values = self.floats(start, stop)
            if self._treatment.fp8_blocks:
                floats: FloatParts = float_packing.quantize_fp8(
                    values, format, self._block_scales(start, stop)
                )
            else:
                floats = float_packing.quantize(values, format)
            self._count_error(values, float_packing.dequantize(*floats, format))
            return float_packing.pack(*floats, format)
        if self.exact:
            return packing.pack(*self._own_codes(start, stop, format), format)
        values = self.floats(start, stop)
        if self.kept:
            codes = self._own_codes(start, stop, format)
        else:
            codes = (self._treatment.round or partial(packing.quantize_rtn, format=format))(values)
        self._count_error(values, packing.dequantize(*codes, format))
        return packing.pack(*codes, format)

    def _block_scales(self, start: int, stop: int) -> Float32:
        """Of FP8 rows [start:stop], float32 [rows, groups]: one for each FP8_BLOCK rows of a weight."""
        return self._stack(
            [self._weight_scales(role)[low:high] for role, low, high in self._parts(start, stop)]
        )

    def _weight_scales(self, role: str) -> Float32:
        if role not in self._fp8_scales:
            rows, groups = self._checkpoint.weights[role].shape[0], self._format.groups(self.width)
            scales = np.empty((rows, groups), np.float32)
            for low in range(0, rows, FP8_BLOCK):
                strip = read_finite(self._checkpoint, role, low, min(low + FP8_BLOCK, rows))
                scales[low : low + FP8_BLOCK] = np.abs(strip).reshape(len(strip), groups, -1).max(axis=(0, 2))
            self._fp8_scales[role] = scales / np.float32(float_packing.LARGEST_FP8)
        return self._fp8_scales[role]

    @property
    def error(self) -> float:
        """Root mean square of what rounding changed, over that of the weight; of the pieces so far."""
        return math.sqrt(self._squared_error / self._squared) if self._squared else 0.0

    def _count_error(self, values: Float32, restored: Float32) -> None:
        # In float64: the square of a large weight is beyond float32.
        self._squared_error += float(np.square(values - restored, dtype=np.float64).sum())
        self._squared += float(np.square(values, dtype=np.float64).sum())

    def _check_shape(self) -> None:
        each = self._starts[1]
        if (self._interleaved or len(self._roles) > _MOST_FUSED) and each % TILE_COLUMNS:
            raise CheckpointError(
                f"{self._names()}: {each} outputs; this version needs a multiple of {TILE_COLUMNS}."
            )
        group = self._format.group_size
        if group and self.width % group:
            raise CheckpointError(
                f"{self._names()}: {self.width} inputs do not divide into groups of {group}; choose a "
                "smaller --group-size where there is one, leave it out (fp8), or take weights without scales "
                "(fp16, bf16, fp32)."
            )

    def _compare(self) -> None:
        """Set `kept` and `exact`."""
        if isinstance(self._format, FloatFormat):
            self.kept = self.exact = self._has_floats(self._format)
            return
        blocks = [self._checkpoint.read_blocks(role, 0, 1) for role in self._roles]
        self.kept = all(block is not None and fits(block, self._format) for block in blocks)
        self.exact = self.kept and all(block is not None and block.exact for block in blocks)

    def _has_floats(self, format: FloatFormat) -> bool:
        if format.type == "fp8":
            own = [self._checkpoint.read_fp8(role, 0, 1) for role in self._roles]
            return all(rows and rows.group_size in (0, format.group_size) for rows in own)
        held = _EXACT[format.type]
        return all(self._checkpoint.weights[role].dtype in held for role in self._roles)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """(role, first row, last row) of each weight that rows [start, stop) touch."""
        together = 2 if self._interleaved else 1
        for index in range(0, len(self._roles), together):
            first, last = self._starts[index], self._starts[index + together]
            if start < last and stop > first:
                low, high = max(start, first) - first, min(stop, last) - first
                yield from (
                    (role, low // together, high // together)
                    for role in self._roles[index : index + together]
                )

    def floats(self, start: int, stop: int) -> Float32:
        """Rows [start:stop] as the treatment scales them, not rounded; float32 [rows, width]."""
        rows = self._stack([self._scaled(*part) for part in self._parts(start, stop)])
        return rows if self._treatment.input_scales is None else rows * self._treatment.input_scales

    def _scaled(self, role: str, start: int, stop: int) -> Float32:
        values = read_finite(self._checkpoint, role, start, stop)
        scales = self._treatment.output_scales.get(role.removesuffix(".weight"))
        return values if scales is None else values / scales[start:stop, None]

    def _own_codes(self, start: int, stop: int, format: LinearFormat) -> Quantized:
        """The checkpoint's own codes, scales and minimums."""
        parts, groups = [], format.groups(self.width)
        for role, low, high in self._parts(start, stop):
            block = self._checkpoint.read_blocks(role, low, high)
            assert block is not None
            lowest = _spread(_minimums(block), groups) if format.asymmetric else None
            parts.append((block.codes, _spread(block.scales, groups), lowest))
        codes, scales, minimums = zip(*parts, strict=True)
        return self._stack(codes), self._stack(scales), self._stack(minimums) if format.asymmetric else None

    def _own_fp8(self, start: int, stop: int, groups: int) -> FloatParts:
        """The checkpoint's own FP8 codes, and scales for so many groups."""
        parts = []
        for role, low, high in self._parts(start, stop):
            rows = self._checkpoint.read_fp8(role, low, high)
            assert rows is not None
            parts.append((rows.codes, np.broadcast_to(rows.scales, (high - low, groups))))
        codes, scales = zip(*parts, strict=True)
        return self._stack(codes), self._stack(scales)

    def _stack(self, parts: Sequence[NDArray[T]]) -> NDArray[T]:
        if not self._interleaved:
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        width = parts[0].shape[1]
        pairs = [
            np.stack([part.reshape(-1, TILE_COLUMNS, width) for part in parts[i : i + 2]], axis=1)
            for i in range(0, len(parts), 2)
        ]
        return np.concatenate([pair.reshape(-1, width) for pair in pairs])

    def _names(self) -> str:
        names = dict.fromkeys(self._checkpoint.weights[role].name for role in self._roles)
        return ", ".join([*names][:_MOST_FUSED]) + (", …" if len(names) > _MOST_FUSED else "")


@contextmanager
def named(where: str) -> Iterator[None]:
    """What the mathematics refuse becomes a CheckpointError that names the tensor."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, PageletError):
            raise
        raise CheckpointError(f"{where}: {error}") from error


def sample_rows(count: int, most: int) -> list[tuple[int, int]]:
    """(first, behind the last) of stretches of whole pairs of tiles, evenly over all; about `most` rows."""
    unit = 2 * TILE_COLUMNS
    starts = range(0, count, unit)
    chosen = starts[:: max(count // max(most, unit), 1)]
    return [(start, min(start + unit, count)) for start in chosen]


def fits(block: Blocks, format: LinearFormat) -> bool:
    """Whether the format holds such blocks: a group may stand as several with the same scale."""
    if block.bits != format.bits or block.group_size % format.group_size:
        return False
    return format.asymmetric or block.minimums is None


def _spread(values: NDArray[np.float16], groups: int) -> NDArray[np.float16]:
    """The scales or minimums [rows, the file's groups] of so many smaller groups."""
    return np.repeat(values, groups // values.shape[1], axis=1)


def _minimums(block: Blocks) -> NDArray[np.float16]:
    """Q4_0's d·(q−8) is d·q + (−8·d), exactly: eight is a power of two."""
    if block.minimums is not None:
        return block.minimums
    minimums: NDArray[np.float16] = block.scales * np.float16(-8)
    return minimums


def read_finite(
    checkpoint: Checkpoint, role: str, start: int = 0, stop: int | None = None
) -> NDArray[np.float32]:
    """Rows [start:stop] of a weight as float32.

    Raises:
        CheckpointError: they hold NaN or infinity.
    """
    values = checkpoint.read(role, start, stop)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{checkpoint.weights[role].name} holds NaN or infinity: the file is damaged; download it again."
        )
    return values
