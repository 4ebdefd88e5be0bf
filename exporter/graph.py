"""The compiled graph: one ONNX model that serves prefill chunks, decoding and verification alike.

All tokens of a step, of all sequences, stand in one ragged batch of T rows; `PagedAttention` alone
knows which sequence a row belongs to. Node names read as paths: /layers.3/attention/qkv.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.weights import WEIGHTS_NAME, Linear, StoredTensor, StoredWeights
from pagelet.models.cache import cache_type
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import LinearFormat

DOMAIN = "pagelet"
_OPSETS = {"": 21, DOMAIN: 1}
_IR_VERSION = 10
_DTYPES = {"float32": ir.DataType.FLOAT, "uint8": ir.DataType.UINT8}
_CACHE_DTYPES = {"f32": "FLOAT", "f16": "FLOAT16", "int8": "INT8", "fp8": "FLOAT8E4M3FN"}


@dataclass(frozen=True)
class CacheFormat:
    """Tokens per block, and how keys and values are stored: a name of `models.cache`."""

    block_size: int
    type: str


def build_graph(spec: ModelSpec, weights: StoredWeights, cache: CacheFormat, folder: Path) -> ir.Model:
    """The whole model as ONNX; its weights stay in `folder`/model.weights.

    Inputs: input_ids, position_ids int64 [T]; cumulative_sequence_length int32 [S+1]; past_seqlens
    int32 [S]; block_table_g int32 [S, max_blocks] for each group of layers with the same window;
    ancestor_mask int32 [N, W]: N = T, or [0, 0] where no sequence verifies a tree; logits_indices int64 [R];
    key_cache.i, value_cache.i of the cache type [blocks, block_size, num_kv_heads, head_dim]; where it has
    scales, key_scale_cache.i, value_scale_cache.i float32 [blocks, block_size, num_kv_heads]. Outputs:
    logits float32 [R, vocab] and the caches (key_cache_out.i, …), to be bound to the very buffers of the
    inputs.
    """
    build = _Builder(spec, weights, folder)
    step = _step_inputs(build, spec)
    residual = build.embedding(build.input("input_ids", "INT64", ["T"]))
    for layer in range(spec.num_layers):
        residual = _layer(build, spec, residual, step, layer, cache)["residual"]
    rows = build.op(
        "Gather", [residual, build.input("logits_indices", "INT64", ["R"])], name="/logits/rows", axis=0
    )
    return build.model({"logits": (_head(build, spec, rows), ["R", spec.vocab_size])})


def build_embedding_graph(spec: ModelSpec, weights: StoredWeights, folder: Path) -> ir.Model:
    """The model's first part alone: input_ids int64 [T] to residual float32 [T, hidden]."""
    build = _Builder(spec, weights, folder)
    residual = build.embedding(build.input("input_ids", "INT64", ["T"]))
    return build.model({"residual": (residual, ["T", spec.hidden_size])})


def build_layer_graph(
    spec: ModelSpec, weights: StoredWeights, layer: int, cache: CacheFormat, folder: Path
) -> ir.Model:
    """One layer alone, the very nodes of the whole graph.

    Inputs: residual_in float32 [T, hidden]; position_ids, cumulative_sequence_length, past_seqlens,
    block_table_g, ancestor_mask and the layer's caches as in the whole graph. Outputs, float32: the residual
    stream behind the layer; qkv [T, (num_heads + 2 num_kv_heads) * head_dim]; and what o, gate_up (before its
    norm) and down read: attended [T, num_heads * head_dim], middle [T, hidden], gated [T, intermediate].
    """
    build = _Builder(spec, weights, folder)
    step = _step_inputs(build, spec)
    residual = build.input("residual_in", "FLOAT", ["T", spec.hidden_size])
    values = _layer(build, spec, residual, step, layer, cache)
    widths = {
        "qkv": spec.query_size + 2 * spec.kv_size,
        "attended": spec.query_size,
        "middle": spec.hidden_size,
        "gated": spec.intermediate_size,
        "residual": spec.hidden_size,
    }
    return build.model({name: (values[name], ["T", width]) for name, width in widths.items()})


