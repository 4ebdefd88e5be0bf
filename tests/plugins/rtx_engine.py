"""Builds a real TensorRT-RTX engine of two attention layers: one writes a cache, the other reads it too.

Run as a program, in a process of its own, since an error in a plugin may end it: takes the fields of the
first node and the GPUs as JSON, prints what was parsed and built as JSON on its last line.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from pagelet.plugins.tensorrt.host import PluginHost
from pagelet.plugins.tensorrt.node import AttentionNode
from pagelet.plugins.tensorrt.plugin import attention_plugins, read_fields
from pagelet.plugins.tensorrt.runtime_library import import_tensorrt

TYPES = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
COLUMNS = 32  # of the matrix behind the attention


def dims(node: AttentionNode, name: str) -> list[str | int]:
    """Of an input of the graph; texts are free."""
    variant = node.variant
    heads, kv_heads, size = variant.num_heads, variant.kv_num_heads, variant.head_dim
    if name.endswith("_scale_cache"):
        return ["blocks", variant.block_size, kv_heads]
    if name.endswith("_cache") and name[:3] not in ("cos", "sin"):
        return ["blocks", variant.block_size, kv_heads, size]
    columns = heads + 2 * kv_heads if variant.packed else heads
    known: dict[str, list[str | int]] = {
        "query": ["tokens", columns * size],
        "key": ["tokens", kv_heads * size],
        "value": ["tokens", kv_heads * size],
        "cumulative_sequence_length": ["sequences_plus_1"],
        "past_seqlens": ["sequences"],
        "block_table": ["sequences", "width"],
        "cos_cache": [64, variant.rotary_dim // 2],
        "sin_cache": [64, variant.rotary_dim // 2],
        "position_ids": ["tokens"],
        "ancestor_mask": ["mask_rows", "words"],
        "q_norm_weight": [size],
        "k_norm_weight": [size],
        "head_sink": [heads],
    }
    return known[name]


def graph(node: AttentionNode) -> ModelProto:
    """The node, one that reads its caches and is given its output as queries, and a matrix product."""
    written = [node.inputs[index] for index in node.aliased_inputs[1:]]
    caches = {name: f"{name}_out" for name in written}
    reading = [name for name in node.inputs if name not in ("key", "value")]
    # A reader takes what the first layer wrote; of its other inputs only the queries differ.
    sources = [{"query": "attended"}.get(name, caches.get(name, name)) for name in reading]
    first = dict(node.fields)
    second = first | {"inputs": " ".join(reading), "writes": 0}
    nodes = [
        _attention(list(node.inputs), ["attended", *caches.values()], first),
        _attention(sources, ["read"], second),
        helper.make_node("MatMul", ["read", "weight"], ["result"]),
    ]
    kinds = dict(zip(node.inputs, node.types, strict=False))
    inputs = [
        helper.make_tensor_value_info(name, TYPES[kinds[name]], dims(node, name)) for name in node.inputs
    ]
    activation = TYPES[node.variant.activation]
    outputs = [helper.make_tensor_value_info("result", activation, ["tokens", COLUMNS])]
    outputs += [
        helper.make_tensor_value_info(caches[name], TYPES[kinds[name]], dims(node, name)) for name in written
    ]
    weight = helper.make_tensor(
        "weight", activation, [node.output_width, COLUMNS], np.ones(node.output_width * COLUMNS)
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "two_layers", inputs, outputs, [weight]), opset_imports=opsets
    )


def _attention(inputs: list[str], outputs: list[str], fields: dict[str, Any]) -> Any:
    node = helper.make_node("PagedAttention", inputs, outputs, domain="pagelet")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in fields.items())
    return node


def parse(trt: Any, node: AttentionNode, host: PluginHost, builder: Any, logger: Any) -> Any:
    """The network of the graph."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    with attention_plugins(trt).hosting(host):
        parsed = parser.parse(graph(node).SerializeToString())
    assert parsed, [str(parser.get_error(index)) for index in range(parser.num_errors)]
    return network


def configure(
    trt: Any, node: AttentionNode, builder: Any, network: Any, sms: list[int], aliased: bool
) -> Any:
    """A configuration with one profile: up to 16 rows of 4 sequences."""
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliased)
    config.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    most = {"tokens": 16, "sequences": 4, "sequences_plus_1": 5, "blocks": 9, "width": 3}
    most |= {"mask_rows": 16, "words": 1}
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if -1 in tensor.shape:
            high = [most[size] if isinstance(size, str) else size for size in dims(node, tensor.name)]
            low = [
                size if isinstance(size, int) else int(size != "mask_rows")
                for size in dims(node, tensor.name)
            ]
            profile.set_shape(tensor.name, low, high, high)
    config.add_optimization_profile(profile)
    return config


def describe(trt: Any, network: Any) -> dict[str, Any]:
    def layer(index: int) -> dict[str, Any]:
        found = network.get_layer(index)
        outputs = [found.get_output(each) for each in range(found.num_outputs)]
        described = {
            "type": found.type.name,
            "inputs": [found.get_input(each).name for each in range(found.num_inputs)],
            "outputs": [[each.name, each.dtype.name, list(each.shape)] for each in outputs],
        }
        if found.type == trt.LayerType.PLUGIN_V3:
            found.__class__ = trt.IPluginV3Layer
            described["aliases"] = [found.plugin.get_aliased_input(each) for each in range(len(outputs))]
            described["fields"] = read_fields(found.plugin.get_fields_to_serialize())
        return described

    return {
        "layers": [layer(index) for index in range(network.num_layers)],
        "inputs": [network.get_input(index).name for index in range(network.num_inputs)],
        "outputs": [network.get_output(index).name for index in range(network.num_outputs)],
    }


def build(fields: dict[str, Any], sms: list[int], aliased: bool = True) -> dict[str, Any]:
    trt = import_tensorrt("tensorrt_rtx")
    node, host = AttentionNode.from_fields(fields), PluginHost()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = parse(trt, node, host, builder, logger)
    description = describe(trt, network)
    engine = builder.build_serialized_network(network, configure(trt, node, builder, network, sms, aliased))
    host.check()
    content = b"" if engine is None else bytes(engine)
    holds_fields = all(str(value).encode() in content for value in fields.values() if isinstance(value, str))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return description | {"bytes": len(content), "holds_fields": holds_fields, "peak_mib": memory}


if __name__ == "__main__":
    print(json.dumps(build(*json.loads(sys.argv[1]))))
