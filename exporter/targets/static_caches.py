"""Attention over INT8 and FP8 caches that have one scale each, in ops that the CPU has.

The CPU's op chooses a scale for each token. So that a bundle can be certified where there is no GPU, its
graph runs the op twice on float32 caches: once to prepare and write what is new, then, with all that is held
rounded as the device rounds it, as a reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pagelet.exporter.calibration.ranges import LARGEST_CODE
from pagelet.exporter.graph_builder import DOMAIN, GraphBuilder

# The inputs of the CPU's op behind query, key, value and the two caches; scales it is not given.
_BEHIND = (
    "cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache", "sin_cache", "", "",
    "position_ids", "ancestor_mask", "q_norm_weight", "k_norm_weight", "head_sink",
)  # fmt: skip
_LARGEST = {ir.DataType.INT8: LARGEST_CODE["int8"], ir.DataType.FLOAT8E4M3FN: LARGEST_CODE["fp8"]}


@dataclass(frozen=True)
class StaticCaches:
    """The attention of one layer.

    Attributes:
        inputs: of the CPU's op, by their names; queries, keys and values float32.
        scales: of keys and of values.
        name: below which the nodes stand.
    """

    build: GraphBuilder
    inputs: Mapping[str, ir.Value]
    scales: tuple[float, float]
    name: str
    attributes: Mapping[str, object]

    def read(self) -> ir.Value:
        """Attended, float32, over what the caches hold already."""
        query = self.inputs["query"]
        return self._attend([query, None, None, *self._held("read")], ["attended"], reads=True)[0]

    def write(self, names: Sequence[str]) -> tuple[ir.Value, list[ir.Value]]:
        """Attended, float32, and the caches with the new tokens, by the names of their outputs."""
        rows = [self.inputs.get(name) for name in ("query", "key", "value")]
        _, *fresh = self._attend([*rows, *self._held("before")], ["early", "keys", "values"])
        written = [
            self._rounded(value, scale, name, self.inputs[cache])
            for value, scale, name, cache in zip(
                fresh, self.scales, names, ("key_cache", "value_cache"), strict=True
            )
        ]
        after = dict(zip(("key_cache", "value_cache"), written, strict=True))
        reader = StaticCaches(
            self.build,
            {**self.inputs, **after, "query": self._query()},
            self.scales,
            self.name,
            self.attributes,
        )
        return reader.read(), written

    def _query(self) -> ir.Value:
        """Without the keys and values that may be packed with it."""
        if "key" in self.inputs:
            return self.inputs["query"]
        shape = self.inputs["key_cache"].shape
        assert shape is not None
        heads = [int(str(self.attributes[name])) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
        sizes = self._constant("sizes", np.asarray(heads) * int(str(shape[3])), np.int64)
        names = [f"{self.name}/{part}" for part in "qkv"]
        packed = self.inputs["query"]
        return self.build.ops("Split", [packed, sizes], names, name=f"{self.name}/split", axis=-1)[0]

    def _held(self, when: str) -> list[ir.Value]:
        """The numbers that the codes of both caches stand for."""
        found = []
        for cache, scale in zip(("key_cache", "value_cache"), self.scales, strict=True):
            at = f"{self.name}/{cache}/{when}"
            codes = self._cast(self.inputs[cache], ir.DataType.FLOAT, f"{at}/codes")
            found.append(self._op("Mul", [codes, self._constant(f"{cache}/scale", scale)], f"{at}/held"))
        return found

    def _rounded(self, value: ir.Value, scale: float, name: str, cache: ir.Value) -> ir.Value:
        """x / scale as a code of the cache's type, rounded to the nearest."""
        assert cache.dtype is not None
        kind, at = cache.dtype, f"{self.name}/{name}"
        codes = self._op("Div", [value, self._constant(f"{name}/scale", scale)], f"{at}/scaled")
        if kind == ir.DataType.INT8:
            codes = self._op("Round", [codes], f"{at}/nearest")
        ends = [self._constant(f"{at}/{sign}", sign * _LARGEST[kind]) for sign in (-1, 1)]
        return self._cast(self._op("Clip", [codes, *ends], f"{at}/clipped"), kind, name)

    def _attend(
        self, first: Sequence[ir.Value | None], outputs: Sequence[str], reads: bool = False
    ) -> list[ir.Value]:
        left_out = ("k_norm_weight", "norm_values") if reads else ()
        behind = [None if name in left_out else self.inputs.get(name) for name in _BEHIND]
        inputs = [*first, *behind]
        while inputs[-1] is None:
            inputs.pop()
        attributes = {key: value for key, value in self.attributes.items() if key not in left_out}
        names = [f"{self.name}/{output}" for output in outputs]
        return self.build.ops("PagedAttention", inputs, names, name=names[0], domain=DOMAIN, **attributes)

    def _constant(self, name: str, values: object, dtype: type[np.generic] = np.float32) -> ir.Value:
        return self.build.constant(f"{self.name}/{name}", values, dtype)

    def _cast(self, x: ir.Value, kind: ir.DataType, name: str) -> ir.Value:
        return self.build.op("Cast", [x], name=name, to=int(kind))

    def _op(self, op_type: str, inputs: Sequence[ir.Value], name: str) -> ir.Value:
        return self.build.op(op_type, inputs, name=name)
