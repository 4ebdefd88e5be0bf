"""Rotary position embedding: its parameters, and the cos/sin tables that every target shares."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import require

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one model (Su et al. 2021, RoFormer).

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of each head that are rotated; even.
        scaling: "none", "linear", "llama3", or "factors" (a GGUF file's own divisors).
        factor: how far positions are stretched ("linear", "llama3").
        low_freq_factor, high_freq_factor, original_max_position: the "llama3" band
            (Llama 3.1 model card; transformers' `rope_type="llama3"`).
        frequency_divisors: rotary_dim/2 values, for "factors" only.
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    frequency_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scaling not in _SCALINGS:
            raise UnsupportedError(
                f"rope scaling {self.scaling!r} is not known; known: {', '.join(_SCALINGS)}."
            )
        wanted = self.rotary_dim // 2 if self.scaling == "factors" else 0
        if len(self.frequency_divisors) != wanted:
            raise UnsupportedError(
                f"rope has {len(self.frequency_divisors)} frequency divisors; expected {wanted}."
            )

    def inverse_frequencies(self) -> FloatArray:
        """float32 [rotary_dim/2], radians per position; in the float32 steps of transformers."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        inverse = (np.float32(1.0) / np.float32(self.theta) ** exponent).astype(np.float32)
        return _SCALINGS[self.scaling](inverse, self).astype(np.float32)

    def tables(self, count: int, first: int = 0) -> tuple[FloatArray, FloatArray]:
        """cos and sin of `count` positions from `first` on, each float32 [count, rotary_dim/2]."""
        positions = np.arange(first, first + count, dtype=np.float32)
        angles = np.outer(positions, self.inverse_frequencies())
        return np.cos(angles), np.sin(angles)


def _unscaled(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    return inverse


def _linear(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    scaled: FloatArray = inverse / np.float32(rope.factor)
    return scaled


def _llama3(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    """Long wavelengths are divided by the factor, short ones kept, the band between blended."""
    wavelength = 2 * np.pi / inverse
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    band = rope.high_freq_factor - rope.low_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / band
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    scaled = np.where(wavelength > longest, inverse / rope.factor, inverse)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return np.where(between, blended, scaled).astype(np.float32)


def _factors(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    divisors: FloatArray = np.asarray(rope.frequency_divisors, dtype=np.float32)
    scaled: FloatArray = inverse / divisors
    return scaled


_SCALINGS = {"none": _unscaled, "linear": _linear, "llama3": _llama3, "factors": _factors}


_WHERE = "config.json: rope"


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Read `rope_parameters` (new configs) or `rope_theta` and `rope_scaling` (old ones).

    Raises:
        UnsupportedError: the rope type is not known.
        CheckpointError: a value is missing or makes no sense.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{_WHERE} parameters are {found!r}; expected an object.")
    # Newer configs hold in the section what older ones hold beside it.
    section = {
        **{key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config},
        **found,
    }
    kind = section.get("rope_type", section.get("type", "default"))
    theta, partial = _number(section, "rope_theta", 10000.0), _number(section, "partial_rotary_factor", 1.0)
    if partial > 1:
        raise CheckpointError(f"{_WHERE}: 'partial_rotary_factor' is {partial}; expected at most 1.")
    base = RopeSpec(theta=theta, rotary_dim=int(head_dim * partial))
    if kind == "default":
        return base
    if kind == "linear":
        return replace(base, scaling="linear", factor=_number(section, "factor"))
    if kind == "llama3":
        section.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        return replace(
            base,
            scaling="llama3",
            factor=_number(section, "factor"),
            low_freq_factor=_number(section, "low_freq_factor"),
            high_freq_factor=_number(section, "high_freq_factor"),
            original_max_position=int(_number(section, "original_max_position_embeddings")),
        )
    raise UnsupportedError(
        f"config.json asks for rope type {kind!r}; known are 'default', 'linear' and 'llama3'. "
        "Positions would be wrong without it, so this model is refused."
    )


def _number(section: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number."""
    if default is not None and section.get(key) is None:
        return default
    value: int | float = require(section, key, (int, float), _WHERE, CheckpointError)
    if not 0 < value < 1e12:
        raise CheckpointError(f"{_WHERE}: {key!r} is {value}; expected a positive, finite number.")
    return float(value)
