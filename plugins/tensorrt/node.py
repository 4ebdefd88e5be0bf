"""The `PagedAttention` node of TensorRT graphs: its fields, its tensors in order, their types, their aliases.

TensorRT knows no absent inputs, so a node has only those that are there, and names them in the field
``inputs``. Nothing here needs TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pagelet.plugins.kernels.launch_plan import Shapes
from pagelet.plugins.kernels.variant import AttentionVariant

NAME, VERSION, NAMESPACE = "PagedAttention", "1", "pagelet"

Field = int | float | str

# Names and types are part of the files that users keep: they may grow, never change.
FIELDS: dict[str, type[int] | type[float] | type[str]] = {
    "inputs": str,
    "num_heads": int,
    "kv_num_heads": int,
    "head_dim": int,
    "block_size": int,
    "activation": str,
    "cache": str,
    "scale": float,
    "softcap": float,
    "local_window_size": int,
    "rotary_dim": int,
    "rotary_interleaved": int,
    "norm_epsilon": float,
    "norm_after_rotation": int,
    "norm_values": int,
    "writes": int,
}

# In order: the inputs that come and go together, their type, their number of axes. "activation" and "cache"
# stand for what the fields of these names say.
_INPUTS: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("query",), "activation", 2),
    (("key", "value"), "activation", 2),
    (("key_cache", "value_cache"), "cache", 4),
    (("cumulative_sequence_length",), "int32", 1),
    (("past_seqlens",), "int32", 1),
    (("block_table",), "int32", 2),
    (("cos_cache", "sin_cache"), "f32", 2),
    (("key_scale_cache", "value_scale_cache"), "f32", 3),
    (("position_ids",), "int64", 1),
    (("ancestor_mask",), "int32", 2),
    (("q_norm_weight",), "f32", 1),
    (("k_norm_weight",), "f32", 1),
    (("head_sink",), "f32", 1),
)
_RANKS = {name: rank for names, _, rank in _INPUTS for name in names}
_KINDS = {name: kind for names, kind, _ in _INPUTS for name in names}
_WRITTEN = ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache")


@dataclass(frozen=True)
class AttentionNode:
    """One node, from its fields.

    Attributes:
        variant: what its kernels are compiled for.
        inputs: names of its inputs, in order.
        fields: as they are in the graph and in an engine.

    Raises:
        ValueError: the inputs do not fit the attributes, or are not in their order.
    """

    variant: AttentionVariant
    inputs: tuple[str, ...]
    fields: tuple[tuple[str, Field], ...]

    def __post_init__(self) -> None:
        variant = self.variant
        present = {
            "key": variant.writes and not variant.packed,
            "cos_cache": variant.rotary_dim > 0,
            "key_scale_cache": variant.scaled,
            "q_norm_weight": variant.q_norm,
            "k_norm_weight": variant.k_norm,
            "head_sink": variant.sinks,
        }
        expected = tuple(name for names, _, _ in _INPUTS if present.get(names[0], True) for name in names)
        if self.inputs != expected:
            raise ValueError(
                f"a {NAME} node has the inputs {' '.join(self.inputs)!r}, its attributes ask for "
                f"{' '.join(expected)!r}"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Field]) -> AttentionNode:
        """From all of `FIELDS`.

        Raises:
            ValueError: fields are missing or unknown, there is no kernel for them, or the inputs do not fit.
        """
        missing, unknown = FIELDS.keys() - fields.keys(), fields.keys() - FIELDS.keys()
        if missing or unknown:
            raise ValueError(
                f"a {NAME} node lacks the attributes {sorted(missing)} and has {sorted(unknown)}, which are "
                "unknown: export the model with the version of pagelet that runs it"
            )
        ordered = {name: kind(fields[name]) for name, kind in FIELDS.items()}
        variant = AttentionVariant.of_node(ordered)
        return cls(variant, tuple(str(ordered["inputs"]).split()), tuple(ordered.items()))

    @cached_property
    def aliased_inputs(self) -> tuple[int, ...]:
        """For each output, the index of the input whose memory it is; -1 for the attended rows."""
        written = [self.inputs.index(name) for name in _WRITTEN if name in self.inputs]
        return (-1, *(written if self.variant.writes else ()))

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Of inputs, then outputs: ``f32``, ``f16``, ``bf16``, ``int8``, ``fp8``, ``int32`` or ``int64``."""
        stands_for = {"activation": self.variant.activation, "cache": self.variant.cache}
        kinds = [stands_for.get(_KINDS[name], _KINDS[name]) for name in self.inputs]
        return (*kinds, self.variant.activation, *(kinds[index] for index in self.aliased_inputs[1:]))

    @property
    def output_width(self) -> int:
        """Columns of the attended rows."""
        return self.variant.num_heads * self.variant.head_dim

    def check_ranks(self, ranks: list[int]) -> None:
        """
        Raises:
            ValueError: the inputs are not as many as the names, or one has another number of axes.
        """
        if len(ranks) != len(self.inputs):
            raise ValueError(f"a {NAME} node has {len(ranks)} inputs, but names {len(self.inputs)}")
        for name, rank in zip(self.inputs, ranks, strict=True):
            if rank != _RANKS[name]:
                raise ValueError(f"input {name} of a {NAME} node has {rank} axes, expected {_RANKS[name]}")

    @cached_property
    def _shape_inputs(self) -> tuple[int, int, int]:
        position = self.inputs.index
        return position("query"), position("block_table"), position("ancestor_mask")

    def shapes(self, dims: Callable[[int], Sequence[int]]) -> Shapes:
        """What a plan needs; ``dims`` gives the dimensions of an input by its index."""
        query, table, mask = self._shape_inputs
        (tokens, _), (sequences, width), (rows, words) = dims(query), dims(table), dims(mask)
        return Shapes(tokens, sequences, width, rows, words)
