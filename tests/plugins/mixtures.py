"""Random mixtures of experts, and the `Experts` op's answers over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from one_node import run_node

from pagelet.plugins import float_packing, native, packing
from pagelet.plugins.float_packing import FloatFormat, float_linear_reference
from pagelet.plugins.packing import LinearFormat, linear_reference

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Format = LinearFormat | FloatFormat

INPUTS = (
    "input",
    "router_logits",
    "gate_up",
    "down",
    "gate_up_bias",
    "down_bias",
    "norm_weight",
    "residual",
)
LINEAR_INPUTS = ("x", "weight", "bias", "norm_weight", "residual")
FUSED = native.selected_isa() != "portable"
FORMATS: list[tuple[Format, Format]] = [
    (LinearFormat(4, 32, True), LinearFormat(4, 32, True)),
    (LinearFormat(4, 64, False), LinearFormat(8, 32, False)),
    (LinearFormat(8, 128, False), LinearFormat(4, 64, True)),
    (FloatFormat("fp8"), FloatFormat("fp8", 32)),
    (FloatFormat("bf16"), FloatFormat("f16")),
    (FloatFormat("f32"), LinearFormat(4, 32, True)),
    (LinearFormat(4, 32, True), FloatFormat("f32")),
]


@dataclass(frozen=True)
class Weight:
    """One linear layer [N, K] as stored, and its reference."""

    format: Format
    parts: Any
    bias: Float32

    def __call__(self, x: Float32) -> Float32:
        if isinstance(self.format, LinearFormat):
            return linear_reference(x, *self.parts, self.format, self.bias, FUSED)
        return float_linear_reference(x, *self.parts, self.format, self.bias, FUSED)

    def packed(self, gated: bool) -> Array:
        """Of a gated layer, gate and the other half alternate in tiles of 16."""
        parts = [interleaved(part) if gated and part is not None else part for part in self.parts]
        if isinstance(self.format, LinearFormat):
            return packing.pack(*parts, self.format)
        return float_packing.pack(*parts, self.format)


def interleaved(rows: Array) -> Array:
    pairs = rows.reshape(2, -1, 16, rows.shape[1]).swapaxes(0, 1)
    return np.ascontiguousarray(pairs).reshape(rows.shape)


def random_weight(rng: np.random.Generator, format: Format, out_features: int, in_features: int) -> Weight:
    weight = rng.normal(0, in_features**-0.5, (out_features, in_features)).astype(np.float32)
    parts: Any = (
        packing.quantize_rtn(weight, format)
        if isinstance(format, LinearFormat)
        else float_packing.quantize(weight, format)
    )
    return Weight(format, parts, rng.normal(0, 0.3, out_features).astype(np.float32))


def format_attributes(format: Format) -> dict[str, Any]:
    asymmetric = isinstance(format, LinearFormat) and format.asymmetric
    return {
        "weight_type": format.weight_type,
        "group_size": format.group_size,
        "asymmetric": int(asymmetric),
    }


class Mixture:
    """Random experts, and the op's answer over them."""

    def __init__(
        self, formats: tuple[Format, Format], experts: int, features: int, intermediate: int
    ) -> None:
        rng = np.random.default_rng(experts)
        self.formats, self.experts = formats, experts
        self.features, self.intermediate = features, intermediate
        self.gate_up = [random_weight(rng, formats[0], 2 * intermediate, features) for _ in range(experts)]
        self.down = [random_weight(rng, formats[1], features, intermediate) for _ in range(experts)]
        self.norm = rng.normal(1, 0.3, features).astype(np.float32)
        self.constants = {
            "gate_up": np.concatenate([weight.packed(True) for weight in self.gate_up]),
            "down": np.concatenate([weight.packed(False) for weight in self.down]),
            "gate_up_bias": np.stack([weight.bias for weight in self.gate_up]),
            "down_bias": np.stack([weight.bias for weight in self.down]),
        }

    def attributes(self, **more: Any) -> dict[str, Any]:
        return {
            "num_experts": self.experts,
            "top_k": min(2, self.experts),
            "routing": "topk_softmax",
            "in_features": self.features,
            "intermediate": self.intermediate,
            **{f"gate_up_{name}": value for name, value in format_attributes(self.formats[0]).items()},
            **{f"down_{name}": value for name, value in format_attributes(self.formats[1]).items()},
            **more,
        }

    def run(self, x: Array, logits: Array, inputs: Any = None, threads: int = 1, **more: Any) -> Float32:
        given = {"input": x, "router_logits": logits, **self.constants, **(inputs or {})}
        return run_node("Experts", INPUTS, self.attributes(**more), given, threads)

    def expert(self, index: int, x: Float32) -> Float32:
        """The same expert by two nodes of Linear."""
        hidden = x
        for format, weight, gated in (
            (self.formats[0], self.gate_up[index], True),
            (self.formats[1], self.down[index], False),
        ):
            attributes = {
                "in_features": hidden.shape[1],
                "out_features": len(weight.bias),
                "gated": int(gated),
                **format_attributes(format),
            }
            inputs = {"x": hidden, "weight": weight.packed(gated), "bias": weight.bias}
            hidden = run_node("Linear", LINEAR_INPUTS, attributes, inputs)
        return hidden


@lru_cache(maxsize=4)
def mixture(
    formats: tuple[Format, Format], experts: int = 6, features: int = 256, intermediate: int = 128
) -> Mixture:
    return Mixture(formats, experts, features, intermediate)


def random_rows(rows: int, features: int, experts: int, seed: int = 0) -> tuple[Float32, Float32]:
    """Rows of different magnitude, and logits."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)) * 10.0 ** rng.integers(-1, 2, (rows, 1))
    return x.astype(np.float32), rng.normal(0, 2, (rows, experts)).astype(np.float32)


def routed(logits: Array, **attributes: Any) -> Float32:
    """The op's weights [T, E]: its experts answer with one-hot vectors, the bias of a weight of zeros."""
    experts, features, intermediate = logits.shape[1], logits.shape[1], 16
    attributes = {
        "num_experts": experts,
        "in_features": features,
        "intermediate": intermediate,
        "gate_up_weight_type": "f32",
        "down_weight_type": "f32",
        **attributes,
    }
    format = FloatFormat("f32")
    inputs = {
        "input": np.ones((len(logits), features), np.float32),
        "router_logits": logits.astype(np.float32),
        "gate_up": np.zeros(experts * format.packed_bytes(features, 2 * intermediate), np.uint8),
        "down": np.zeros(experts * format.packed_bytes(intermediate, features), np.uint8),
        "down_bias": np.eye(experts, features, dtype=np.float32),
    }
    return run_node("Experts", INPUTS, attributes, inputs)
