"""The largest magnitudes that a model meets on a text: what static scales are made of.

The maximum, and no percentile of it. What lies beyond a percentile are the few channels and the first tokens
that most heads attend to: clipping them is no rounding error but another attention, in every later row. And
it would win little: FP8 keeps three bits of mantissa down to 2^-15 of the largest number, so a larger scale
costs ordinary numbers nothing; INT8 does lose by it, and a scale per token is what cures that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagelet.exporter.calibration.moments import rms_norm
from pagelet.exporter.graph_layer import fused_norm
from pagelet.exporter.layerwise import Layerwise, Taps
from pagelet.exporter.part import Part
from pagelet.exporter.stream import Float32
from pagelet.exporter.weights import StoredTensor
from pagelet.models.errors import CheckpointError
from pagelet.plugins.reference import normalize, rotate, split_heads

OnStep = Callable[[int, int, str], None]

LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class Ranges:
    """Largest magnitudes over all tokens of a text.

    Attributes:
        inputs: of what each linear module reads, norms that are part of it done: by the module's name
            (`exporter.modules`), "head" for the head even where the embedding is its weight. Routed modules
            are missing: which tokens they see is not known here.
        caches: (keys, values) as they are stored, normed and rotated: by each layer that has its own.
    """

    inputs: Mapping[str, float]
    caches: Mapping[int, tuple[float, float]]

    def input_scale(self, module: str) -> float:
        """Of the module's activations in FP8 E4M3."""
        return _scale(self.inputs[module], "fp8")

    def cache_scales(self, layer: int, cache_type: str) -> tuple[float, float]:
        """Of a layer's keys and values, one for each whole cache; `cache_type`: "int8" or "fp8"."""
        keys, values = self.caches[layer]
        return _scale(keys, cache_type), _scale(values, cache_type)


def _scale(largest: float, code_type: str) -> float:
    return largest / LARGEST_CODE[code_type] or 1.0  # nothing but zeros: any scale keeps them


def measure_ranges(
    run: Layerwise, part: Part, *, on_progress: OnStep = lambda done, total, name: None
) -> Ranges:
    """Run a whole model over the texts of `run`, a layer at a time.

    Args:
        run: its cache should be "f32": a quantized one would add its own errors to the keys of later layers.
        part: the weights as they were written; a quantizer may have moved factors from inputs into norms.
        on_progress: told (done, total, what comes next).

    Raises:
        CheckpointError: a layer computes NaN or infinity; it is named.
    """
    spec = part.spec
    total = spec.num_layers + 2
    on_progress(0, total, "embedding")
    stream = run.embed(part)
    inputs: dict[str, float] = {}
    if spec.layer_inputs:
        inputs["layer_inputs.projection"] = _largest(stream.residual, "layer_inputs.projection")
    caches: dict[int, tuple[float, float]] = {}
    for layer in range(spec.num_layers):
        on_progress(1 + layer, total, f"layers.{layer}")
        ranges = _LayerRanges(part, layer, max(run.texts.lengths))
        stream = run.layer(part, layer, stream, ranges.add)
        inputs |= {f"layers.{layer}.{module}": value for module, value in ranges.inputs.items()}
        if not spec.layers[layer].shares_cache:
            caches[layer] = ranges.cache["keys"], ranges.cache["values"]
    on_progress(total - 1, total, "head")
    inputs["head"] = max(
        _largest(_final_norm(part, stream.residual[rows]), "head") for rows, _ in run.texts.batches()
    )
    on_progress(total, total, "")
    return Ranges(inputs, caches)


def read_vector(part: Part, name: str) -> Float32:
    """A vector or table of the weights file, float32 of its own shape."""
    tensor: StoredTensor = part.weights.vectors[name]
    count = int(np.prod(tensor.shape))
    found = np.fromfile(part.folder / "model.weights", "<f4", count, offset=tensor.offset)
    return found.reshape(tensor.shape)


