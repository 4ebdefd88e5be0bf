"""Sessions with PagedAttention nodes, and worlds of sequences to feed them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import pagelet.plugins
from pagelet.plugins import native, reference

sys.path.insert(0, str(Path(__file__).parent))  # one_node, mixtures
if folder := os.environ.get("PAGELET_TEST_OPS"):  # another build of the op library
    pagelet.plugins.__path__.insert(0, folder)

Array = npt.NDArray[Any]
Span = tuple[int, int, int]  # sequence, first token, end token

ROTARY_INPUTS = ("cos_cache", "sin_cache", "position_ids")
INPUT_TYPES = {
    "query": TensorProto.FLOAT,
    "key": TensorProto.FLOAT,
    "value": TensorProto.FLOAT,
    "key_cache": TensorProto.FLOAT,
    "value_cache": TensorProto.FLOAT,
    "cumulative_sequence_length": TensorProto.INT32,
    "past_seqlens": TensorProto.INT32,
    "block_table": TensorProto.INT32,
    "cos_cache": TensorProto.FLOAT,
    "sin_cache": TensorProto.FLOAT,
    "key_scale_cache": TensorProto.FLOAT,
    "value_scale_cache": TensorProto.FLOAT,
    "position_ids": TensorProto.INT64,
    "ancestor_mask": TensorProto.INT32,
    "q_norm_weight": TensorProto.FLOAT,
    "k_norm_weight": TensorProto.FLOAT,
    "head_sink": TensorProto.FLOAT,
}
MAX_POSITIONS = 1200
# NumPy has no FP8: its bits travel as uint8.
CACHE_TYPES = {
    "f32": (np.float32, TensorProto.FLOAT),
    "f16": (np.float16, TensorProto.FLOAT16),
    "int8": (np.int8, TensorProto.INT8),
    "fp8": (np.uint8, TensorProto.FLOAT8E4M3FN),
}
SCALE_CACHES = ("key_scale_cache", "value_scale_cache")
HEAD_WEIGHTS = ("q_norm_weight", "k_norm_weight", "head_sink")


@dataclass(frozen=True)
class Layer:
    """The attributes of a node, and which of the optional inputs it has."""

    num_heads: int = 4
    kv_num_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary: bool = True
    packed: bool = True
    trees: bool = False
    head_weights: tuple[str, ...] = ()
    norm_epsilon: float = 1e-6
    norm_after_rotation: bool = False
    norm_values: bool = False
    reads_only: bool = False  # queries alone
    cache_type: str = "f32"
    scale_inputs: tuple[str, ...] | None = None  # None: those that the cache type has

    @property
    def scaled(self) -> bool:
        return self.cache_type in ("int8", "fp8")

    @property
    def caches(self) -> tuple[str, ...]:
        """The names of all caches, which are updated in place."""
        scales = self.scale_inputs
        if scales is None:
            scales = SCALE_CACHES if self.scaled else ()
        return ("key_cache", "value_cache", *scales)

    @property
    def attributes(self) -> dict[str, Any]:
        names = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "rotary_dim")
        names += ("rotary_interleaved", "norm_epsilon", "norm_after_rotation", "norm_values")
        return {name: getattr(self, name) for name in names}

    @property
    def inputs(self) -> list[str]:
        """Names by position; an absent optional input is empty."""
        absent = set(SCALE_CACHES) - set(self.caches)
        absent |= set() if self.rotary else set(ROTARY_INPUTS)
        absent |= {"key", "value"} if self.packed or self.reads_only else set()
        absent |= set(HEAD_WEIGHTS) - set(self.head_weights)
        absent |= set() if self.trees else {"ancestor_mask"}
        return ["" if name in absent else name for name in INPUT_TYPES]


@dataclass
class Caches:
    """The pool of a layer: NaN wherever nothing was written (int8: noise with the scale NaN)."""

    key: Array
    value: Array
    key_scale: Array | None = None
    value_scale: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """By the names of the op's inputs."""
        named = {f"{f.name}_cache": getattr(self, f.name) for f in fields(self)}
        return {name: array for name, array in named.items() if array is not None}

    def copy(self) -> Caches:
        return Caches(**{name.removesuffix("_cache"): array.copy() for name, array in self.arrays().items()})


