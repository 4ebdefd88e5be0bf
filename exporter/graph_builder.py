"""Collecting the nodes of an ONNX graph; node names read as paths: /layers.3/attention/qkv."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from pagelet.exporter.weights import WEIGHTS_NAME, Linear, StoredTensor, StoredWeights
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import LinearFormat

DOMAIN = "pagelet"
_OPSETS = {"": 23, DOMAIN: 1}
_IR_VERSION = 11
_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float8": ir.DataType.FLOAT8E4M3FN,
    "int4": ir.DataType.INT4,
    "uint8": ir.DataType.UINT8,
}


class GraphBuilder:
    """Collects nodes, graph inputs and stored tensors; each method adds what its name says.

    These are the CPU's ops; other targets spell `linear`, `embedding` and `attention` in their own.
    """

    weights_name = WEIGHTS_NAME

    def __init__(self, spec: ModelSpec, weights: StoredWeights, folder: Path) -> None:
        self._spec = spec
        self.weights = weights
        self._folder = folder
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._cache_outputs: list[ir.Value] = []
        self._caches: dict[str, ir.Value] = {}  # as they are written last, by the input's name
        self._stored: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType[dtype]))
        self._inputs.append(value)
        return value

    def cache(self, name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
        """A cache array: the graph's input, or what an earlier layer made of it."""
        if name not in self._caches:
            self._caches[name] = self.input(name, dtype, shape)
        return self._caches[name]

    def stored(self, tensor: StoredTensor) -> ir.Value:
        """The initializer of a tensor in the weights file; the same value for the same tensor."""
        if tensor.name not in self._stored:
            dtype, shape = _DTYPES[tensor.dtype], ir.Shape(tensor.shape)
            external = ir.ExternalTensor(
                self.weights_name,
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
        return self._node(op_type, inputs, outputs, name, domain, attributes)

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[str],
        name: str,
        domain: str,
        attributes: Mapping[str, object],
    ) -> list[ir.Value]:
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
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> ir.Value:
        """scale · act(W · x + b) + residual; `norm` is the module that norms x first (RMSNorm).

        A gated layer is act(gate) · up.
        """
        linear, name = self.weights.linears[module], name or path(module)
        inputs = [
            x,
            self.stored(linear.weight),
            self.stored(linear.bias) if linear.bias else None,
            self.norm_weight(norm) if norm else None,
            residual,
        ]
        while inputs[-1] is None:
            inputs.pop()
        attributes = dict(more)
        if norm:
            attributes["epsilon"] = self._spec.norm.epsilon
        if linear.gated:
            attributes["gated"] = 1
        return self.op("Linear", inputs, name=name, domain=DOMAIN, **format_of(linear), **attributes)

    def norm(self, x: ir.Value, role: str) -> ir.Value:
        """A norm of rows [T, hidden] as a node of its own."""
        norm = self._spec.norm
        inputs = [x, self.norm_weight(role)]
        if norm.bias:
            inputs.append(self.stored(self.weights.vectors[role + ".bias"]))
        op = "LayerNormalization" if norm.type == "layer" else "RMSNormalization"
        return self.op(op, inputs, name=path(role), axis=-1, epsilon=norm.epsilon)

    def norm_weight(self, role: str) -> ir.Value:
        return self.vector(role + ".weight" if self._spec.norm.weight else "norm.ones")

    def vector(self, name: str) -> ir.Value:
        return self.stored(self.weights.vectors[name])

    def constant(self, name: str, values: object, dtype: type[np.generic] = np.float32) -> ir.Value:
        """A small initializer inside the graph's own file."""
        if name not in self._stored:
            array = np.asarray(values, dtype)
            tensor, shape = ir.tensor(array, name=name), ir.Shape(array.shape)
            self._stored[name] = ir.Value(
                name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self._stored[name]

    def embedding(self, ids: ir.Value, module: str = "embedding") -> ir.Value:
        """A table's rows."""
        table = self.weights.linears[module]
        inputs = [ids, self.stored(table.weight)]
        return self.op("Embedding", inputs, name=path(module), domain=DOMAIN, **format_of(table))

    def attention(
        self,
        inputs: Sequence[ir.Value | None],
        caches: Sequence[ir.Value],
        *,
        name: str,
        **attributes: object,
    ) -> ir.Value:
        """Each of `caches`, key_cache.3 say, is written: its output is key_cache_out.3."""
        return self.caching_op(inputs, caches, name, DOMAIN, attributes)

    def caching_op(
        self,
        inputs: Sequence[ir.Value | None],
        caches: Sequence[ir.Value],
        name: str,
        domain: str,
        attributes: Mapping[str, object],
    ) -> ir.Value:
        """A PagedAttention node of a domain."""
        outputs = [str(cache.name).replace("_cache.", "_cache_out.") for cache in caches]
        attended, *written = self._node("PagedAttention", inputs, [name, *outputs], name, domain, attributes)
        for cache, output in zip(caches, written, strict=True):
            output.shape, output.type = cache.shape, cache.type
            self._caches[str(cache.name)] = output
        self._cache_outputs += written
        return attended

    def model(self, outputs: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        """What was built; `outputs`, float32 values with their shapes, get the names they have there."""
        results: list[ir.Value] = []
        for name, (value, shape) in outputs.items():
            if value in results:  # one value under two names
                value = self.op("Identity", [value], name=name)
            value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
            results.append(value)
        graph = ir.Graph(
            self._inputs,
            [*results, *self._cache_outputs],
            nodes=self._nodes,
            initializers=list(self._stored.values()),
            opset_imports=dict(_OPSETS),
            name="model",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="pagelet")


def format_of(linear: Linear) -> dict[str, object]:
    attributes: dict[str, object] = {
        "weight_type": linear.format.weight_type,
        "group_size": linear.format.group_size,
    }
    if isinstance(linear.format, LinearFormat) and linear.format.asymmetric:
        attributes["asymmetric"] = 1
    return {"in_features": linear.in_features, "out_features": linear.out_features, **attributes}


def path(module: str) -> str:
    """layers.3.attention.qkv → /layers.3/attention/qkv."""
    if not module.startswith("layers."):
        return "/" + module.replace(".", "/")
    layers, layer, rest = module.split(".", 2)
    return f"/{layers}.{layer}/{rest.replace('.', '/')}"
