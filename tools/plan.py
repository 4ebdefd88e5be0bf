"""What fits into a device, and how fast it can be at most: arithmetic on a model's spec, nothing loaded."""

from dataclasses import asdict, dataclass
from typing import Any

from pagelet.models.cache import CACHE_TYPES, cache_bytes_per_token
from pagelet.models.spec import ModelSpec, read_share
from pagelet.models.targets import TARGETS, build_bytes
from pagelet.models.weight_shapes import weight_shapes
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat
from pagelet.runtime import EngineConfig
from pagelet.runtime.cache_layout import CacheShape

# Storage of a weight matrix [out, in] in each type that a plan can compare.
_FORMATS: dict[str, LinearFormat | FloatFormat] = {
    "int4": LinearFormat(4, 32, asymmetric=True),
    "int4-symmetric": LinearFormat(4, 32, asymmetric=False),
    "int8": LinearFormat(8, 32, asymmetric=False),
    "fp8": FloatFormat("fp8"),
    "fp16": FloatFormat("f16"),
    "bf16": FloatFormat("bf16"),
    "fp32": FloatFormat("f32"),
}
# What the exporter stores tables as beside them: on the CPU, and where a target has no int8.
_TABLES = {"int4": "int8", "int4-symmetric": "int8", "fp8": "fp16"}
_PLAIN_TABLES = {"int4": "fp16", "int4-symmetric": "fp16", "fp8": "fp16"}
WEIGHT_TYPES = tuple(_FORMATS)


@dataclass(frozen=True)
class Plan:
    """Of one model in one memory; bytes, tokens, and upper bounds of speed.

    Attributes:
        weight_bytes: of each weight type.
        cache_bytes_per_token: of each cache type.
        weights, cache_type: what the following numbers are for.
        cache_bytes: the cache of `sequences` × `context` tokens, in whole blocks; layers with a window
            hold that and one step's tokens.
        draft_weight_bytes, draft_cache_bytes: of the draft, with a cache for as many tokens.
        build_bytes: about what building the engine takes on the device (tensorrt); 0: nothing is built there.
        fits: weights and caches are within `memory`.
        max_tokens: tokens of cache beside the weights, over all sequences; 0 if the weights do not fit.
        decode_tokens_per_second: of all sequences together, if every byte came at full bandwidth once a step.
    """

    weight_bytes: dict[str, int]
    cache_bytes_per_token: dict[str, int]
    weights: str
    cache_type: str
    context: int
    sequences: int
    memory: int
    cache_bytes: int
    fits: bool
    max_tokens: int
    max_sequences: int
    decode_tokens_per_second: float | None = None
    draft_weight_bytes: int = 0
    draft_cache_bytes: int = 0
    build_bytes: int = 0

    @property
    def needed(self) -> int:
        """Bytes of all weights and caches."""
        weights = self.weight_bytes[self.weights] + self.draft_weight_bytes
        return weights + self.cache_bytes + self.draft_cache_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Draft:
    """The second model of a plan, and the types that it is stored in."""

    spec: ModelSpec
    weights: str
    cache_type: str


def weight_bytes(spec: ModelSpec, kind: str, target: str = "cpu") -> int:
    """Bytes of the weights: matrices in `kind`, embedding and head as the exporter stores them beside it,
    norms and biases in float32."""
    return sum(_tensor_bytes(shape, _stored_as(role, kind, target)) for role, shape in weight_shapes(spec))


def _stored_as(role: str, kind: str, target: str) -> str:
    row = TARGETS[target]
    if kind == "int4" and not row.asymmetric:
        kind = "int4-symmetric"
    if role in ("embedding.weight", "head.weight"):
        return (_TABLES if "int8" in row.weights else _PLAIN_TABLES).get(kind, kind)
    return "fp32" if role == "positions.weight" or role.endswith("mlp.router.weight") else kind


def _tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    if len(shape) == 1:
        return 4 * shape[0]
    rows, columns = shape
    format = _FORMATS[kind]
    # Inputs that do not divide into groups are refused by the exporter; a plan rounds them up.
    group = format.group_size or 1
    return format.packed_bytes(-(-columns // group) * group, rows)


def plan(
    spec: ModelSpec,
    memory: int,
    *,
    weights: str = "int4",
    cache_type: str = "f16",
    context: int | None = None,
    sequences: int = 1,
    bandwidth: float | None = None,
    draft: Draft | None = None,
    target: str = "cpu",
) -> Plan:
    """Plan `sequences` of `context` tokens each in `memory` bytes; `bandwidth` in bytes per second.

    A draft keeps as many tokens as the target; the bound of the speed is without its guesses.
    """
    context = min(context or spec.max_context, spec.max_context)
    held = weight_bytes(spec, weights, target)
    shapes = [_cache_shape(spec, cache_type, target)]
    draft_weights = 0
    if draft is not None:
        draft_weights = weight_bytes(draft.spec, draft.weights, target)
        shapes.append(_cache_shape(draft.spec, draft.cache_type, target))
    caches = [shape.sequence_bytes(context) for shape in shapes]
    each, left = sum(caches), max(memory - held - draft_weights, 0)
    cache = caches[0] * sequences
    whole, rest = divmod(left, each)
    # What is left is divided between the models as the rest is.
    longest = min(
        shape.longest_sequence(rest * mine // each, context)
        for shape, mine in zip(shapes, caches, strict=True)
    )
    rate = None
    if bandwidth:
        rate = sequences * bandwidth / (_bytes_read(spec, weights, sequences, target) + cache)
    return Plan(
        weight_bytes={kind: weight_bytes(spec, kind, target) for kind in _kinds(target)},
        cache_bytes_per_token={
            name: cache_bytes_per_token(spec, name) for name in CACHE_TYPES if name in TARGETS[target].caches
        },
        weights=weights,
        cache_type=cache_type,
        context=context,
        sequences=sequences,
        memory=memory,
        cache_bytes=cache,
        fits=held + draft_weights + each * sequences <= memory,
        max_tokens=whole * context + longest,
        max_sequences=whole,
        decode_tokens_per_second=rate,
        draft_weight_bytes=draft_weights,
        draft_cache_bytes=sum(caches[1:]) * sequences,
        build_bytes=build_bytes(held) if target == "tensorrt" else 0,
    )


def _kinds(target: str) -> list[str]:
    """Weight types that the target has."""
    row = TARGETS[target]
    return [
        kind for kind in WEIGHT_TYPES if kind in row.weights or (kind == "int4-symmetric" and row.asymmetric)
    ]


def _cache_shape(spec: ModelSpec, cache_type: str, target: str) -> CacheShape:
    return CacheShape.of(spec, cache_type, TARGETS[target].block_size, EngineConfig().max_step_tokens)


def _bytes_read(spec: ModelSpec, kind: str, sequences: int, target: str) -> float:
    """Bytes of weights that one step of so many tokens reads: of tables that are looked up, next to nothing;
    of experts, as many as the tokens choose if all choose others."""
    tables = {"positions.weight", "layer_inputs.table.weight"} | (
        set() if spec.tie_embeddings else {"embedding.weight"}
    )
    share = read_share(spec, sequences)
    return sum(
        _tensor_bytes(shape, _stored_as(role, kind, target)) * (share if ".experts." in role else 1)
        for role, shape in weight_shapes(spec)
        if role not in tables
    )
