"""One layer of the graph: attention and MLP, with the norms where the family has them."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pagelet.exporter.graph_builder import DOMAIN, GraphBuilder, format_of, path
from pagelet.models.cache import cache_type
from pagelet.models.spec import ModelSpec
from pagelet.plugins.activations import Activation

_CACHE_DTYPES = {"f32": "FLOAT", "f16": "FLOAT16", "int8": "INT8", "fp8": "FLOAT8E4M3FN"}
# What the linear layers of a layer read or give, float32 [T, width]: the inputs of qkv and of the MLP (before
# their norm, where that is part of the linear layer), qkv itself, what o and down read, and what the two read
# that take in the layer's own input.
TAPS = ("attention_in", "qkv", "attended", "mlp_in", "gated", "inputs_in", "inputs_gated")


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


def add_layer(
    build: GraphBuilder,
    spec: ModelSpec,
    residual: ir.Value,
    step: Step,
    layer: int,
    cache: CacheFormat,
    own_input: ir.Value | None = None,
) -> dict[str, ir.Value]:
    """The values of TAPS, and "residual": the stream [T, hidden] behind the layer.

    `own_input`: [T, layer_inputs] of models whose layers have inputs of their own.
    """
    at, norms = f"layers.{layer}.", spec.norms(layer)
    first, second = at + "attention.norm", at + "mlp.norm"
    x, norm = _normed(build, spec, residual, first if first in norms else "")
    qkv = build.linear(x, at + "attention.qkv", norm=norm)
    attended = _attention(build, spec, qkv, step, layer, cache)
    middle = _add(build, spec, attended, at + "attention.o", residual)
    if second in norms:
        y, norm = _normed(build, spec, residual if spec.block == "parallel_norms" else middle, second)
    elif spec.block == "parallel":
        y = x
    else:
        y, norm = middle, ""
    if spec.layers[layer].experts:
        values = {"gated": y, "residual": _experts(build, spec, y, norm, middle, layer)}
    else:
        gated = _activated(build, spec, y, norm, layer)
        values = {"gated": gated, "residual": _add(build, spec, gated, at + "mlp.down", middle)}
    if own_input is not None:
        values |= _take_in(build, spec, values["residual"], own_input, layer)
    if spec.layer_scales:
        scale = build.vector(at + "scale.values")
        values["residual"] = build.op("Mul", [values["residual"], scale], name=path(at + "scaled"))
    return {"attention_in": x, "qkv": qkv, "attended": attended, "mlp_in": y, **values}


def tap_widths(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Of TAPS."""
    inner = spec.hidden_size if spec.layers[layer].experts else spec.layers[layer].intermediate_size
    return {
        "attention_in": spec.hidden_size,
        "qkv": spec.query_size(layer) + 2 * spec.kv_size(layer),
        "attended": spec.query_size(layer),
        "mlp_in": spec.hidden_size,
        "gated": inner,
        **({"inputs_in": spec.hidden_size, "inputs_gated": spec.layer_inputs} if spec.layer_inputs else {}),
    }


def fused_norm(spec: ModelSpec, layer: int, module: str) -> str:
    """The norm that is part of a linear layer, "attention.qkv" say, which reads the tap before it; or ""."""
    if spec.norm.type != "rms" or module in ("attention.o", "mlp.down"):
        return ""
    name = "attention.norm" if module == "attention.qkv" or spec.block == "parallel" else "mlp.norm"
    role = f"layers.{layer}.{name}"
    return role if role in spec.norms(layer) else ""


def _normed(build: GraphBuilder, spec: ModelSpec, x: ir.Value, role: str) -> tuple[ir.Value, str]:
    """(what a linear layer reads, the norm that it does itself)."""
    if not role or spec.norm.type == "rms":
        return x, role
    return build.norm(x, role), ""


def _add(build: GraphBuilder, spec: ModelSpec, x: ir.Value, module: str, residual: ir.Value) -> ir.Value:
    """residual + what the module gives, normed before it is added where the family does."""
    post = module.rpartition(".")[0] + ".post_norm"
    scaled: dict[str, object] = {"output_scale": spec.residual_scale} if spec.residual_scale != 1.0 else {}
    if spec.block not in ("post", "sandwich"):
        return build.linear(x, module, residual=residual, more=scaled)
    given = build.norm(build.linear(x, module, path(module) + "/given", more=scaled), post)
    return build.op("Add", [residual, given], name=path(module))


def _activated(build: GraphBuilder, spec: ModelSpec, x: ir.Value, norm: str, layer: int) -> ir.Value:
    module = f"layers.{layer}.mlp." + ("gate_up" if spec.mlp.gated else "up")
    plain = spec.mlp.gated and spec.mlp.activation == "silu"  # what gating means where nothing is said
    attributes = {} if plain else _activation(build, spec, module)
    return build.linear(x, module, norm=norm, more=attributes)


def _activation(build: GraphBuilder, spec: ModelSpec, module: str) -> dict[str, str | float]:
    parameters = build.weights.linears[module].activation_parameters or spec.mlp.activation_parameters
    return Activation(spec.mlp.activation, parameters).attributes()


def _take_in(
    build: GraphBuilder, spec: ModelSpec, x: ir.Value, own_input: ir.Value, layer: int
) -> dict[str, ir.Value]:
    """x + norm(W₂ · (act(W₁ · x) · own_input)): Gemma 3n's per-layer embeddings."""
    at = f"layers.{layer}.inputs."
    activation = Activation(spec.mlp.activation).attributes()
    gate = build.linear(x, at + "gate", more=activation)
    gated = build.op("Mul", [gate, own_input], name=path(at + "gated"))
    return {"inputs_in": x, "inputs_gated": gated, "residual": _add(build, spec, gated, at + "projection", x)}


def _experts(
    build: GraphBuilder, spec: ModelSpec, x: ir.Value, norm: str, residual: ir.Value, layer: int
) -> ir.Value:
    """The router's logits choose each token's experts inside the op."""
    at, experts = f"layers.{layer}.mlp.", spec.experts
    assert experts is not None
    router = build.linear(x, at + "router", norm=norm)
    gate_up, down = (build.weights.linears[f"{at}experts.{name}"] for name in ("gate_up", "down"))
    biases = [build.stored(one.bias) if one.bias else None for one in (gate_up, down)]
    inputs = [
        x, router, build.stored(gate_up.weight), build.stored(down.weight), *biases,
        build.norm_weight(norm) if norm else None, residual,
    ]  # fmt: skip
    formats = {
        f"{prefix}{key}": value
        for prefix, linear in (("gate_up_", gate_up), ("down_", down))
        for key, value in format_of(linear).items()
        if not key.endswith("_features")
    }
    return build.op(
        "Experts",
        inputs,
        name=path(at + "down"),
        domain=DOMAIN,
        num_experts=experts.count,
        top_k=experts.per_token,
        routing=experts.routing,
        normalize=int(experts.normalize),
        in_features=spec.hidden_size,
        intermediate=experts.intermediate_size,
        epsilon=spec.norm.epsilon,
        output_scale=spec.residual_scale,
        **_activation(build, spec, at + "experts.gate_up"),
        **formats,
    )


def _attention(
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