def build_head_graph(spec: ModelSpec, weights: StoredWeights, folder: Path) -> ir.Model:
    """The last norm and the head alone: residual_in float32 [R, hidden] to logits float32 [R, vocab]."""
    build = _Builder(spec, weights, folder)
    residual = build.input("residual_in", "FLOAT", ["R", spec.hidden_size])
    return build.model({"logits": (_head(build, spec, residual), ["R", spec.vocab_size])})


def _layer(
    build: "_Builder", spec: ModelSpec, residual: ir.Value, step: "_Step", layer: int, cache: CacheFormat
) -> dict[str, ir.Value]:
    """What a layer computes on the way, and the residual stream [T, hidden] behind it."""
    attention, mlp = f"layers.{layer}.attention.", f"layers.{layer}.mlp."
    qkv = build.linear(residual, attention + "qkv", norm=attention + "norm")
    attended = _attention(build, spec, qkv, step, layer, cache)
    middle = build.linear(attended, attention + "o", residual=residual)
    gated = build.linear(middle, mlp + "gate_up", norm=mlp + "norm")
    residual = build.linear(gated, mlp + "down", residual=middle)
    return {"qkv": qkv, "attended": attended, "middle": middle, "gated": gated, "residual": residual}


def _head(build: "_Builder", spec: ModelSpec, rows: ir.Value) -> ir.Value:
    return build.linear(rows, "embedding" if spec.tie_embeddings else "head", "/head", norm="final_norm")


@dataclass(frozen=True)
class _Step:
    """What all layers share: which rows are whose, where the blocks are, and the rotation."""

    cumulative_sequence_length: ir.Value
    past_seqlens: ir.Value
    block_tables: tuple[ir.Value, ...]  # one for each group of layers with the same window
    cos: ir.Value
    sin: ir.Value
    position_ids: ir.Value
    ancestor_mask: ir.Value


def _step_inputs(build: "_Builder", spec: ModelSpec) -> _Step:
    return _Step(
        build.input("cumulative_sequence_length", "INT32", ["S_plus_1"]),
        build.input("past_seqlens", "INT32", ["S"]),
        tuple(
            build.input(f"block_table_{group}", "INT32", ["S", f"max_blocks_{group}"])
            for group in range(len(spec.window_groups))
        ),
        build.stored(build.weights.vectors["rope.cos"]),
        build.stored(build.weights.vectors["rope.sin"]),
        build.input("position_ids", "INT64", ["T"]),
        build.input("ancestor_mask", "INT32", ["N", "W"]),
    )


def _attention(
    build: "_Builder", spec: ModelSpec, qkv: ir.Value, step: _Step, layer: int, cache: CacheFormat
) -> ir.Value:
    group = spec.group_of(layer)
    rows: list[int | str] = [f"blocks_{group}", cache.block_size, spec.num_kv_heads]
    dtype = _CACHE_DTYPES[cache.type]
    caches = [
        build.input(f"{kind}_cache.{layer}", dtype, [*rows, spec.head_dim]) for kind in ("key", "value")
    ]
    scales: list[ir.Value] = []
    if cache_type(cache.type).bytes_per_scale:
        scales = [build.input(f"{kind}_scale_cache.{layer}", "FLOAT", rows) for kind in ("key", "value")]
    optional_scales: list[ir.Value | None] = [*scales] or [None, None]
    shared = [
        step.cumulative_sequence_length,
        step.past_seqlens,
        step.block_tables[group],
        step.cos,
        step.sin,
    ]
    return build.attention(
        [qkv, None, None, *caches, *shared, *optional_scales, step.position_ids, step.ancestor_mask],
        [*caches, *scales],
        name=f"/layers.{layer}/attention/paged",
        num_heads=spec.num_heads,
        kv_num_heads=spec.num_kv_heads,
        scale=spec.head_dim**-0.5,
        rotary_dim=spec.rope.rotary_dim,
        local_window_size=spec.window_groups[group] or -1,
    )


