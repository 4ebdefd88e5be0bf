"""The attention of a layer: where its keys and values lie, and what a family does to queries before."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pagelet.exporter.graph_builder import GraphBuilder
from pagelet.models.cache import cache_type
from pagelet.models.spec import ModelSpec

_CACHE_DTYPES = {"f32": "FLOAT", "f16": "FLOAT16", "int8": "INT8", "fp8": "FLOAT8E4M3FN"}


@dataclass(frozen=True)
class CacheFormat:
    """Tokens per block, and how keys and values are stored: a name of `models.cache`."""

    block_size: int
    type: str


@dataclass(frozen=True)
class Step:
    """What all layers share: which rows are whose, where the blocks are, and the rotations."""

    cumulative_sequence_length: ir.Value
    past_seqlens: ir.Value
    block_tables: tuple[ir.Value, ...]  # one for each group of layers with the same window
    rotations: tuple[tuple[ir.Value, ir.Value], ...]  # cos and sin
    position_ids: ir.Value
    ancestor_mask: ir.Value

    @classmethod
    def inputs(cls, build: GraphBuilder, spec: ModelSpec) -> "Step":
        return cls(
            build.input("cumulative_sequence_length", "INT32", ["S_plus_1"]),
            build.input("past_seqlens", "INT32", ["S"]),
            tuple(
                build.input(f"block_table_{group}", "INT32", ["S", f"max_blocks_{group}"])
                for group in range(len(spec.window_groups))
            ),
            tuple(
                (build.vector(f"rope.{index}.cos"), build.vector(f"rope.{index}.sin"))
                for index in range(len(spec.ropes))
            ),
            build.input("position_ids", "INT64", ["T"]),
            build.input("ancestor_mask", "INT32", ["N", "W"]),
        )


def add_attention(
    build: GraphBuilder, spec: ModelSpec, qkv: ir.Value, step: Step, layer: int, cache: CacheFormat
) -> ir.Value:
    kind, group, attention = spec.layers[layer], spec.group_of(layer), spec.attention
    rows: list[int | str] = [f"blocks_{group}", cache.block_size, kind.num_kv_heads]
    dtype = _CACHE_DTYPES[cache.type]
    owner = kind.cache_of if kind.shares_cache else layer
    caches = [
        build.cache(f"{name}_cache.{owner}", dtype, [*rows, kind.head_dim]) for name in ("key", "value")
    ]
    scales: list[ir.Value] = []
    if cache_type(cache.type).bytes_per_scale:
        scales = [build.cache(f"{name}_scale_cache.{owner}", "FLOAT", rows) for name in ("key", "value")]
    optional_scales: list[ir.Value | None] = [*scales] or [None, None]
    rotation: tuple[ir.Value | None, ...] = step.rotations[kind.rope] if kind.rope >= 0 else (None, None)
    inputs = [
        *_queries(build, spec, qkv, step, layer),
        *caches,
        step.cumulative_sequence_length,
        step.past_seqlens,
        step.block_tables[group],
        *rotation,
        *optional_scales,
        step.position_ids,
        step.ancestor_mask,
        *_extras(build, spec, layer),
    ]
    attributes: dict[str, object] = {
        "num_heads": attention.num_heads,
        "kv_num_heads": kind.num_kv_heads,
        "scale": attention.scale,
        "local_window_size": kind.window or -1,
    }
    if kind.rope >= 0:
        attributes["rotary_dim"] = spec.ropes[kind.rope].rotary_dim
    if attention.rotary_interleaved:
        attributes["rotary_interleaved"] = 1
    if attention.softcap:
        attributes["softcap"] = attention.softcap
    if attention.norm == "head" or attention.norm_values:
        attributes["norm_epsilon"] = spec.norm.epsilon
    if attention.norm_after_rotation:
        attributes["norm_after_rotation"] = 1
    if attention.norm_values and not kind.shares_cache:
        attributes["norm_values"] = 1
    name = f"/layers.{layer}/attention/paged"
    written = [] if kind.shares_cache else [*caches, *scales]
    return build.attention(inputs, written, name=name, **attributes)


def _queries(
    build: GraphBuilder, spec: ModelSpec, qkv: ir.Value, step: Step, layer: int
) -> list[ir.Value | None]:
    """query, key and value: packed, or apart where something is done to whole rows of them."""
    attention, at = spec.attention, f"/layers.{layer}/attention"
    if attention.norm != "row" and not attention.temperature:
        return [qkv, None, None]
    sizes = [spec.query_size(layer), spec.kv_size(layer), spec.kv_size(layer)]
    split = build.constant(f"qkv_sizes.{layer}", sizes, np.int64)
    query, key, value = build.ops(
        "Split", [qkv, split], [f"{at}/{part}" for part in "qkv"], name=f"{at}/split", axis=-1
    )
    if attention.norm == "row":
        query, key = (
            build.op(
                "RMSNormalization",
                [rows, build.vector(f"layers.{layer}.attention.{part}_norm.weight")],
                name=f"{at}/{part}_norm",
                axis=-1,
                epsilon=spec.norm.epsilon,
            )
            for part, rows in (("q", query), ("k", key))
        )
    if attention.temperature:
        factors = build.op(
            "Gather", [build.vector("temperature"), step.position_ids], name=f"{at}/temperature", axis=0
        )
        query = build.op("Mul", [query, factors], name=f"{at}/q_scaled")
    return [query, key, value]


def _extras(build: GraphBuilder, spec: ModelSpec, layer: int) -> list[ir.Value | None]:
    """Norms of the heads, and sinks; nothing behind the last that is there."""
    attention, at = spec.attention, f"layers.{layer}.attention."
    found: list[ir.Value | None] = [None, None, None]
    if attention.norm == "head":
        ones = not attention.norm_weight
        names = ["head_norm.ones"] * 2 if ones else [f"{at}q_norm.weight", f"{at}k_norm.weight"]
        shares = spec.layers[layer].shares_cache  # such keys are normed already
        found[:2] = [build.vector(name) for name in names[: 1 if shares else 2]] + [None] * shares
    if attention.sinks:
        found[2] = build.vector(at + "sinks.values")
    while found and found[-1] is None:
        found.pop()
    return found
