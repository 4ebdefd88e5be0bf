"""The rotation that a GGUF file asks for, as `rope_parameters` of config.json say it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.gguf_families import GGUFFamily, Key
from pagelet.exporter.checkpoint.gguf_section import Section
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.spec import ModelSpec

# Tensors with divisors of the frequencies, one for each pair.
FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight",
)  # fmt: skip
Factors = Mapping[str, tuple[float, ...]]

_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN = {
    "rope.scaling.yarn_attn_factor": Key("attention_factor", float),
    "rope.scaling.yarn_beta_fast": Key("beta_fast", float),
    "rope.scaling.yarn_beta_slow": Key("beta_slow", float),
}
_LOG = "rope.scaling.yarn_log_multiplier"
_ORIGINAL = {"rope.scaling.original_context_length": Key("original_max_position_embeddings")}
ROPE_KEYS = (
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor", "attention.temperature_scale",
    *_ORIGINAL, *_YARN, _LOG,
)  # fmt: skip
# Beside them, of families whose layers are of two kinds.
ROPE_KEYS_OF_WINDOWS = ("rope.dimension_count_swa",)
# A pair whose frequency is divided by so much stays where it is.
_STAYS = 1e30
ROPE_ONLY = {"rope.scaling.yarn_ext_factor": 1.0}


def read_factors(tensors: Mapping[str, TensorInfo], file: SourceFile) -> Factors:
    """The divisors of the frequencies that the file holds, by the names of their tensors.

    Raises:
        UnsupportedError: they are not float32 in one dimension.
        CheckpointError: they are not positive.
    """
    found = {}
    for name in (FACTORS, SHORT_FACTORS, LONG_FACTORS):
        info = tensors.get(name)
        if info is None:
            continue
        if info.dtype != "F32" or len(info.shape) != 1 or info.shape[0] > 512:
            raise UnsupportedError(
                f"{file.path}: {name} is {info.dtype} {list(info.shape)}; expected F32, one for each pair."
            )
        divisors = file.read(info.offset, info.nbytes).view("<f4")
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise CheckpointError(f"{file.path}: {name} holds values that are not positive numbers.")
        found[name] = tuple(divisors.tolist())
    return found


def rope_parameters(section: Section, family: GGUFFamily, factors: Factors, head_dim: int) -> dict[str, Any]:
    """config.json's `rope_parameters`.

    Raises:
        UnsupportedError: a scaling that is not known, or a rotation that cannot be told from the file.
        CheckpointError: a value makes no sense.
    """
    if family.two_kinds:
        return _of_two_kinds(section, family, factors, head_dim)
    theta = section.positive("rope.freq_base", 10000.0)  # unsaid of GPT-NeoX and StableLM
    if "rope.freq_base_swa" not in family.keys and section.positive("rope.freq_base_swa", theta) != theta:
        raise UnsupportedError(f"{section.where}: layers with a window have a rope base of their own.")
    rotary_dim = section.integer("rope.dimension_count", head_dim)
    if family.permuted and rotary_dim != head_dim:
        # Whole heads are permuted, so the pairs of a partial rotation would not come out right.
        raise UnsupportedError(f"{section.where}: only {rotary_dim} of {head_dim} elements are rotated.")
    return {"rope_theta": theta, **_scaling(section, family, factors), **_partial(rotary_dim, head_dim)}


def _partial(rotary_dim: int, head_dim: int) -> dict[str, float]:
    """Half an element more, that no rounding loses one."""
    whole = rotary_dim == head_dim
    return {} if whole else {"partial_rotary_factor": (rotary_dim + 0.5) / max(head_dim, 1)}


def _of_two_kinds(
    section: Section, family: GGUFFamily, factors: Factors, head_dim: int
) -> dict[str, dict[str, Any]]:
    """By kind of layer; `head_dim`: of those without a window, whose frequencies are as of whole heads."""
    if _scaling(section, family, factors) or section.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(
            f"{section.where}: known is a rotation of whole heads without scaling, where "
            f"{FACTORS} says which pairs stay."
        )
    own = section.integer("attention.key_length_swa")
    return {
        "sliding_attention": {
            "rope_theta": section.positive("rope.freq_base_swa", 10000.0),
            **_partial(section.integer("rope.dimension_count_swa", own), own),
        },
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": section.positive("rope.freq_base", 10000.0),
            **_partial(2 * _turning(section, factors, head_dim // 2), head_dim),
        },
    }


def _turning(section: Section, factors: Factors, pairs: int) -> int:
    """How many pairs turn: they come first, and no other frequency is changed."""
    divisors = factors.get(FACTORS, ())
    turning = divisors.count(1.0)
    first, rest = divisors[:turning], divisors[turning:]
    if len(divisors) != pairs or set(first) - {1.0} or min(rest, default=_STAYS) < _STAYS:
        raise UnsupportedError(
            f"{section.where}: {FACTORS} is F32 [{len(divisors)}]; expected F32 [{pairs}], 1 for the pairs "
            f"that turn, then {_STAYS:g} for those that stay."
        )
    return turning


def _scaling(section: Section, family: GGUFFamily, factors: Factors) -> dict[str, Any]:
    factor = section.positive("rope.scaling.factor", section.positive("rope.scale_linear", 1.0))
    kind = section.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise UnsupportedError(f"{section.where}: rope.scaling.type is {kind!r:.80}; known: {known}.")
    if not factors.keys().isdisjoint((SHORT_FACTORS, LONG_FACTORS)) or kind == "longrope":
        return _longrope(section, factors)
    temperature = section.values({"attention.temperature_scale": Key("llama_4_scaling_beta", float)})
    if temperature and (family.architecture != "ministral3" or kind != "yarn"):
        raise UnsupportedError(
            f"{section.where}: attention.temperature_scale is known of yarn in mistral3 only."
        )
    if section.positive("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{section.where}: rope.scaling.attn_factor is known of longrope only.")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    return {**scaling, **_mscale(section), **family.rope, **section.values(_ORIGINAL | _YARN), **temperature}


def _mscale(section: Section) -> dict[str, float]:
    """The file has config.json's mscale_all_dim, 0 for none, but not the mscale beside it."""
    if _LOG not in section.present():
        return {}
    if section.positive(_LOG) != 1.0:
        raise UnsupportedError(
            f"{section.where}: {_LOG} is known as 0 or 1 only: what is beside it is not said."
        )
    return {"mscale": 1.0, "mscale_all_dim": 1.0}


