"""Rotary position embedding: its parameters, and the cos/sin tables that every target shares.

A rotation must not change in the middle of a sequence: what is cached was rotated already. So scalings that
look at the sequence's length ("longrope", "dynamic") are settled once, for the context of a bundle.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import CheckpointError, UnsupportedError

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class RopeSpec:
    """One rotation (Su et al. 2021, RoFormer).

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of each head that are rotated; even.
        scaling: "none", "linear", "llama3", "yarn", "factors" (divisors of the frequencies), and, until
            `for_context` settles them, "longrope" and "dynamic".
        factor: how far positions are stretched.
        low_freq_factor, high_freq_factor: the "llama3" band (Llama 3.1 model card; transformers'
            `rope_type="llama3"`).
        original_max_position: tokens that the model was trained for first.
        frequency_divisors: rotary_dim/2 values, of "factors"; of "longrope", for contexts up to
            `original_max_position`.
        long_divisors: rotary_dim/2 values, of "longrope", for longer ones.
        attention_factor: of cos and sin; queries times keys are scaled by its square.
        beta_fast, beta_slow: rotations over the original context beyond which "yarn" keeps a frequency, and
            below which it stretches it (Peng et al. 2023, YaRN).
        truncate: these bounds become whole pairs.
        turning_pairs: of "proportional", how many pairs turn, the first ones; the others stay (Gemma 4).
        backwards: the angles are negative (nanochat).
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    frequency_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    turning_pairs: int = 0
    backwards: bool = False

    def __post_init__(self) -> None:
        if self.scaling not in (*_SCALINGS, *_UNSETTLED):
            known = ", ".join((*_SCALINGS, *_UNSETTLED))
            raise UnsupportedError(f"rope scaling {self.scaling!r} is not known; known: {known}.")
        half = self.rotary_dim // 2
        self._check_count(self.frequency_divisors, half if self.scaling in ("factors", "longrope") else 0)
        self._check_count(self.long_divisors, half if self.scaling == "longrope" else 0)

    def _check_count(self, divisors: tuple[float, ...], wanted: int) -> None:
        if len(divisors) != wanted:
            raise CheckpointError(f"rope has {len(divisors)} frequency divisors; expected {wanted}.")

    def for_context(self, max_context: int) -> "RopeSpec":
        """The one rotation of all sequences of up to `max_context` tokens."""
        if self.scaling == "longrope":
            long = max_context > self.original_max_position
            divisors = self.long_divisors if long else self.frequency_divisors
            return replace(self, scaling="factors", frequency_divisors=divisors, long_divisors=())
        if self.scaling == "dynamic":
            stretch = self.factor * max(max_context / self.original_max_position, 1.0) - (self.factor - 1)
            theta = self.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
            return replace(self, scaling="none", theta=theta)
        return self

    def reach(self, max_positions: int) -> int:
        """The longest context, in tokens, that this scaling serves in a model of `max_positions`."""
        stretched = max(self.original_max_position or max_positions, 1) * self.factor
        return max(max_positions, int(stretched)) if self.scaling in _STRETCHING else max_positions

    def inverse_frequencies(self) -> FloatArray:
        """float32 [rotary_dim/2], radians per position; in the float32 steps of transformers."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        inverse = (np.float32(1.0) / np.float32(self.theta) ** exponent).astype(np.float32)
        return _SCALINGS[self.scaling](inverse, self).astype(np.float32)

    def tables(self, count: int, first: int = 0) -> tuple[FloatArray, FloatArray]:
        """cos and sin of `count` positions from `first` on, each float32 [count, rotary_dim/2]."""
        positions = np.arange(first, first + count, dtype=np.float32)
        angles = np.outer(positions, self.inverse_frequencies())
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(-angles if self.backwards else angles) * factor


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


def _yarn(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    """Frequencies that turn often within the original context stay, those that hardly turn are stretched."""
    low, high = (_pair_with_rotations(rope, count) for count in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    stretched = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    blended: FloatArray = inverse / np.float32(rope.factor) * stretched + inverse * (1 - stretched)
    return blended


def _pair_with_rotations(rope: RopeSpec, count: float) -> float:
    """Index of the pair that makes so many rotations over the original context (YaRN, equation 17)."""
    ratio = rope.original_max_position / (count * 2 * math.pi)
    return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))


def _factors(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    divisors: FloatArray = np.asarray(rope.frequency_divisors, dtype=np.float32)
    scaled: FloatArray = inverse / divisors
    return scaled


def _proportional(inverse: FloatArray, rope: RopeSpec) -> FloatArray:
    turns = np.arange(len(inverse)) < rope.turning_pairs
    scaled: FloatArray = np.where(turns, inverse / np.float32(rope.factor), np.float32(0))
    return scaled


_SCALINGS = {
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
    "proportional": _proportional,
}
_UNSETTLED = ("longrope", "dynamic")
_STRETCHING = ("linear", "yarn", "longrope", "dynamic")
