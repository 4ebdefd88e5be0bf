"""bitsandbytes: NF4 or FP4 in blocks, maybe with quantized scales, and LLM.int8().

Four bits: `X.weight` is bytes of two codes of the weight's elements in order, the upper half first;
`.quant_map` has the value of each code and `.absmax` the factor of each block; `.quant_state.…` is JSON
with the shape and the block's size. With double quantization `.absmax` is codes itself: of
`.nested_quant_map`, with factors `.nested_absmax`, and `nested_offset` to be added.
Eight bits: `X.weight` I8 [out, in] · `X.SCB` [out] / 127.
Dettmers et al. 2023 (QLoRA), 2022 (LLM.int8).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.files import parse_json
from pagelet.exporter.checkpoint.packed.affine import AffineWeight, constant
from pagelet.exporter.checkpoint.packed.base import PackedWeight, Parts, as_floats, raised, stands_for
from pagelet.exporter.checkpoint.packed.settings import choose, known_keys
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError
from pagelet.models.strict import decode

_FLAGS = ("load_in_4bit", "load_in_8bit")
_KEYS = (*_FLAGS, "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
# How others compute with the weights, and which stayed plain.
_OF_OTHERS = (
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "llm_int8_threshold"),
    *("llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
)
_MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 20


@dataclass(frozen=True)
class _State:
    """The JSON of `quant_state`."""

    quant_type: str
    blocksize: int
    shape: tuple[int, ...]
    dtype: str
    nested_blocksize: int = 0
    nested_dtype: str = ""
    nested_offset: float = 0.0


class BitsAndBytes:
    """The scheme; `settings` is the quantization_config."""

    leftovers: tuple[str, ...] = ()
    fp8_block: object = None
    has_fp8 = False
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known_keys(settings, (*_KEYS, *_OF_OTHERS))
        for flag in _FLAGS:
            choose(settings, flag, (True, False))
        self._four_bits: bool = settings["load_in_4bit"]
        choose(settings, "load_in_8bit", (not self._four_bits,))
        if self._four_bits:
            self._type: str = choose(settings, "bnb_4bit_quant_type", ("nf4", "fp4"))
            choose(settings, "bnb_4bit_quant_storage", ("uint8",))

    def weights(self, parts: Parts) -> Iterator[PackedWeight]:
        if not self._four_bits:
            for module in parts.modules(".SCB"):
                yield _int8(parts, module)
            return
        for name in parts.modules(f".quant_state.bitsandbytes__{self._type}"):
            yield _FourBits(parts, name, self._type)


def _int8(parts: Parts, module: str) -> AffineWeight:
    weight = parts.take(module + ".weight", ("I8",), (None, None))
    outputs, inputs = weight.shape
    scb = parts.take(module + ".SCB", ("F32",), (outputs,))
    if module + ".weight_format" in parts.left:
        layout = parts.take(module + ".weight_format", ("U8",), ())
        if parts.whole(layout) != 0:
            raise CheckpointError(f"{layout.name} is {parts.whole(layout)}; expected 0, rows as they are.")
    return AffineWeight(
        stands_for(weight.name, (outputs, inputs), "BNB_INT8", [weight, scb]),
        bits=8,
        group_size=0,
        codes=lambda start, stop: raised(parts.rows(weight, start, stop)),
        scales=lambda start, stop: as_floats(parts.rows(scb, start, stop))[:, None] / np.float32(127),
        zeros=constant(128),
    )


class _FourBits(PackedWeight):
    """NF4 or FP4: sixteen values, and a factor for each block of elements, which may cross rows."""

    def __init__(self, parts: Parts, name: str, kind: str) -> None:
        state = self._state = _read_state(parts, name, kind)
        outputs, inputs = state.shape
        elements = outputs * inputs
        blocks = -(-elements // state.blocksize)
        self._parts = parts
        self._codes = parts.take(name, ("U8",), (-(-elements // 2), 1))
        self._map = _finite(parts, parts.take(name + ".quant_map", ("F32",), (16,)))
        if state.nested_blocksize:
            self._absmax = parts.take(name + ".absmax", ("U8",), (blocks,))
            self._factors = self._nested(name, -(-blocks // state.nested_blocksize))
        else:
            self._absmax = parts.take(name + ".absmax", ("F32",), (blocks,))
            self._factors = lambda start, stop: as_floats(parts.rows(self._absmax, start, stop))
        self.info = stands_for(name, (outputs, inputs), kind.upper(), [self._codes, self._absmax])

    def _nested(self, name: str, count: int) -> Callable[[int, int], NDArray[np.float32]]:
        parts, state = self._parts, self._state
        values = _finite(parts, parts.take(name + ".nested_quant_map", ("F32",), (256,)))
        absmax = _finite(parts, parts.take(name + ".nested_absmax", ("F32",), (count,)))

        def factors(start: int, stop: int) -> NDArray[np.float32]:
            outer = absmax[np.arange(start, stop) // state.nested_blocksize]
            found: NDArray[np.float32] = values[parts.rows(self._absmax, start, stop)] * outer
            found += np.float32(state.nested_offset)
            return found

        return factors

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        inputs, size = self._state.shape[1], self._state.blocksize
        first, last = start * inputs, stop * inputs
        octets = self._parts.rows(self._codes, first // 2, -(-last // 2))
        codes = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        block = first // size
        factors = self._factors(block, -(-last // size))
        with np.errstate(over="ignore", invalid="ignore"):  # infinity is for the quantizer to report
            values: NDArray[np.float32] = self._map[codes] * factors[np.arange(first, last) // size - block]
        return values.reshape(stop - start, inputs)


def _read_state(parts: Parts, name: str, kind: str) -> _State:
    info = parts.take(f"{name}.quant_state.bitsandbytes__{kind}", ("U8",), (None,))
    if info.nbytes > _MAX_STATE_BYTES:
        raise CheckpointError(f"{info.name} has {info.nbytes} bytes; at most {_MAX_STATE_BYTES} are read.")
    try:
        text = parts.whole(info).tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{info.name} is no UTF-8 text ({error}). Download it again.") from error
    state = decode(_State, parse_json(text, info.name), info.name, CheckpointError)
    sizes = len(state.shape) == 2 and all(0 < size < 1 << 31 for size in state.shape)
    nested = 0 <= state.nested_blocksize <= _MAX_BLOCK and abs(state.nested_offset) < 1e30
    if state.quant_type != kind or not sizes or not 1 <= state.blocksize <= _MAX_BLOCK or not nested:
        raise CheckpointError(f"{info.name} is {state}; expected {kind} of two sizes, in blocks.")
    return state


def _finite(parts: Parts, info: TensorInfo) -> NDArray[np.float32]:
    values = as_floats(parts.whole(info))
    if not np.isfinite(values).all():
        raise CheckpointError(f"{info.name} holds NaN or infinity: the file is damaged; download it again.")
    return values
