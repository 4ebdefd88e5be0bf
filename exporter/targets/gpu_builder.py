"""The graph of GPU targets: 16-bit inputs to matrix products and attention, everything else in float32.

The residual stream and all sums stay in float32: some models have activations beyond float16's 65504 there.
A graph that only stands in for a device's has the CPU's attention op between the same roundings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from pagelet.exporter.graph_builder import GraphBuilder, path
from pagelet.exporter.targets.activation_ops import add_activation
from pagelet.exporter.weights import Linear, StoredWeights
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import FloatFormat

LOWERED_NAME = "model.data"
"""The weights file of GPU targets."""
TABLE = ".table"
"""Behind a module's name: the table that rows are gathered from."""
# "f32" rounds nothing: the same graph, to tell what the roundings of the others do.
_ACTIVATIONS = {"f16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16, "f32": ir.DataType.FLOAT}
ATTENTION_INPUTS = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens",
    "block_table", "cos_cache", "sin_cache", "key_scale_cache", "value_scale_cache", "position_ids",
    "ancestor_mask", "q_norm_weight", "k_norm_weight", "head_sink",
)  # fmt: skip
"""The CPU op's inputs, in order."""


class GpuBuilder(GraphBuilder):
    """Spells linear layers and tables; subclasses say how a weight is read and what attention is.

    Attributes:
        emulated: attention is the CPU's op.
    """

    weights_name = LOWERED_NAME

    def __init__(
        self,
        spec: ModelSpec,
        weights: StoredWeights,
        folder: Path,
        *,
        activations: str = "f16",
        emulated: bool = False,
    ) -> None:
        super().__init__(spec, weights, folder)
        self.emulated = emulated
        self.activations = activations
        self.activation_type = _ACTIVATIONS[activations]
        # The CPU multiplies no 16-bit numbers: it would leave bfloat16 out, and make float16 float32 again by
        # taking our roundings away. There they are rounded, and held in float32, where it leaves them alone.
        self._held_in_float32 = emulated and activations != "f32"
        self._halves: dict[ir.Value, ir.Value] = {}  # by the float32 value of the same numbers
        self._normed: dict[tuple[ir.Value, str], ir.Value] = {}

    def half(self, x: ir.Value) -> ir.Value:
        """x, float32, rounded to the activations' type."""
        if self.activation_type == ir.DataType.FLOAT:
            return x
        if x not in self._halves:
            self._halves[x] = self.round(x, f"{x.name}/half")
        return self._halves[x]

    def round(self, x: ir.Value, name: str) -> ir.Value:
        """A node, or two of them, that rounds."""
        rounded = self.op("Cast", [x], name=name, to=int(self.activation_type))
        return self.as_float32(rounded, name + "/held") if self._held_in_float32 else rounded

    def as_float32(self, x: ir.Value, name: str) -> ir.Value:
        return self.op("Cast", [x], name=name, to=int(ir.DataType.FLOAT))

    def operand(self, weight: ir.Value) -> ir.Value:
        """A stored tensor of the activations' type, for a product."""
        return self.as_float32(weight, f"{weight.name}/held") if self._held_in_float32 else weight

    def full(self, x: ir.Value, name: str) -> ir.Value:
        """x, of the activations' type, as float32."""
        if self.activation_type == ir.DataType.FLOAT:
            return self.renamed(x, name)
        if self._held_in_float32:
            value = self.renamed(self.round(x, name + "/rounded"), name)
            self._halves[value] = value
            return value
        value = self.as_float32(x, name)
        self._halves[value] = x
        return value

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
        linear, name = self.weights.linears[module], name or path(module)
        attributes = dict(more)
        y = self.full(self.product(self._read(x, norm), module, name + "/product"), name + "/full")
        if linear.bias is not None:
            y = self.op("Add", [y, self.stored(linear.bias)], name=name + "/biased")
        y = self._activated(y, linear, attributes, name)
        scale = attributes.pop("output_scale", 1.0)
        if scale != 1.0:
            y = self.op("Mul", [y, self.constant(f"{name}/scale", scale)], name=name + "/scaled")
        if residual is not None:
            y = self.op("Add", [residual, y], name=name + "/sum")
        assert not attributes, attributes
        return self.renamed(y, name)

    def product(self, x: ir.Value, module: str, name: str) -> ir.Value:
        """x Wᵀ of the activations' type; x float32 [T, in]."""
        raise NotImplementedError

    def embedding(self, ids: ir.Value, module: str = "embedding") -> ir.Value:
        rows = self.op("Gather", [self.vector(module + TABLE), ids], name=path(module) + "/rows", axis=0)
        return self.as_float32(rows, path(module))

    def plain_product(self, x: ir.Value, module: str, name: str) -> ir.Value:
        """With a weight of the activations' type, [out, in]."""
        weight = self.operand(self.stored(self.weights.linears[module].weight))
        return self.op("Gemm", [self.half(x), weight], name=name, transB=1)

    def attention(
        self,
        inputs: Sequence[ir.Value | None],
        caches: Sequence[ir.Value],
        *,
        name: str,
        **attributes: object,
    ) -> ir.Value:
        named: dict[str, ir.Value] = {
            key: value for key, value in zip(ATTENTION_INPUTS, inputs, strict=False) if value is not None
        }
        if self.emulated:
            rounded = {key: self._rounded(named[key]) for key in ("query", "key", "value") if key in named}
            again = [(named | rounded).get(key) for key in ATTENTION_INPUTS[: len(inputs)]]
            attended = super().attention(again, caches, name=name + "/whole", **attributes)
            return self.renamed(self.full(self.half(attended), name + "/full"), name)
        attended = self.device_attention(named, caches, name=name + "/half", **attributes)
        return self.full(attended, name)

    def device_attention(
        self, inputs: Mapping[str, ir.Value], caches: Sequence[ir.Value], *, name: str, **attributes: object
    ) -> ir.Value:
        """The device's op: [T, num_heads · head_dim] of the activations' type; `inputs` by their names."""
        raise NotImplementedError

    def renamed(self, value: ir.Value, name: str) -> ir.Value:
        """The last of the nodes that stand for one has that one's name."""
        node = value.producer()
        assert node is not None
        node.name = value.name = name
        return value

    def model(self, outputs: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        self._drop_unused([value for value, _ in outputs.values()])
        return super().model(outputs)

    def _read(self, x: ir.Value, norm: str) -> ir.Value:
        """What a linear layer reads; two that read the same share the norm."""
        if not norm:
            return x
        if (x, norm) not in self._normed:
            self._normed[x, norm] = self.norm(x, norm)
        return self._normed[x, norm]

    def _rounded(self, x: ir.Value) -> ir.Value:
        half = self.half(x)
        producer = x.producer()
        if half is x:
            return x
        if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is half:
            return x  # it was rounded before
        return self.full(half, f"{x.name}/rounded")

    def _activated(self, y: ir.Value, linear: Linear, attributes: dict[str, object], name: str) -> ir.Value:
        function = str(attributes.pop("activation", "silu" if linear.gated else "none"))
        letters = [key for key in sorted(attributes) if key.startswith("activation_")]
        parameters = [float(str(attributes.pop(key))) for key in letters]
        if not linear.gated:
            return add_activation(self, function, parameters, y, None, name)
        half = linear.out_features // 2
        sizes = self.constant(f"{name}/halves", [half, half], np.int64)
        gate, up = self.ops(
            "Split", [y, sizes], [f"{name}/gate", f"{name}/up"], name=f"{name}/split", axis=-1
        )
        return add_activation(self, function, parameters, gate, up, name)

    def _drop_unused(self, results: Sequence[ir.Value]) -> None:
        """Nodes, beside those that write caches, that nothing reads: roundings to and fro."""
        kept: list[ir.Node] = []
        needed = {*results, *self._cache_outputs}
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                kept.append(node)
                needed.update(value for value in node.inputs if value is not None)
        self._nodes = kept[::-1]
        for name, value in list(self._stored.items()):
            if value not in needed:
                del self._stored[name]


def refuse_experts(spec: ModelSpec) -> None:
    """Raises UnsupportedError where a layer has a mixture of experts."""
    if any(layer.experts for layer in spec.layers):
        raise UnsupportedError(
            f"{spec.architecture} has mixtures of experts, which GPU targets do not compute yet; export it "
            "with --target cpu."
        )


def is_plain(linear: Linear) -> bool:
    """Whether its weight is of the activations' type."""
    return isinstance(linear.format, FloatFormat) and linear.format.type != "fp8"