class _LayerRanges:
    """Of one layer, told of one run after another."""

    def __init__(self, part: Part, layer: int, longest: int) -> None:
        """`longest`: tokens of the longest text."""
        self._spec, self._part, self._layer = part.spec, part, layer
        self._kind, self._at = part.spec.layers[layer], f"layers.{layer}."
        self.inputs: dict[str, float] = {}
        self.cache: dict[str, float] = {}
        attention = self._spec.attention
        self._norms = {
            module: self._norm_weight(fused_norm(self._spec, layer, module)) for module in self._read_normed()
        }
        self._k_norm: Float32 | None = None
        if attention.norm and not self._kind.shares_cache:
            own = self._at + "attention.k_norm.weight" if attention.norm_weight else "head_norm.ones"
            self._k_norm = read_vector(part, own)
        self._rotation: tuple[Float32, Float32] | None = None
        if self._kind.rope >= 0:
            self._rotation = self._spec.ropes[self._kind.rope].tables(longest)

    def _read_normed(self) -> list[str]:
        """The modules that may do a norm themselves."""
        return ["attention.qkv"] if self._kind.experts else ["attention.qkv", self._first_of_mlp]

    @property
    def _first_of_mlp(self) -> str:
        return "mlp.gate_up" if self._spec.mlp.gated else "mlp.up"

    def _norm_weight(self, role: str) -> Float32 | None:
        if not role:
            return None
        return read_vector(self._part, role + ".weight" if self._spec.norm.weight else "norm.ones")

    def add(self, taps: Taps, lengths: Sequence[int]) -> None:
        """One run's taps over texts of `lengths` (`Layerwise.layer`)."""
        self._add("attention.qkv", self._normed("attention.qkv", taps["attention_in"]))
        if not self._kind.shares_cache:
            self._add_cache(taps["qkv"], np.concatenate([np.arange(length) for length in lengths]))
        self._add("attention.o", taps["attended"])
        if not self._kind.experts:
            self._add(self._first_of_mlp, self._normed(self._first_of_mlp, taps["mlp_in"]))
            self._add("mlp.down", taps["gated"])
        if self._spec.layer_inputs:
            self._add("inputs.gate", taps["inputs_in"])
            self._add("inputs.projection", taps["inputs_gated"])

    def _normed(self, module: str, x: Float32) -> Float32:
        weight = self._norms[module]
        if weight is None:
            return x
        with np.errstate(over="ignore", invalid="ignore"):  # `_largest` reports it
            return rms_norm(x, weight, self._spec.norm.epsilon)

    def _add_cache(self, qkv: Float32, positions: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        """Keys and values as `plugins.reference` stores them; what it computes stands there."""
        spec, kind, attention = self._spec, self._kind, self._spec.attention
        ends = np.cumsum([spec.query_size(self._layer), spec.kv_size(self._layer)])
        _, rows, values = np.split(qkv, ends, axis=1)
        if attention.norm == "row":
            rows = normalize(rows, self._k_norm, spec.norm.epsilon)
        keys = split_heads(rows, kind.head_dim)
        if attention.norm == "head" and not attention.norm_after_rotation:
            keys = normalize(keys, self._k_norm, spec.norm.epsilon)
        if self._rotation is not None:
            cos, sin = (table[positions] for table in self._rotation)
            width = spec.ropes[kind.rope].rotary_dim
            keys = rotate(keys, cos, sin, width, attention.rotary_interleaved)
        if attention.norm == "head" and attention.norm_after_rotation:
            keys = normalize(keys, self._k_norm, spec.norm.epsilon)
        if attention.norm_values:
            values = normalize(split_heads(values, kind.head_dim), None, spec.norm.epsilon)
        self._keep(self.cache, "keys", keys)
        self._keep(self.cache, "values", values)

    def _add(self, module: str, x: Float32) -> None:
        self._keep(self.inputs, module, x)

    def _keep(self, known: dict[str, float], name: str, x: Float32) -> None:
        known[name] = max(known.get(name, 0.0), _largest(x, self._at + name))


def _largest(x: Float32, where: str) -> float:
    largest = float(max(x.max(), -x.min()))  # without a second array of magnitudes
    if not np.isfinite(largest):
        raise CheckpointError(
            f"{where} reads or gives NaN or infinity on the calibration text: the weights before it are "
            "damaged, or too large for float32."
        )
    return largest


def _final_norm(part: Part, x: Float32) -> Float32:
    """What the head reads of the residual stream x [T, hidden]."""
    norm = part.spec.norm
    weight = read_vector(part, "final_norm.weight") if norm.weight else np.float32(1)
    if norm.type == "rms":
        return rms_norm(x, weight, norm.epsilon)
    centred = rms_norm(x - x.mean(axis=1, keepdims=True), weight, norm.epsilon)
    return centred + read_vector(part, "final_norm.bias") if norm.bias else centred
