"""MXFP4 as GPT-OSS stores its experts: `X_blocks` and `X_scales`, of three axes.

A byte of `X_blocks` [experts, out, groups, 16] has two E2M1 numbers, the lower half first; 32 inputs share
the scale 2^(s − 127) of `X_scales` [experts, out, groups]. The parameter X itself is [experts, in, out]:
its inputs come first (OCP Microscaling Formats 1.0; the transposition is transformers').
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.packed.base import PackedExperts, Parts, stands_for
from pagelet.exporter.checkpoint.packed.settings import choose, known_keys
from pagelet.exporter.checkpoint.tensor_info import TensorInfo

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NAN = 255  # of E8M0


class Mxfp4:
    """The scheme; `settings` is the quantization_config."""

    leftovers: tuple[str, ...] = ()
    fp8_block: object = None
    has_fp8 = False
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known_keys(settings, ("modules_to_not_convert", "dequantize"))
        if settings.get("dequantize"):  # then the files hold plain weights
            choose(settings, "dequantize", (False,))

    def weights(self, parts: Parts) -> Iterator["Mxfp4Experts"]:
        for name in parts.modules("_blocks"):
            blocks = parts.take(name + "_blocks", ("U8",), (None, None, None, 16))
            scales = parts.take(name + "_scales", ("U8",), blocks.shape[:3])
            yield Mxfp4Experts(name, blocks, scales, parts)


class Mxfp4Experts(PackedExperts):
    """The scheme's weight."""

    def __init__(self, name: str, blocks: TensorInfo, scales: TensorInfo, parts: Parts) -> None:
        experts, outputs, groups, _ = blocks.shape
        self.info = stands_for(name, (experts, 32 * groups, outputs), "MXFP4", [blocks, scales])
        self._blocks, self._scales, self._parts = blocks, scales, parts

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Experts [start:stop], float32 [experts, in, out]."""
        blocks = self._parts.rows(self._blocks, start, stop)
        values = _values(blocks, self._parts.rows(self._scales, start, stop))
        return np.ascontiguousarray(values.swapaxes(1, 2))

    def read_expert(self, expert: int, start: int, stop: int) -> NDArray[np.float32]:
        outputs = self._blocks.shape[1]
        first = expert * outputs
        flat = (
            stands_for(info.name, (info.shape[0] * outputs, *info.shape[2:]), info.dtype, [info])
            for info in (self._blocks, self._scales)
        )
        blocks, scales = (self._parts.rows(info, first + start, first + stop) for info in flat)
        return _values(blocks, scales)


def _values(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """uint8 [..., groups, 16] and [..., groups] to float32 [..., 32 · groups]; a scale may be NaN."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):  # infinity is for the quantizer to report
        factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        factors[scales == _NAN] = np.nan
        values: NDArray[np.float32] = _E2M1[codes] * factors[..., None]
    return values.reshape(*scales.shape[:-1], -1)