class _Builder:
    """Collects nodes, graph inputs and stored tensors; each method adds what its name says."""

    def __init__(self, spec: ModelSpec, weights: StoredWeights, folder: Path) -> None:
        self._spec = spec
        self.weights = weights
        self._folder = folder
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._cache_outputs: list[ir.Value] = []
        self._stored: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
        value = _typed(name, dtype, shape)
        self._inputs.append(value)
        return value

    def stored(self, tensor: StoredTensor) -> ir.Value:
        """The initializer of a tensor in the weights file; the same value for the same tensor."""
        if tensor.name not in self._stored:
            dtype, shape = _DTYPES[tensor.dtype], ir.Shape(tensor.shape)
            external = ir.ExternalTensor(
                WEIGHTS_NAME,
                tensor.offset,
                tensor.length,
                dtype,
                shape=shape,
                name=tensor.name,
                base_dir=self._folder,
            )
            value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(dtype), const_value=external)
            self._stored[tensor.name] = value
        return self._stored[tensor.name]

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        name: str,
        domain: str = "",
        **attributes: object,
    ) -> ir.Value:
        return self.ops(op_type, inputs, [name], name=name, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[str],
        *,
        name: str,
        domain: str = "",
        **attributes: object,
    ) -> list[ir.Value]:
        """A node with several outputs; an output named "" is not computed."""
        values = [ir.Value(name=output) for output in outputs]
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=values, name=name))  # type: ignore[arg-type]
        return values

    def linear(
        self,
        x: ir.Value,
        module: str,
        name: str = "",
        *,
        norm: str = "",
        residual: ir.Value | None = None,
    ) -> ir.Value:
        """W · x + b + residual; `norm` is the module that norms x first. A gated layer is silu(gate) · up."""
        linear, name = self.weights.linears[module], name or _path(module)
        inputs = [
            x,
            self.stored(linear.weight),
            self.stored(linear.bias) if linear.bias else None,
            self.stored(self.weights.vectors[norm + ".weight"]) if norm else None,
            residual,
        ]
        while inputs[-1] is None:
            inputs.pop()
        fused: dict[str, object] = {"epsilon": self._spec.norm_epsilon} if norm else {}
        if linear.gated:
            fused["gated"] = 1
        return self.op("Linear", inputs, name=name, domain=DOMAIN, **_format(linear), **fused)

    def embedding(self, ids: ir.Value) -> ir.Value:
        table = self.weights.linears["embedding"]
        inputs = [ids, self.stored(table.weight)]
        return self.op("Embedding", inputs, name="/embedding", domain=DOMAIN, **_format(table))

    def attention(
        self,
        inputs: Sequence[ir.Value | None],
        caches: Sequence[ir.Value],
        *,
        name: str,
        **attributes: object,
    ) -> ir.Value:
        """Each of `caches`, key_cache.3 say, is written: its output is key_cache_out.3."""
        outputs = [str(cache.name).replace(".", "_out.") for cache in caches]
        attended, *written = self.ops(
            "PagedAttention", inputs, [name, *outputs], name=name, domain=DOMAIN, **attributes
        )
        for cache, output in zip(caches, written, strict=True):
            output.shape, output.type = cache.shape, cache.type
        self._cache_outputs += written
        return attended

    def model(self, outputs: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        """What was built; `outputs`, float32 values with their shapes, get the names they have there."""
        for name, (value, shape) in outputs.items():
            value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph(
            self._inputs,
            [*(value for value, _ in outputs.values()), *self._cache_outputs],
            nodes=self._nodes,
            initializers=list(self._stored.values()),
            opset_imports=_OPSETS,
            name="model",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="pagelet")


def _typed(name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType[dtype]))


def _format(linear: Linear) -> dict[str, object]:
    attributes: dict[str, object] = {
        "weight_type": linear.format.weight_type,
        "group_size": linear.format.group_size,
    }
    if isinstance(linear.format, LinearFormat) and linear.format.asymmetric:
        attributes["asymmetric"] = 1
    return {"in_features": linear.in_features, "out_features": linear.out_features, **attributes}


def _path(module: str) -> str:
    """layers.3.attention.qkv → /layers.3/attention/qkv."""
    layers, layer, rest = module.split(".", 2)
    return f"/{layers}.{layer}/{rest.replace('.', '/')}"
