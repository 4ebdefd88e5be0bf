"""Quantized weights written as their formats define it, for tests of what reads them.

Codes are unsigned, [out, in]; zeros (in codes) and scales are [out, groups].
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's WQLinear_GEMM.from_linear
NF4 = np.array(  # QLoRA, appendix E
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)


def dequantized(codes: Array, zeros: Array, scales: Array, index: Array | None = None) -> NDArray[np.float32]:
    """w = scale · (code − zero), element by element; `index`: the group of each input."""
    if index is None:
        index = np.arange(codes.shape[1]) * scales.shape[1] // codes.shape[1]
    steps = codes.astype(np.float32) - zeros.astype(np.float32)[:, index]
    return steps * scales.astype(np.float32)[:, index]


def words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """[rows, n] into [rows, n·bits/32]: element order[i] of a word at bit i·bits."""
    per_word = 32 // bits
    packed = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for place, element in enumerate(order or range(per_word)):
        some = codes[:, element::per_word].astype(np.uint32)
        packed[:, : some.shape[1]] |= some << np.uint32(bits * place)
    return packed.view(np.int32)


def awq(codes: Array, zeros: Array, scales: Array) -> Tensors:
    return {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T),
    }


def gptq(codes: Array, zeros: Array, scales: Array, *, bits: int = 4, version: int = 1) -> Tensors:
    """Version 1 stores zero − 1 in its bits: 15 for a zero of 0."""
    stored = (zeros.astype(np.int64) - (version == 1)) % (1 << bits)
    return {
        "qweight": np.ascontiguousarray(words(codes, bits).T),
        "qzeros": words(stored.T, bits),
        "scales": np.ascontiguousarray(scales.T),
    }


def pack_quantized(codes: Array, zeros: Array | None, scales: Array, *, bits: int = 4) -> Tensors:
    """compressed-tensors: both codes and zeros are signed and raised by half their range before packing."""
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
    return tensors


def nf4(codes: Array, absmax: Array, blocksize: int, **nested: Any) -> Tensors:
    """bitsandbytes: the first of two elements stands in a byte's upper half."""
    flat = np.pad(codes.reshape(-1), (0, codes.size % 2))
    state = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "bfloat16", "shape": list(codes.shape)}
    text = json.dumps(state | nested).encode()
    return {
        "weight": (flat[0::2] << 4 | flat[1::2]).astype(np.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
    }
