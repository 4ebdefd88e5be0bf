"""Layers that read the cache of another layer: queries alone, nothing written.

Comparisons without a tolerance are ``==``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from pagelet.plugins import native

# As in test_attention_reference.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CACHE_TYPES = ("f32", "f16", "int8", "fp8")
PASTS = st.sampled_from([0, 0, 1, 15, 16, 31, 255, 256, 500])
NEW = st.sampled_from([0, 1, 1, 2, 12, 12, 30])


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_heads": draw(st.sampled_from([2, 6, 8])),
        "head_size": draw(st.sampled_from([8, 64, 512])),
        "cache_type": draw(st.sampled_from(CACHE_TYPES)),
        "local_window_size": draw(st.sampled_from([-1, 1, 20, 300])),
        "head_weights": draw(st.sampled_from([(), ("q_norm_weight", "head_sink"), ("k_norm_weight",)])),
        "norm_values": draw(st.booleans()),
        "trees": draw(st.booleans()),
    }


def with_trees(step: dict[str, Any]) -> dict[str, Any]:
    """Every sequence's rows are a binary tree."""
    masks = []
    for rows in np.diff(step["cumulative_sequence_length"]).tolist():
        seen: list[int] = []
        for row in range(rows):
            parent = (row - 1) // 2
            seen.append(seen[parent] | 1 << parent if row else 0)
        masks += seen
    return step | {"ancestor_mask": np.array(masks, np.int32).reshape(-1, 1)}


def reader_of(layer: Any) -> Any:
    names = tuple(name for name in layer.head_weights if name != "k_norm_weight")
    return replace(layer, reads_only=True, norm_values=False, head_weights=names)


def queries_alone(layer: Any, step: dict[str, Any]) -> dict[str, Any]:
    kept = {name: array for name, array in step.items() if name != "k_norm_weight"}
    return kept | {"query": np.ascontiguousarray(step["query"][:, : layer.num_heads * layer.head_size])}


@settings(max_examples=60, deadline=None)
@given(
    layers(),
    st.lists(st.tuples(PASTS, NEW), min_size=1, max_size=4),
    st.integers(0, 99),
    st.integers(1, 2),
)
def test_a_reader_has_the_bits_of_the_owner(
    attention: Any,
    make_layer: Any,
    make_world: Any,
    attributes: dict[str, Any],
    lengths: Any,
    seed: int,
    threads: int,
) -> None:
    """With the same queries; the caches stay as the owner left them."""
    layer = make_layer(**attributes)
    world = make_world(layer, [past + new for past, new in lengths], seed)
    caches = world.with_past([past for past, _ in lengths])
    step = world.step([(s, past, past + new) for s, (past, new) in enumerate(lengths)])
    step = with_trees(step) if layer.trees else step
    owned = attention(layer, threads).run(step, caches)
    before, reader = caches.copy(), reader_of(layer)
    read = attention(reader, threads).run(queries_alone(layer, step), caches)
    np.testing.assert_array_equal(read, owned)
    for name, cache in before.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_reader_matches_the_reference(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(num_heads=6, reads_only=True, cache_type=cache_type, head_weights=("q_norm_weight",))
    spans = [(0, 250, 270), (1, 33, 34)]
    world = make_world(layer, [270, 34])
    caches, step = world.with_past([270, 34]), world.step(spans)
    expected = world.reference(step, caches.copy())
    np.testing.assert_allclose(attention(layer).run(step, caches), expected, **TOLERANCE)


def owner_and_reader(owner: Any, reader: Any, weights: dict[str, Any], element: int) -> bytes:
    """One graph: the reader takes the caches that the owner wrote, and its own `queries`.

    The weights of heads are initializers.
    """
    queries = ["queries" if name == "query" else name for name in reader.inputs]
    owned = [f"{name}_out" if name in owner.caches else name for name in queries]
    outputs = ["owned", *(f"{name}_out" for name in owner.caches)]
    nodes = [
        helper.make_node("PagedAttention", owner.inputs, outputs, domain="pagelet", **owner.attributes),
        helper.make_node("PagedAttention", owned, ["read"], domain="pagelet", **reader.attributes),
    ]
    elements = {"block_table": TensorProto.INT32, "position_ids": TensorProto.INT64}
    elements |= dict.fromkeys(("cumulative_sequence_length", "past_seqlens"), TensorProto.INT32)
    elements |= dict.fromkeys(("key_cache", "value_cache"), element)

    def info(name: str) -> Any:
        cache = elements.get(name.removesuffix("_out"), TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, cache, None)

    fed = [name for name in [*owner.inputs, "queries"] if name and name not in weights]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "shared", [*map(info, fed)], [*map(info, [*outputs, "read"])], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


@pytest.mark.parametrize("cache_type", ["f32", "f16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_owner_and_reader_in_one_graph(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str, threads: int
) -> None:
    """The reader sees the tokens that the owner writes in the same step."""
    owner = make_layer(head_weights=("q_norm_weight", "k_norm_weight", "head_sink"), cache_type=cache_type)
    world = make_world(owner, [300, 40])
    step, caches = world.step([(0, 250, 300), (1, 0, 40)]), world.with_past([250, 0])
    reader = reader_of(owner)
    alone = queries_alone(owner, step)
    alone["query"] = alone["query"][::-1].copy()
    apart = caches.copy()
    expected = attention(owner).run(step, apart), attention(reader).run(alone, apart)

    element = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "int8": TensorProto.INT8}[cache_type]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    native.register_ops(options)
    model = owner_and_reader(owner, reader, world.head_weights, element)
    binding = (session := ort.InferenceSession(model, options, ["CPUExecutionProvider"])).io_binding()
    for name, array in (step | {"queries": alone["query"]}).items():
        if name not in world.head_weights:
            binding.bind_cpu_input(name, array)
    for name, cache in caches.arrays().items():
        value = ort.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"{name}_out", value)
    for name in ("owned", "read"):
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    found = [value.numpy() for value in binding.get_outputs()[-2:]]
    np.testing.assert_array_equal(found, expected)
    for name, cache in apart.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)
