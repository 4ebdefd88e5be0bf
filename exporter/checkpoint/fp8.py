"""Checkpoints whose linear weights are FP8 (E4M3) already, with their scales in tensors beside them.

`X.weight_scale` or `X.weight_scale_inv` (both are multiplied) belongs to `X.weight` and has one value, one
for each row, or, as config.json says, one for each block of rows and columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.base import Fp8Rows
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError

FP8_DTYPE = "F8_E4M3"
# What may stand beside weights, with the scales of activations: those are computed here from the row itself.
FP8_COMPANIONS = (".weight_scale", ".weight_scale_inv", ".input_scale", ".input_scale_ub")
_SCALE_SUFFIXES = ("_scale", "_scale_inv")
_LARGEST_SCALE = float(np.finfo(np.float32).max) / 448  # times E4M3's largest code


@dataclass(frozen=True)
class Fp8Scales:
    """All scales of a weight: float32 [row blocks, column blocks], with the rows and columns of a block."""

    values: NDArray[np.float32]
    block_rows: int
    block_columns: int  # 0: all

    def rows(self, codes: NDArray[np.uint8], start: int) -> Fp8Rows:
        """With codes of the rows from `start` on."""
        blocks = np.arange(start, start + len(codes)) // self.block_rows
        return Fp8Rows(codes, self.values[blocks], self.block_columns)


def read_scales(
    info: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    block_size: object,
    read: Callable[[TensorInfo], NDArray[np.float32]],
) -> Fp8Scales:
    """The scales of an FP8 weight [out, in]; `read` gives a tensor as float32.

    `block_size`: [rows, columns] as config.json has it; None: 128 of both.

    Raises:
        CheckpointError: none, of a shape that does not fit the weight, not finite, or too large.
    """
    names = [info.name + suffix for suffix in _SCALE_SUFFIXES if info.name + suffix in tensors]
    if len(names) != 1 or len(info.shape) != 2:
        raise CheckpointError(
            f"{info.name} is {info.dtype} {list(info.shape)} with {len(names)} scale tensors; "
            f"expected [out, in] and one of {', '.join(info.name + suffix for suffix in _SCALE_SUFFIXES)}."
        )
    scales = tensors[names[0]]
    if scales.dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{scales.name} has dtype {scales.dtype}; expected F32, F16 or BF16.")
    if 0 in scales.shape:
        raise CheckpointError(f"{scales.name} has shape {list(scales.shape)}: it holds no scales.")
    values = read(scales)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{names[0]} holds NaN or infinity: the file is damaged; download it again.")
    largest = float(np.abs(values).max())
    if largest > _LARGEST_SCALE:
        raise CheckpointError(
            f"{names[0]} holds the scale {largest:g}, which makes weights beyond float32: the file is "
            "damaged."
        )
    rows, columns = info.shape
    if values.size == 1:
        return Fp8Scales(values.reshape(1, 1), rows, 0)
    if values.shape in ((rows,), (rows, 1)):
        return Fp8Scales(values.reshape(rows, 1), 1, 0)
    block_rows, block_columns = _block_size(block_size)
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    if values.shape != expected:
        raise CheckpointError(
            f"{names[0]} has shape {list(values.shape)}; expected one value, [{rows}, 1] or {list(expected)}."
        )
    return Fp8Scales(values, block_rows, block_columns)


def _block_size(found: object) -> tuple[int, int]:
    size = found or [128, 128]
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 1 <= n <= 1 << 24 for n in size):
        return size[0], size[1]
    raise CheckpointError(
        f"config.json: weight_block_size is {size!r:.80}; expected two positive integers, rows and columns."
    )