@dataclass
class World:
    """Sequences with random activations, spread over the pool in a random order of blocks."""

    layer: Layer
    lengths: Sequence[int]
    seed: int = 0
    unused_blocks: int = 3
    qkv: list[Array] = field(init=False)
    block_table: Array = field(init=False)
    head_weights: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        layer = self.layer
        width = (layer.num_heads + 2 * layer.kv_num_heads) * layer.head_size
        self.qkv = [rng.standard_normal((n, width), dtype=np.float32) for n in self.lengths]
        counts = [-(-n // layer.block_size) for n in self.lengths]
        self.blocks = sum(counts) + self.unused_blocks
        physical = iter(rng.permutation(self.blocks).tolist())
        self.block_table = np.full((len(counts), max(counts, default=0) + 1), -1, np.int32)
        for row, count in zip(self.block_table, counts, strict=True):
            row[:count] = [next(physical) for _ in range(count)]
        sizes = dict(zip(HEAD_WEIGHTS, (layer.head_size, layer.head_size, layer.num_heads), strict=True))
        self.head_weights = {n: rng.uniform(-2, 2, sizes[n]).astype(np.float32) for n in layer.head_weights}
        half = (layer.rotary_dim or layer.head_size) // 2
        angles = np.arange(MAX_POSITIONS)[:, None] * 10000.0 ** -(np.arange(half) / half)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def caches(self) -> Caches:
        layer = self.layer
        dtype, _ = CACHE_TYPES[layer.cache_type]
        shape = (self.blocks, layer.block_size, layer.kv_num_heads, layer.head_size)
        unwritten = {"int8": 77, "fp8": 0x7F}.get(layer.cache_type, np.nan)
        caches = Caches(np.full(shape, unwritten, dtype), np.full(shape, unwritten, dtype))
        if layer.scaled:
            caches.key_scale = np.full(shape[:3], np.nan, np.float32)
            caches.value_scale = np.full(shape[:3], np.nan, np.float32)
        return caches

    def step(self, spans: Sequence[Span]) -> dict[str, Array]:
        """The inputs (without the caches) of one step that runs these tokens of these sequences."""
        layer = self.layer
        rows = [self.qkv[s][begin:end] for s, begin, end in spans]
        width = (layer.num_heads + 2 * layer.kv_num_heads) * layer.head_size
        packed = np.concatenate(rows) if rows else np.empty((0, width), np.float32)
        inputs: dict[str, Array] = {"query": packed}
        if layer.reads_only:
            inputs["query"] = np.ascontiguousarray(packed[:, : layer.num_heads * layer.head_size])
        elif not layer.packed:
            cuts = np.cumsum([layer.num_heads, layer.kv_num_heads]) * layer.head_size
            parts = [np.ascontiguousarray(part) for part in np.split(packed, cuts, axis=1)]
            inputs = dict(zip(("query", "key", "value"), parts, strict=True))
        lengths = [end - begin for _, begin, end in spans]
        inputs["cumulative_sequence_length"] = np.cumsum([0, *lengths]).astype(np.int32)
        inputs["past_seqlens"] = np.array([begin for _, begin, _ in spans], np.int32)
        inputs["block_table"] = self.block_table[[s for s, _, _ in spans]]
        if layer.rotary:
            ranges = [np.arange(begin, end) for _, begin, end in spans]
            positions = np.concatenate(ranges) if ranges else np.empty(0)
            inputs |= {"cos_cache": self.cos, "sin_cache": self.sin}
            inputs["position_ids"] = positions.astype(np.int64)
        return inputs | self.head_weights

    def reference(self, inputs: dict[str, Array], caches: Caches) -> Array:
        return reference.paged_attention(**caches.arrays(), **inputs, **self.layer.attributes)

    def with_past(self, pasts: Sequence[int]) -> Caches:
        """Caches in which the first tokens of each sequence are random, and all else is unwritten."""
        caches, rng = self.caches(), np.random.default_rng(self.seed + 1)
        for table, past in zip(self.block_table, pasts, strict=True):
            slots = reference.block_slots(table, np.arange(past), self.layer.block_size)
            for cache, scales in ((caches.key, caches.key_scale), (caches.value, caches.value_scale)):
                rows = rng.standard_normal((past, *cache.shape[2:]), dtype=np.float32)
                reference.write(cache, scales, slots, rows)
        return caches


def build_model(layer: Layer, nodes: int) -> bytes:
    """One node, or a chain in which each node takes the caches that the one before wrote."""
    chain, previous = [], {name: name for name in layer.caches}
    for i in range(nodes):
        last = i == nodes - 1
        written = {name: f"{name}_out" if last else f"{name}.{i}" for name in layer.caches}
        inputs = [previous.get(name, name) for name in layer.inputs]
        outputs = [f"output_{i}", *([] if layer.reads_only else written.values())]
        chain.append(
            helper.make_node(
                "PagedAttention", inputs, outputs, f"/attn.{i}", domain="pagelet", **layer.attributes
            )
        )
        previous = written
    _, cache_element = CACHE_TYPES[layer.cache_type]
    elements = INPUT_TYPES | {"key_cache": cache_element, "value_cache": cache_element}
    rank = {"key_cache": 4, "value_cache": 4, "block_table": 2, "position_ids": 1, "past_seqlens": 1}
    rank |= {"cumulative_sequence_length": 1, "key_scale_cache": 3, "value_scale_cache": 3}
    rank |= dict.fromkeys(HEAD_WEIGHTS, 1)

    def info(name: str, element: int, dimensions: int) -> Any:
        return helper.make_tensor_value_info(name, element, [None] * dimensions)

    graph = helper.make_graph(
        chain,
        "attention",
        [info(name, elements[name], rank.get(name, 2)) for name in layer.inputs if name],
        [info(f"output_{i}", TensorProto.FLOAT, 2) for i in range(nodes)]
        + [info(f"{name}_out", elements[name], rank[name]) for name in layer.caches if not layer.reads_only],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def ort_value(array: Array) -> ort.OrtValue:
    """The array's memory as an OrtValue; uint8 is FP8."""
    if array.dtype == np.uint8:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.FLOAT8E4M3FN)
    return ort.OrtValue.ortvalue_from_numpy(array)


class AttentionSession:
    """A session, run with the same OrtValue bound as each cache's input and output."""

    def __init__(self, layer: Layer, threads: int, nodes: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # the tests look at the exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        native.register_ops(options)
        self.session = ort.InferenceSession(build_model(layer, nodes), options, ["CPUExecutionProvider"])
        self.nodes, self.written = nodes, () if layer.reads_only else layer.caches

    def run(self, inputs: dict[str, Array], caches: Caches, *, apart: str = "") -> Array:
        """The output of the last node, [T, Hq * D]; `caches` are updated in place.

        The cache named `apart` is, wrongly, bound to another output.
        """
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        # The values own no memory: what the op writes, it writes into the arrays of `caches`.
        values = {name: ort_value(pool) for name, pool in caches.arrays().items()}
        for name, pool in values.items():
            binding.bind_ortvalue_input(name, pool)
        for i in range(self.nodes):
            binding.bind_output(f"output_{i}", "cpu")
        for name in self.written:
            other = ort_value(caches.copy().arrays()[name]) if name == apart else values[name]
            binding.bind_ortvalue_output(f"{name}_out", other)
        self.session.run_with_iobinding(binding)
        output: Array = binding.get_outputs()[self.nodes - 1].numpy()
        return output


@lru_cache(maxsize=512)
def open_session(layer: Layer, threads: int = 1, nodes: int = 1) -> AttentionSession:
    return AttentionSession(layer, threads, nodes)


@pytest.fixture(scope="session")
def attention() -> Callable[..., AttentionSession]:
    """Opens a session for a layer: ``attention(layer, threads=1, nodes=1)``."""
    return open_session


@pytest.fixture(scope="session")
def make_layer() -> type[Layer]:
    return Layer


@pytest.fixture(scope="session")
def make_world() -> type[World]:
    return World
