"""Activation functions that `Linear` and `Experts` apply, by name, with float64 references.

* `none`: x; `relu`: max(x, 0); `relu2`: max(x, 0)²
* `silu`: x · sigmoid(x)
* `gelu`: x · (1 + erf(x / √2)) / 2
* `gelu_tanh`: x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2
* `softcap` (cap): cap · tanh(x / cap)
* `xielu` (alpha_p, alpha_n, beta, eps): alpha_p · x² + beta · x where x > 0, else
  (alpha_n + beta) · (expm1(min(x, eps)) − x) + beta · x
* `swiglu_oai` (limit), of a gate and its other half only: with g = min(gate, limit),
  (clamp(up, −limit, limit) + 1) · g · sigmoid(1.702 · g)

A gated layer is activation(gate) · up otherwise. In the ops, parameters are `activation_a`, `activation_b`, …
in this order. xIELU is Huang and Schlag, 2024, https://arxiv.org/abs/2411.13010; both alphas are the
checkpoint's after softplus. `swiglu_oai` is GPT-OSS's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "silu": (),
    "gelu": (),
    "gelu_tanh": (),
    "relu": (),
    "relu2": (),
    "softcap": ("cap",),
    "swiglu_oai": ("limit",),
    "xielu": ("alpha_p", "alpha_n", "beta", "eps"),
}
"""The names of the functions, and of each one's parameters."""


@dataclass(frozen=True)
class Activation:
    """A function and its parameters; ValueError for an unknown name or another number of parameters."""

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in PARAMETERS:
            raise ValueError(f"activation is {self.name!r}, expected one of {', '.join(PARAMETERS)}")
        names = PARAMETERS[self.name]
        if len(self.parameters) != len(names):
            raise ValueError(
                f"{self.name} got {len(self.parameters)} parameters, expected {len(names)}: "
                f"{', '.join(names) or 'it has none'}"
            )

    def attributes(self) -> dict[str, str | float]:
        """What a node says of it: `activation`, `activation_a`, `activation_b`, …"""
        letters = zip("abcd", self.parameters, strict=False)
        return {"activation": self.name} | {f"activation_{letter}": value for letter, value in letters}

    def __call__(self, x: npt.ArrayLike) -> Float64:
        """The function of x, any shape; ValueError for `swiglu_oai`, which is one of two inputs."""
        if self.name == "swiglu_oai":
            raise ValueError("swiglu_oai is a function of a gate and its other half: call gate()")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            y: Float64 = _FUNCTIONS[self.name](np.asarray(x, np.float64), *self.parameters)
        return y

    def gate(self, gate: npt.ArrayLike, up: npt.ArrayLike) -> Float64:
        """What a gated layer gives of its two halves, of one shape."""
        gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
        if self.name != "swiglu_oai":
            gated: Float64 = self(gate) * up
            return gated
        (limit,) = self.parameters
        bounded = np.minimum(gate, limit)
        gated = (np.clip(up, -limit, limit) + 1) * bounded * _sigmoid(1.702 * bounded)
        return gated


def _sigmoid(x: Float64) -> Float64:
    with np.errstate(over="ignore"):
        sigmoid: Float64 = 1 / (1 + np.exp(-x))
    return sigmoid


def _gelu(x: Float64) -> Float64:
    erfc: Float64 = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))
    return 0.5 * x * erfc


def _gelu_tanh(x: Float64) -> Float64:
    # (1 + tanh(u)) / 2 = sigmoid(2u), which does not lose the digits of a small result.
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _xielu(x: Float64, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Float64:
    negative = (alpha_n + beta) * (np.expm1(np.minimum(x, eps)) - x) + beta * x
    return np.where(x > 0, alpha_p * x * x + beta * x, negative)


_FUNCTIONS: dict[str, Callable[..., Float64]] = {
    "none": lambda x: x,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "softcap": lambda x, cap: cap * np.tanh(x / cap),
    "xielu": _xielu,
}
