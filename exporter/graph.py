"""The compiled graph: one ONNX model that serves prefill chunks, decoding and verification alike.

All tokens of a step, of all sequences, stand in one ragged batch of T rows; `PagedAttention` alone
knows which sequence a row belongs to.
"""

import numpy as np
import onnx_ir as ir

from pagelet.exporter.graph_attention import CacheFormat, Step
from pagelet.exporter.graph_builder import GraphBuilder
from pagelet.exporter.graph_layer import TAPS, add_layer, tap_widths
from pagelet.exporter.part import Part
from pagelet.models.spec import ModelSpec
from pagelet.plugins.activations import Activation


def build_graph(part: Part, cache: CacheFormat) -> ir.Model:
    """The whole model as ONNX; its weights stay in their file.

    Inputs: input_ids, position_ids int64 [T]; cumulative_sequence_length int32 [S+1]; past_seqlens
    int32 [S]; block_table_g int32 [S, max_blocks] for each group of layers with the same window;
    ancestor_mask int32 [N, W]: N = T, or [0, 0] where no sequence verifies a tree; logits_indices int64 [R];
    key_cache.i, value_cache.i of the cache type [blocks, block_size, num_kv_heads, head_dim]; where it has
    scales, key_scale_cache.i, value_scale_cache.i float32 [blocks, block_size, num_kv_heads]. Outputs:
    logits float32 [R, vocab] and the caches (key_cache_out.i, …), to be bound to the very buffers of the
    inputs.
    """
    spec, build = part.spec, part.build()
    step = Step.inputs(build, spec)
    ids = build.input("input_ids", "INT64", ["T"])
    residual = _embedding(build, spec, ids, step.position_ids)
    inputs = _layer_inputs(build, spec, ids, residual)
    for layer in range(spec.num_layers):
        own = inputs[layer] if inputs else None
        residual = add_layer(build, spec, residual, step, layer, cache, own)["residual"]
    rows = build.op(
        "Gather", [residual, build.input("logits_indices", "INT64", ["R"])], name="/logits/rows", axis=0
    )
    return build.model({"logits": (_head(build, spec, rows), ["R", spec.vocab_size])})


def build_embedding_graph(part: Part) -> ir.Model:
    """The model's first part alone: input_ids, position_ids int64 [T] to residual float32 [T, hidden].

    Where layers have inputs of their own, layer_input.i float32 [T, layer_inputs] too.
    """
    spec, build = part.spec, part.build()
    ids, positions = (build.input(name, "INT64", ["T"]) for name in ("input_ids", "position_ids"))
    residual = _embedding(build, spec, ids, positions)
    inputs = _layer_inputs(build, spec, ids, residual)
    outputs: dict[str, tuple[ir.Value, list[int | str]]] = {"residual": (residual, ["T", spec.hidden_size])}
    for layer, value in enumerate(inputs):
        outputs[f"layer_input.{layer}"] = value, ["T", spec.layer_inputs]
    return build.model(outputs)


def build_layer_graph(part: Part, layer: int, cache: CacheFormat) -> ir.Model:
    """One layer alone, the very nodes of the whole graph.

    Inputs: residual_in float32 [T, hidden]; position_ids, cumulative_sequence_length, past_seqlens,
    block_table_g, ancestor_mask and the layer's caches as in the whole graph, or those of the layer whose
    caches it reads; layer_input.i as `build_embedding_graph` gives it. Outputs, float32: the residual stream
    behind the layer, and those of TAPS that are not residual_in itself.
    """
    spec, build = part.spec, part.build()
    step = Step.inputs(build, spec)
    residual = build.input("residual_in", "FLOAT", ["T", spec.hidden_size])
    own = None
    if spec.layer_inputs:
        own = build.input(f"layer_input.{layer}", "FLOAT", ["T", spec.layer_inputs])
    values = add_layer(build, spec, residual, step, layer, cache, own)
    widths = {**tap_widths(spec, layer), "residual": spec.hidden_size}
    return build.model(
        {name: (values[name], ["T", width]) for name, width in widths.items() if values[name] is not residual}
    )


def build_head_graph(part: Part) -> ir.Model:
    """The last norm and the head alone: residual_in float32 [R, hidden] to logits float32 [R, vocab]."""
    spec, build = part.spec, part.build()
    residual = build.input("residual_in", "FLOAT", ["R", spec.hidden_size])
    return build.model({"logits": (_head(build, spec, residual), ["R", spec.vocab_size])})


def _embedding(build: GraphBuilder, spec: ModelSpec, ids: ir.Value, positions: ir.Value) -> ir.Value:
    rows = build.embedding(ids)
    if spec.embedding_scale != 1.0:
        scale = build.constant("embedding_scale", spec.embedding_scale)
        rows = build.op("Mul", [rows, scale], name="/embedding/scaled")
    if spec.position_table:
        vectors = build.op("Gather", [build.vector("positions.weight"), positions], name="/positions", axis=0)
        rows = build.op("Add", [rows, vectors], name="/embedding/placed")
    if spec.embedding_norm:
        ones = build.vector("norm.ones")
        rows = build.op(
            "RMSNormalization", [rows, ones], name="/embedding/normed", axis=-1, epsilon=spec.norm.epsilon
        )
    return rows


def _layer_inputs(build: GraphBuilder, spec: ModelSpec, ids: ir.Value, residual: ir.Value) -> list[ir.Value]:
    """Each layer's own [T, layer_inputs]: (norm(W · residual / √hidden) + √layer_inputs · row) / √2."""
    if not spec.layer_inputs:
        return []
    at, size, count = "/layer_inputs", spec.layer_inputs, spec.num_layers
    table = build.embedding(ids, "layer_inputs.table")
    table = build.op("Mul", [table, build.constant("layer_inputs.scale", size**0.5)], name=f"{at}/rows")
    scaled: dict[str, object] = {"output_scale": spec.hidden_size**-0.5}
    projected = build.linear(residual, "layer_inputs.projection", more=scaled)
    apart = build.constant("layer_inputs.apart", [-1, count, size], np.int64)
    projected = build.op("Reshape", [projected, apart], name=f"{at}/apart")
    together = build.constant("layer_inputs.together", [-1, count * size], np.int64)
    normed = build.op(
        "Reshape", [build.norm(projected, "layer_inputs.norm"), together], name=f"{at}/together"
    )
    both = build.op("Add", [normed, table], name=f"{at}/sum")
    both = build.op("Mul", [both, build.constant("layer_inputs.half", 0.5**0.5)], name=f"{at}/scaled")
    sizes = build.constant("layer_inputs.sizes", [size] * count, np.int64)
    names = [f"{at}.{layer}" for layer in range(count)]
    return build.ops("Split", [both, sizes], names, name=f"{at}/split", axis=-1)


def _head(build: GraphBuilder, spec: ModelSpec, rows: ir.Value) -> ir.Value:
    attributes: dict[str, object] = {}
    if spec.logits_scale != 1.0:
        attributes["output_scale"] = spec.logits_scale
    if spec.logits_softcap:
        attributes |= Activation("softcap", (spec.logits_softcap,)).attributes()
    module, norm = "embedding" if spec.tie_embeddings else "head", "final_norm"
    if spec.norm.type != "rms":
        rows, norm = build.norm(rows, norm), ""
    return build.linear(rows, module, "/head", norm=norm, more=attributes)


__all__ = [
    "TAPS",
    "CacheFormat",
    "build_embedding_graph",
    "build_graph",
    "build_head_graph",
    "build_layer_graph",
]
