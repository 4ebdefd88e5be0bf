"""The rotations that a config.json asks for."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope import RopeSpec
from pagelet.models.strict import reject_unknown, require

_WHERE = "config.json: rope"
_SHARED = ("rope_type", "type", "rope_theta")
_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "truncate", "max_position_embeddings", "finetuned")  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
_BESIDE = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
# What each type reads beside `_SHARED`.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": _YARN,
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor",
                 "original_max_position_embeddings", "short_mscale", "long_mscale"),
    "proportional": ("factor",),
}  # fmt: skip


def rope_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (new configs), or `rope_scaling` with what older ones hold beside it.

    Raises:
        CheckpointError: neither is an object.
        UnsupportedError: both are there, or a key stands twice, and they differ.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise UnsupportedError(
            f"{_WHERE}_parameters and rope_scaling are both there and differ: leave one of them out, what it "
            "says belongs into the other."
        )
    found = new or old or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{_WHERE} parameters are {found!r}; expected an object.")
    beside = {key: config[key] for key in _BESIDE if config.get(key) is not None}
    if (outer := beside.get(_ORIGINAL)) and found.get(_ORIGINAL, outer) != outer:
        raise UnsupportedError(f"{_WHERE}: {_ORIGINAL!r} is {found[_ORIGINAL]} there and {outer} beside it.")
    return {**beside, **found}


def rope_from_section(
    section: Mapping[str, Any], head_dim: int, max_positions: int, extra: tuple[str, ...] = ()
) -> RopeSpec:
    """One rotation of heads of `head_dim`; `max_positions`: the config's; `extra`: keys that others read.

    Raises:
        UnsupportedError: the rope type, or a value of its section, is not known.
        CheckpointError: a value is missing or makes no sense.
    """
    values = {key: value for key, value in section.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    kind = {"su": "longrope", "none": "default"}.get(str(kind), str(kind))
    if kind not in _KEYS:
        raise UnsupportedError(
            f"config.json asks for rope type {kind!r}; known are {', '.join(map(repr, _KEYS))}. "
            "Positions would be wrong without it, so this model is refused."
        )
    if kind == "default":  # sections of other types are sometimes left behind
        extra = (*extra, "original_max_position_embeddings")
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    reject_unknown(values, (*_SHARED, *_KEYS[kind], *extra), _WHERE, UnsupportedError)
    partial = _number(values, "partial_rotary_factor", 1.0)
    if partial > 1:
        raise CheckpointError(f"{_WHERE}: 'partial_rotary_factor' is {partial}; expected at most 1.")
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    base = RopeSpec(theta=_number(values, "rope_theta", 10000.0), rotary_dim=rotary_dim)
    return _READERS[kind](base, values, max_positions)


def _plain(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    return base


def _linear(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    return replace(base, scaling="linear", factor=_number(values, "factor"))


def _dynamic(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    if "alpha" in values:  # Hunyuan's own: the base is stretched for good
        stretch = _number(values, "alpha") ** (base.rotary_dim / (base.rotary_dim - 2))
        return replace(base, theta=base.theta * stretch)
    factor = _number(values, "factor")
    return replace(base, scaling="dynamic", factor=factor, original_max_position=max_positions)


def _llama3(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    return replace(
        base,
        scaling="llama3",
        factor=_number(values, "factor"),
        low_freq_factor=_number(values, "low_freq_factor"),
        high_freq_factor=_number(values, "high_freq_factor"),
        original_max_position=_positions(values, max_positions),
    )


def _yarn(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    original = _positions(values, max_positions)
    factor = _number(values, "factor", max_positions / original)
    mscales = _number(values, "mscale", 0.0), _number(values, "mscale_all_dim", 0.0)
    inferred = _mscale(factor, 1.0)
    if all(mscales):
        inferred = _mscale(factor, mscales[0]) / _mscale(factor, mscales[1])
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"{_WHERE}: 'truncate' is {truncate!r:.80}; expected true or false.")
    return replace(
        base,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=_number(values, "attention_factor", inferred),
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=truncate,
    )


def _mscale(factor: float, scale: float) -> float:
    """Attention's temperature for a context stretched by `factor` (Peng et al. 2023, YaRN, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """Ding et al. 2024, LongRoPE, as Phi-3 and later have it."""
    original = _positions(values, max_positions)
    if "short_mscale" in values or "long_mscale" in values:
        raise UnsupportedError(f"{_WHERE}: short_mscale and long_mscale are not known.")
    factor = _number(values, "factor", max_positions / original)
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        base,
        scaling="longrope",
        factor=factor,
        original_max_position=original,
        frequency_divisors=_numbers(values, "short_factor"),
        long_divisors=_numbers(values, "long_factor"),
        attention_factor=_number(values, "attention_factor", inferred),
    )


def _proportional(base: RopeSpec, values: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """Frequencies as of whole heads, of which only a part turns."""
    turning = int(_number(values, "partial_rotary_factor", 1.0) * base.rotary_dim) // 2
    return replace(base, scaling="proportional", turning_pairs=turning, factor=_number(values, "factor", 1.0))


_READERS = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _number(section: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number."""
    if default is not None and section.get(key) is None:
        return default
    value: int | float = require(dict(section), key, (int, float), _WHERE, CheckpointError)
    least = 1 if key == "rope_theta" else 1e-9  # its logarithm divides
    if not least < value < 1e12:
        raise CheckpointError(f"{_WHERE}: {key!r} is {value}; expected a number from {least:g} to 1e12.")
    return float(value)


def _positions(section: Mapping[str, Any], default: int) -> int:
    """The first context, at least two tokens: its logarithm divides."""
    value = _number(section, _ORIGINAL, default)
    if not 2 <= value < 1 << 30:
        raise CheckpointError(f"{_WHERE}: {_ORIGINAL!r} is {value}; expected at least 2 tokens.")
    return int(value)


def query_temperature(section: Mapping[str, Any]) -> tuple[float, int] | None:
    """(factor, tokens beyond which it works) of queries scaled by position; None: they are not.

    Raises:
        CheckpointError: a value makes no sense.
    """
    if not section.get("llama_4_scaling_beta"):
        return None
    return _number(section, "llama_4_scaling_beta"), _positions(section, 0)


def _numbers(section: Mapping[str, Any], key: str) -> tuple[float, ...]:
    found = require(dict(section), key, list, _WHERE, CheckpointError)
    if len(found) > 1024:
        raise CheckpointError(f"{_WHERE}: {key!r} has {len(found)} numbers; expected at most 1024.")
    return tuple(_number({key: value}, key) for value in found)
