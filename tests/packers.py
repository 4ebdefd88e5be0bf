"""Quantized weights written as their formats define it, their settings, and what a scheme makes of them.

Codes are unsigned, [out, in]; zeros (in codes) and scales are [out, groups].
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.packed import SCHEMES, PackedWeight, Parts
from pagelet.exporter.checkpoint.safetensors_header import read_header

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


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": False,
}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    plain = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": plain | weights}},
    }


@contextmanager
def opened(config: dict[str, Any], tensors: Tensors) -> Iterator[tuple[list[PackedWeight], Parts]]:
    """What a scheme makes of tensors, and what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: array.copy(order="C") for name, array in tensors.items()}, path)
        file = SourceFile(path)
        try:
            parts = Parts(read_header(file), {path.name: file})
            scheme = SCHEMES[config["quant_method"]](config)
            yield list(scheme.weights(parts)), parts
        finally:
            file.close()


def named(module: str, tensors: Tensors) -> Tensors:
    return {f"{module}.{name}": array for name, array in tensors.items()}


def draw(
    seed: int, rows: int, inputs: int, groups: int, bits: int = 4, dtype: Any = np.float16
) -> tuple[Array, Array, Array]:
    """Codes, zeros (the smallest, the largest and the middle among them) and scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (rows, inputs))
    zeros = rng.choice([0, 3, (1 << bits) // 2, (1 << bits) - 1], (rows, groups))
    scales = rng.uniform(0.001, 0.1, (rows, groups)) * rng.choice([-1, 1], (rows, groups))
    return codes, zeros, scales.astype(dtype)
