"""w = scale · (code − zero) in groups of inputs: what AWQ, GPTQ and compressed-tensors come down to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.base import Blocks
from pagelet.exporter.checkpoint.packed.base import PackedWeight
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError

# Scales that are looked at together.
_PIECE = 1 << 20
_LARGEST = 65504  # in FP16


@dataclass(frozen=True)
class _Survey:
    """Of a weight's scales and zero points: all zeros are the middle code; FP16 holds them; unchanged."""

    centred: bool
    finite: bool
    exact: bool


@dataclass(frozen=True)
class AffineWeight(PackedWeight):
    """A weight [out, in]; its parts are read by rows [start:stop].

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; 0: all of them.
        codes: uint8 [rows, in].
        scales: float32 [rows, groups].
        zeros: integers [rows, groups], or [1, 1] for all.
        index: the group of each input, [in], where they are not consecutive.
    """

    info: TensorInfo
    bits: int
    group_size: int
    codes: Callable[[int, int], NDArray[np.uint8]]
    scales: Callable[[int, int], NDArray[np.float32]]
    zeros: Callable[[int, int], NDArray[Any]]
    index: NDArray[np.intp] | None = None

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self.codes(start, stop).astype(np.float32)
        scales, zeros = self._scales_and_zeros(start, stop)
        with np.errstate(over="ignore", invalid="ignore"):  # infinity is for the quantizer to report
            if self.index is not None:
                return (values - zeros[:, self.index]) * scales[:, self.index]
            by_group = values.reshape(*scales.shape, -1)
            by_group -= zeros[..., None]
            by_group *= scales[..., None]
        return by_group.reshape(values.shape)

    def _scales_and_zeros(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        scales = self.scales(start, stop)
        return scales, np.broadcast_to(self.zeros(start, stop).astype(np.float32), scales.shape)

    @cached_property
    def obstacle(self) -> str:
        if self.index is not None:
            return "its groups are scattered (act-order)"
        if self.group_size % 32:
            return f"its groups are of {self.group_size} inputs, no multiple of 32"
        if self.bits == 8 and not self._survey.centred:
            return "its 8-bit codes have a zero point"
        return "" if self._survey.finite else "its scales are beyond FP16"

    def blocks(self, start: int, stop: int) -> Blocks | None:
        if self.obstacle:
            return None
        codes, survey = self.codes(start, stop), self._survey
        scales, zeros = self._scales_and_zeros(start, stop)
        half = scales.astype(np.float16)
        if self.bits == 8:
            signed = (codes ^ np.uint8(0x80)).view(np.int8)
            return Blocks("Q8_0", signed, half, None, self.group_size, survey.exact)
        if survey.centred:
            return Blocks("Q4_0", codes, half, None, self.group_size, survey.exact)
        minimums = (-scales * zeros).astype(np.float16)
        return Blocks("Q4_1", codes, half, minimums, self.group_size, survey.exact)

    @cached_property
    def _survey(self) -> _Survey:
        centred = finite = exact = True
        rows = self.info.shape[0]
        step = max(_PIECE // self.scales(0, 1).size, 1)
        for start in range(0, rows, step):
            scales, zeros = self._scales_and_zeros(start, min(start + step, rows))
            centred = centred and bool((zeros == 1 << (self.bits - 1)).all())
            with np.errstate(over="ignore", invalid="ignore"):
                held = scales if self.bits == 8 or centred else np.stack([scales, -scales * zeros])
                half = held.astype(np.float16)
            exact = exact and bool((half == held).all())
            # The minimum of a centred group is −8 · scale.
            finite = finite and bool((np.abs(half) < (_LARGEST / 8 if centred else _LARGEST)).all())
        return _Survey(centred, finite, exact)


def constant(zero: int) -> Callable[[int, int], NDArray[Any]]:
    """The zero point of all groups."""
    return lambda start, stop: np.full((1, 1), zero)


def group_count(name: str, inputs: int, group_size: int) -> int:
    """Groups of so many inputs; `group_size` 0: one.

    Raises:
        CheckpointError: they do not divide.
    """
    if group_size and inputs % group_size:
        raise CheckpointError(f"{name}: {inputs} inputs do not divide into its groups of {group_size}.")
    return inputs // group_size if group_size else 1


def scattered(name: str, index: NDArray[np.generic], groups: int, group_size: int) -> NDArray[np.intp] | None:
    """The group of each input; None where they are consecutive.

    Raises:
        CheckpointError: it names a group that does not exist.
    """
    if index.min() < 0 or index.max() >= groups:
        raise CheckpointError(
            f"{name} holds {int(index.min())} to {int(index.max())}; expected groups from 0 to {groups - 1}."
        )
    if (index == np.arange(index.size) // (group_size or index.size)).all():
        return None
    return index.astype(np.intp)
