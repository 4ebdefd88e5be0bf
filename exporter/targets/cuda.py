"""The graph of target `cuda`: ONNX Runtime's own ops, on its CUDA execution provider.

`MatMulNBits` and `PagedAttention` are of the domain com.microsoft, as ONNX Runtime has them since 1.31. What
is said of them here stands in its schemas, or in its sources: contrib_ops/cuda/bert/paged_attention.cc and
paged_attention_impl.cu, contrib_ops/cpu/bert/paged_attention_helper.h.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pagelet.exporter.graph_builder import DOMAIN
from pagelet.exporter.targets.cuda_limits import cuda_obstacles, refuse_obstacles
from pagelet.exporter.targets.gpu_builder import ATTENTION_INPUTS, GpuBuilder, is_plain
from pagelet.exporter.targets.lowering import Laid
from pagelet.exporter.targets.static_caches import StaticCaches
from pagelet.exporter.weights import StoredWeights
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import Codes, LinearFormat

__all__ = ["CudaBuilder", "CudaLayout", "cuda_obstacles", "refuse_obstacles"]

MICROSOFT = "com.microsoft"
# In the op's order; the inputs of the CPU's op that have another name, or none, are not among them.
_INPUTS = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens",
    "block_table", "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight",
    "k_scale", "v_scale", "attention_metadata",
)  # fmt: skip
_OF_ACTIVATION_TYPE = (
    "query", "key", "value", "cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight",
)  # fmt: skip
_KINDS: dict[type[np.generic], str] = {np.float16: "float16", np.float32: "float32"}


class CudaLayout:
    """Weights as MatMulNBits wants them: [out, groups, bytes of a group], its zero being the middle code."""

    def integers(
        self,
        codes: Codes,
        scales: NDArray[np.float32],
        format: LinearFormat,
        half: type[np.generic],
    ) -> tuple[Laid, Laid]:
        """Codes [out, in] of `plugins.packing`, symmetric, and scales [out, groups]."""
        if format.bits == 4:
            data = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)  # the first in the low half
        else:
            data = (codes.astype(np.int16) + 128).astype(np.uint8)
        rows, groups = scales.shape
        shape = (rows, groups, data.shape[1] // groups)
        kind = _KINDS.get(half, "bfloat16")
        return Laid("uint8", shape, data), Laid(kind, scales.shape, scales.astype(half))

    def fp8(
        self, codes: NDArray[np.uint8], scales: NDArray[np.float32], half: type[np.generic]
    ) -> tuple[Laid, Laid]:
        raise UnsupportedError(
            "ONNX Runtime's CUDA provider has no product with FP8 weights that serves every device; export "
            "with --weights int8 or int4."
        )


class CudaBuilder(GpuBuilder):
    """INT4 and INT8 weights in blocks, 16-bit weights; attention is ONNX Runtime's.

    Of the CPU graph's inputs `ancestor_mask` is missing, for there are no trees, `position_ids` where nothing
    but the rotation would read it, and scale caches, for their scales are constants. Keys and values of type
    f16 are stored in the activations' type. `attention_metadata`, int32 [3] in host memory, is new: the
    longest query, and twice the longest context with it, of any sequence of the step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: StoredWeights,
        folder: Path,
        *,
        activations: str = "f16",
        emulated: bool = False,
        cache_scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """`cache_scales`: of keys and values, by layer; for INT8 and FP8 caches (`calibration.ranges`)."""
        super().__init__(spec, weights, folder, activations=activations, emulated=emulated)
        self._cache_scales = cache_scales or {}
        self._metadata: ir.Value | None = None
        self._no_slots: ir.Value | None = None

    def product(self, x: ir.Value, module: str, name: str) -> ir.Value:
        linear = self.weights.linears[module]
        if is_plain(linear):
            return self.plain_product(x, module, name)
        assert linear.scales is not None
        assert isinstance(linear.format, LinearFormat)
        scales = self.operand(self.stored(linear.scales))
        return self.op(
            "MatMulNBits",
            [self.half(x), self.stored(linear.weight), scales],
            name=name,
            domain=MICROSOFT,
            K=linear.in_features,
            N=linear.out_features,
            bits=linear.format.bits,
            block_size=linear.format.group_size,
        )

    def attention(
        self,
        inputs: Sequence[ir.Value | None],
        caches: Sequence[ir.Value],
        *,
        name: str,
        **attributes: object,
    ) -> ir.Value:
        if not self.emulated or not self._cache_scales:
            return super().attention(inputs, caches, name=name, **attributes)
        named = {
            key: self._rounded(value) if key in ("query", "key", "value") else value
            for key, value in zip(ATTENTION_INPUTS, inputs, strict=False)
            if value is not None
        }
        layer = int(str(named["key_cache"].name).rpartition(".")[2])
        static = StaticCaches(self, named, self._cache_scales[layer], f"{name}/static", attributes)
        if not caches:
            attended = static.read()
        else:
            attended, written = static.write([_out_name(cache) for cache in caches[:2]])
            # The scales of tokens, which Layerwise binds for these types, stay as they are.
            unused = [self.op("Identity", [cache], name=_out_name(cache)) for cache in caches[2:]]
            for cache, output in zip(caches, [*written, *unused], strict=True):
                self._keep_cache(cache, output)
        return self.renamed(self.full(self.half(attended), name + "/full"), name)

    def _keep_cache(self, cache: ir.Value, output: ir.Value) -> None:
        output.shape, output.type = cache.shape, cache.type
        self._caches[str(cache.name)] = output
        self._cache_outputs.append(output)

    def cache(self, name: str, dtype: str, shape: Sequence[int | str]) -> ir.Value:
        if self.emulated:
            return super().cache(name, dtype, shape)
        which, _, layer = name.rpartition(".")
        if which.endswith("_scale_cache"):
            scale = self._cache_scales[int(layer)][which.startswith("value")]
            return self.constant(name, [scale])
        return super().cache(name, self.activation_type.name if dtype == "FLOAT16" else dtype, shape)

    def device_attention(
        self, inputs: Mapping[str, ir.Value], caches: Sequence[ir.Value], *, name: str, **attributes: object
    ) -> ir.Value:
        given = dict(inputs)
        scales = {
            short: given[long]
            for short, long in (("k_scale", "key_scale_cache"), ("v_scale", "value_scale_cache"))
            if long in given
        }
        head_dim, kv_heads = self._head_dim(given), attributes["kv_num_heads"]
        assert isinstance(kv_heads, int)
        if not caches:
            given |= self._unwritten(given, kv_heads * head_dim, name)
        elif attributes.pop("norm_values", 0):
            given |= self._with_normed_values(given, kv_heads, head_dim, name, attributes)
        given = {key: self.half(x) if key in _OF_ACTIVATION_TYPE else x for key, x in given.items()}
        given |= scales | {"attention_metadata": self._bounds()}
        written = [cache for cache in caches if "_scale_cache." not in str(cache.name)]
        return self.caching_op(
            [given.get(key) for key in _INPUTS],
            written,
            name,
            MICROSOFT,
            _renamed(attributes, "cos_cache" in given, bool(scales)),
        )

    def model(self, outputs: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        if not self.emulated:
            self._drop_unused([value for value, _ in outputs.values()])
            used = {value for node in self._nodes for value in node.inputs}
            self._inputs = [value for value in self._inputs if value in used]
        model = super().model(outputs)
        model.graph.opset_imports[MICROSOFT] = 1
        if not self.emulated:
            del model.graph.opset_imports[DOMAIN]
        return model

    def _head_dim(self, inputs: Mapping[str, ir.Value]) -> int:
        shape = inputs["key_cache"].shape
        assert shape is not None
        size = shape[3]
        assert isinstance(size, int)
        return size

    def _bounds(self) -> ir.Value:
        """With them the op reads no lengths back from the device, which would stop it in every layer."""
        if self._metadata is None:
            self._metadata = self.input("attention_metadata", "INT32", [3])
        return self._metadata

    def _unwritten(self, inputs: Mapping[str, ir.Value], kv_size: int, name: str) -> dict[str, ir.Value]:
        """Keys and values that the op must be given, and slots that say: write none of them.

        They are some of the query's numbers; a norm of keys must be there where there is one of queries.
        """
        query = inputs["query"]
        start, end, axis = (
            self.constant(f"slice.{number}", [number], np.int64) for number in (0, kv_size, 1)
        )
        rows = self.op("Slice", [query, start, end, axis], name=f"{name}/unwritten")
        found = {"key": rows, "value": rows, "slot_mapping": self._slots_of_none(query)}
        if "q_norm_weight" in inputs:
            found["k_norm_weight"] = inputs["q_norm_weight"]
        return found

    def _slots_of_none(self, query: ir.Value) -> ir.Value:
        """int32 [T], all -1: nothing is greater than itself, NaN included."""
        if self._no_slots is None:
            first = self.op("Gather", [query, self.constant("zero", 0, np.int64)], name="/slots/row", axis=1)
            never = self.op("Greater", [first, first], name="/slots/never")
            zeros = self.op("Cast", [never], name="/slots/zeros", to=int(ir.DataType.INT32))
            one = self.constant("one.int32", 1, np.int32)
            self._no_slots = self.op("Sub", [zeros, one], name="/slots/none")
        return self._no_slots

    def _with_normed_values(
        self,
        inputs: Mapping[str, ir.Value],
        kv_heads: int,
        head_dim: int,
        name: str,
        attributes: Mapping[str, object],
    ) -> dict[str, ir.Value]:
        """query, key and value apart: the op norms no values, so that the graph does."""
        found = {key: inputs[key] for key in ("query", "key", "value") if key in inputs}
        if "key" not in found:
            kv_size = kv_heads * head_dim
            rest = int(str(attributes["num_heads"])) * head_dim
            sizes = self.constant(f"{name}/sizes", [rest, kv_size, kv_size], np.int64)
            names = [f"{name}/{part}" for part in "qkv"]
            parts = self.ops("Split", [found["query"], sizes], names, name=f"{name}/split", axis=-1)
            found = dict(zip(("query", "key", "value"), parts, strict=True))
        apart = self.constant(f"{name}/heads", [-1, kv_heads, head_dim], np.int64)
        together = self.constant(f"{name}/rows", [-1, kv_heads * head_dim], np.int64)
        heads = self.op("Reshape", [found["value"], apart], name=f"{name}/v/heads")
        ones = self.constant(f"ones.{head_dim}", np.ones(head_dim))
        epsilon = attributes["norm_epsilon"]
        normed = self.op("RMSNormalization", [heads, ones], name=f"{name}/v/normed", axis=-1, epsilon=epsilon)
        found["value"] = self.op("Reshape", [normed, together], name=f"{name}/v/rows")
        return found


def _out_name(cache: ir.Value) -> str:
    return str(cache.name).replace("_cache.", "_cache_out.")


def _renamed(attributes: Mapping[str, object], rotated: bool, scaled: bool) -> dict[str, object]:
    """The CPU op's attributes by the names that this one has for them; it sees rotary_dim in the tables."""
    found = {
        "qk_norm_epsilon" if key == "norm_epsilon" else key: value
        for key, value in attributes.items()
        if key not in ("rotary_dim", "norm_after_rotation", "norm_values")
    }
    found["do_rotary"] = int(rotated)
    if scaled:
        found |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    return found
