"""The compiled graph: one ONNX model that serves prefill chunks, decoding and verification alike.

All tokens of a step, of all sequences, stand in one ragged batch of T rows; `PagedAttention` alone
knows which sequence a row belongs to. Node names read as paths: /layers.3/attention/qkv.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.weights import WEIGHTS_NAME, Linear, StoredTensor, StoredWeights
from pagelet.models.cache import cache_type
from pagelet.models.spec import ModelSpec

DOMAIN = "pagelet"
_MICROSOFT = "com.microsoft"
_OPSETS = {"": 21, DOMAIN: 1, _MICROSOFT: 1}
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
    logits_indices int64 [R]; key_cache.i, value_cache.i of the cache type [blocks, block_size,
    num_kv_heads, head_dim]; where it has scales, key_scale_cache.i, value_scale_cache.i float32 [blocks,
    block_size, num_kv_heads]. Outputs: logits float32 [R, vocab] and the caches (key_cache_out.i, …), to be
    bound to the very buffers of the inputs.
    """
    build = _Builder(weights, folder)
    hidden = _decoder(build, spec, cache)
    rows = build.op(
        "Gather", [hidden, build.input("logits_indices", "INT64", ["R"])], name="/logits/rows", axis=0
    )
    head = weights.linears["embedding" if spec.tie_embeddings else "head"]
    logits = build.linear(rows, head, "/head")
    return build.model(logits, ["R", spec.vocab_size])


def _decoder(build: "_Builder", spec: ModelSpec, cache: CacheFormat) -> ir.Value:
    """Token ids to the normed hidden states [T, hidden] before the head."""
    linears = build.weights.linears
    step = _step_inputs(build, spec)
    residual = build.embedding(build.input("input_ids", "INT64", ["T"]), linears["embedding"], "/embedding")
    hidden = build.norm(residual, "layers.0.attention.norm", spec)
    for layer in range(spec.num_layers):
        at, path = f"layers.{layer}.", f"/layers.{layer}/"
        qkv = build.linear(hidden, linears[at + "attention.qkv"], path + "attention/qkv")
        attended = _attention(build, spec, qkv, step, layer, cache)
        delta = build.linear(attended, linears[at + "attention.o"], path + "attention/o")
        hidden, residual = build.skip_norm(delta, residual, at + "mlp.norm", spec)
        gate_up = build.linear(hidden, linears[at + "mlp.gate_up"], path + "mlp/gate_up")
        delta = build.linear(
            build.gated_silu(gate_up, path + "mlp/"), linears[at + "mlp.down"], path + "mlp/down"
        )
        last = layer + 1 == spec.num_layers
        following = "final_norm" if last else f"layers.{layer + 1}.attention.norm"
        hidden, residual = build.skip_norm(delta, residual, following, spec)
    return hidden


@dataclass(frozen=True)
class _Step:
    """What all layers share: which rows are whose, where the blocks are, and the rotation."""

    cumulative_sequence_length: ir.Value
    past_seqlens: ir.Value
    block_tables: tuple[ir.Value, ...]  # one for each group of layers with the same window
    cos: ir.Value
    sin: ir.Value
    position_ids: ir.Value


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
        [qkv, None, None, *caches, *shared, *optional_scales, step.position_ids],
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

    def __init__(self, weights: StoredWeights, folder: Path) -> None:
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

    def linear(self, x: ir.Value, linear: Linear, name: str) -> ir.Value:
        inputs = [x, self.stored(linear.weight)]
        if linear.bias:
            inputs.append(self.stored(linear.bias))
        if linear.format is None:
            return self.op("Gemm", inputs, name=name, transB=1)
        return self.op("QuantizedLinear", inputs, name=name, domain=DOMAIN, **_format(linear))

    def embedding(self, ids: ir.Value, table: Linear, name: str) -> ir.Value:
        if table.format is None:
            return self.op("Gather", [self.stored(table.weight), ids], name=name, axis=0)
        return self.op(
            "QuantizedEmbedding", [ids, self.stored(table.weight)], name=name, domain=DOMAIN, **_format(table)
        )

    def norm(self, x: ir.Value, module: str, spec: ModelSpec) -> ir.Value:
        weight = self.stored(self.weights.vectors[module + ".weight"])
        return self.op(
            "SimplifiedLayerNormalization",
            [x, weight],
            name=_path(module),
            axis=-1,
            epsilon=spec.norm_epsilon,
        )

    def skip_norm(
        self, x: ir.Value, residual: ir.Value, module: str, spec: ModelSpec
    ) -> tuple[ir.Value, ir.Value]:
        """(norm(x + residual), x + residual) in one pass over memory."""
        weight, name = self.stored(self.weights.vectors[module + ".weight"]), _path(module)
        hidden, _, _, total = self.ops(
            "SkipSimplifiedLayerNormalization",
            [x, residual, weight],
            [name, "", "", name + "/residual"],
            name=name,
            domain=_MICROSOFT,
            epsilon=spec.norm_epsilon,
        )
        return hidden, total

    def gated_silu(self, gate_up: ir.Value, path: str) -> ir.Value:
        """silu(gate) · up; QuickGelu with alpha 1 is x · sigmoid(x)."""
        gate, up = self.ops(
            "Split", [gate_up], [path + "gate", path + "up"], name=path + "split", axis=-1, num_outputs=2
        )
        active = self.op("QuickGelu", [gate], name=path + "silu", domain=_MICROSOFT, alpha=1.0)
        return self.op("Mul", [active, up], name=path + "gated")

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

    def model(self, logits: ir.Value, logits_shape: Sequence[int | str]) -> ir.Model:
        logits.name, logits.shape, logits.type = (
            "logits",
            ir.Shape(logits_shape),
            ir.TensorType(ir.DataType.FLOAT),
        )
        graph = ir.Graph(
            self._inputs,
            [logits, *self._cache_outputs],
            nodes=self._nodes,
            initializers=list(self._stored.values()),
            opset_imports=_OPSETS,
            name="model",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="pagelet")


def _typed(name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType[dtype]))


def _format(linear: Linear) -> dict[str, object]:
    assert linear.format is not None
    return {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bits": linear.format.bits,
        "group_size": linear.format.group_size,
        "asymmetric": int(linear.format.asymmetric),
    }


def _path(module: str) -> str:
    """layers.3.mlp.norm → /layers.3/mlp/norm."""
    if module.startswith("layers."):
        _, layer, rest = module.split(".", 2)
        return f"/layers.{layer}/{rest.replace('.', '/')}"
    return "/" + module.replace(".", "/")