def _longrope(section: Section, factors: Factors) -> dict[str, Any]:
    missing = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name not in factors]
    if missing:
        raise CheckpointError(f"{section.where}: longrope needs {missing[0]}, which is missing.")
    return {
        "rope_type": "longrope",
        "short_factor": list(factors[SHORT_FACTORS]),
        "long_factor": list(factors[LONG_FACTORS]),
        **section.values(_ORIGINAL | {"rope.scaling.attn_factor": Key("attention_factor", float)}),
    }


def with_factors(spec: ModelSpec, factors: Factors, where: str) -> ModelSpec:
    """The model with the divisors of `rope_freqs.weight`, which Llama 3.1 and later have.

    Raises:
        UnsupportedError: they are too many or too few, or stand beside another scaling.
    """
    if FACTORS not in factors:
        return spec
    divisors = factors[FACTORS]
    rope = spec.ropes[0] if len(spec.ropes) == 1 else None
    if rope is None or rope.scaling != "none" or len(divisors) != rope.rotary_dim // 2:
        beside = "several rotations" if rope is None else f"rope scaling {rope.scaling!r}"
        wanted = "" if rope is None else f" F32 [{rope.rotary_dim // 2}] and"
        raise UnsupportedError(
            f"{where}: {FACTORS} is F32 [{len(divisors)}] beside {beside}; expected{wanted} no other scaling."
        )
    return replace(spec, ropes=(replace(rope, scaling="factors", frequency_divisors=divisors),))
