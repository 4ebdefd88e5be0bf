"""The graph of TensorRT and TensorRT-RTX: explicit quantize/dequantize pairs, and our attention plugin."""

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from pagelet.exporter.graph_builder import DOMAIN
from pagelet.exporter.targets.gpu_builder import GpuBuilder, is_plain
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec
from pagelet.plugins.kernels.variant import HEAD_DIM_STEP, LARGEST_GROUP, LARGEST_HEAD_DIM
from pagelet.plugins.packing import LinearFormat

_NUMBERS: dict[str, type[np.generic]] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
_CACHE_NAMES = {ir.DataType.FLOAT16: "f16", ir.DataType.INT8: "int8", ir.DataType.FLOAT8E4M3FN: "fp8"}


class TensorRTBuilder(GpuBuilder):
    """INT4 weights in blocks, FP8 weights with FP8 inputs, 16-bit weights; `PagedAttention` is a plugin."""

    def product(self, x: ir.Value, module: str, name: str) -> ir.Value:
        linear = self.weights.linears[module]
        if is_plain(linear):
            return self.plain_product(x, module, name)
        assert linear.scales is not None
        codes, scales = self.stored(linear.weight), self.operand(self.stored(linear.scales))
        x = self.half(x)
        if isinstance(linear.format, LinearFormat):
            weight = self.op(
                "DequantizeLinear",
                [codes, scales],
                name=name + "/weight",
                axis=0,
                block_size=linear.format.group_size,
            )
        else:
            weight = self.op("DequantizeLinear", [codes, scales], name=name + "/weight", axis=1)
            x = self._to_fp8_and_back(x, linear.input_scale, name)
        if self._held_in_float32:
            weight = self.round(weight, name + "/weight/rounded")
        return self.op("MatMul", [x, weight], name=name)

    def device_attention(
        self, inputs: Mapping[str, ir.Value], caches: Sequence[ir.Value], *, name: str, **attributes: object
    ) -> ir.Value:
        """All fields of the plugin are there, also those that have their usual value."""
        given = {
            key: self.half(value) if key in ("query", "key", "value") else value
            for key, value in inputs.items()
        }
        cache = given["key_cache"]
        assert cache.shape is not None
        assert cache.dtype is not None
        fields: dict[str, object] = {
            "inputs": " ".join(given),
            "head_dim": cache.shape[3],
            "block_size": cache.shape[1],
            "activation": self.activations,
            "cache": _CACHE_NAMES[cache.dtype],
            "softcap": 0.0,
            "rotary_dim": 0,
            "rotary_interleaved": 0,
            "norm_epsilon": 1e-6,
            "norm_after_rotation": 0,
            "norm_values": 0,
            "writes": int(bool(caches)),
        }
        return self.caching_op(list(given.values()), caches, name, DOMAIN, fields | attributes)

    def _to_fp8_and_back(self, x: ir.Value, scale: float, name: str) -> ir.Value:
        step = self.operand(self.constant(f"{name}/input_scale", scale, _NUMBERS[self.activations]))
        zero = self.constant("fp8_zero", 0, ml_dtypes.float8_e4m3fn)
        rounded = self.op("QuantizeLinear", [x, step, zero], name=name + "/quantized")
        return self.op("DequantizeLinear", [rounded, step], name=name + "/input")


def refuse_heads(spec: ModelSpec) -> None:
    """Raises UnsupportedError where there is no attention kernel for a layer's heads."""
    for layer in spec.layers:
        if layer.head_dim % HEAD_DIM_STEP or layer.head_dim > LARGEST_HEAD_DIM:
            raise UnsupportedError(
                f"{spec.architecture} has heads of {layer.head_dim} elements; the attention kernels take "
                f"multiples of {HEAD_DIM_STEP} up to {LARGEST_HEAD_DIM}. The target cpu serves it."
            )
        if (group := spec.num_heads // layer.num_kv_heads) > LARGEST_GROUP:
            raise UnsupportedError(
                f"{group} query heads of {spec.architecture} share a KV head; the attention kernels take up "
                f"to {LARGEST_GROUP}. The target cpu serves it."
            )
