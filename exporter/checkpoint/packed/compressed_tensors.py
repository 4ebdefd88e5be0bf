"""compressed-tensors (llm-compressor): integers packed into words or as bytes, and FP8.

`X.weight_packed` [out, in·bits/32] has the codes of an output, the lowest bits first, each raised by half
its range; `X.weight` I8 has them as they are. `X.weight_scale` is [out, groups], [out, 1] or one value;
`X.weight_zero_point` has its shape, I8, or packed like the codes but along the outputs; `X.weight_g_idx`
[in] names the group of each input. The tensors say how a weight is stored, and one of the `config_groups`
must agree. FP8 weights are left to `checkpoint/fp8.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.packed.affine import AffineWeight, constant, scattered
from pagelet.exporter.checkpoint.packed.base import (
    FLOATS,
    PackedWeight,
    Parts,
    as_floats,
    raised,
    stands_for,
    unpack,
)
from pagelet.exporter.checkpoint.packed.settings import WHERE, choose, group_size, known_keys
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_KEYS = ("config_groups", "format", "quantization_status", "sparsity_config", "transform_config")
_OF_OTHERS = ("ignore", "global_compression_ratio", "run_compressed", "version", "kv_cache_scheme")
_OF_GROUPS = ("weights", "format", "targets", "input_activations", "output_activations")
_OF_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
_OF_MAKING = ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
Integers = Callable[[int, int], NDArray[Any]]


class CompressedTensors:
    """The scheme; `settings` is the quantization_config."""

    # Activations and the cache get scales of their own, from what is in them.
    leftovers: tuple[str, ...] = (
        *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
        *("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale"),
    )
    has_fp8 = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known_keys(settings, (*_KEYS, *_OF_OTHERS))
        choose(settings, "format", (*_FORMATS, "mixed-precision"))
        if settings.get("quantization_status") is not None:
            choose(settings, "quantization_status", ("compressed", "frozen"))
        if settings.get("transform_config"):
            choose(settings, "transform_config", (None, {}))
        sparsity = settings.get("sparsity_config")
        if sparsity:
            choose(
                sparsity if isinstance(sparsity, dict) else {},
                "format",
                ("dense",),
                WHERE + ".sparsity_config",
            )
        self._groups = list(_groups(settings))
        blocks = [group["block_structure"] for group in self._groups if group.get("block_structure")]
        self.fp8_block: object = blocks[0] if blocks else None
        if any(block != self.fp8_block for block in blocks):
            raise UnsupportedError(
                f"{WHERE}: block_structure is {blocks!r:.80}; expected one for all groups."
            )
        self.notes: tuple[str, ...] = ()
        if settings.get("kv_cache_scheme"):
            self.notes = (
                "the checkpoint's scales for a quantized KV cache are not used: --kv chooses its type",
            )

    def weights(self, parts: Parts) -> Iterator[PackedWeight]:
        for module in parts.modules(".weight_packed"):
            yield self._packed(parts, module)
        for module in parts.modules(".weight"):
            if parts.left[module + ".weight"].dtype == "I8":
                yield self._bytes(parts, module)

    def _packed(self, parts: Parts, module: str) -> AffineWeight:
        packed = parts.take(module + ".weight_packed", ("I32",), (None, None))
        outputs, inputs = _shape(parts, module)
        if packed.shape[0] != outputs or packed.shape[1] not in (-(-inputs // 8), -(-inputs // 4)):
            raise CheckpointError(
                f"{packed.name} is {list(packed.shape)} for a weight [{outputs}, {inputs}]; expected "
                f"[{outputs}, {-(-inputs // 8)}] of 4 bits or [{outputs}, {-(-inputs // 4)}] of 8."
            )
        bits = 4 if packed.shape[1] == -(-inputs // 8) else 8

        def codes(start: int, stop: int) -> NDArray[np.uint8]:
            return unpack(parts.rows(packed, start, stop), bits)[:, :inputs]

        return self._affine(parts, module, (outputs, inputs), bits, codes, packed)

    def _bytes(self, parts: Parts, module: str) -> AffineWeight:
        weight = parts.take(module + ".weight", ("I8",), (None, None))

        def codes(start: int, stop: int) -> NDArray[np.uint8]:
            return raised(parts.rows(weight, start, stop))

        return self._affine(parts, module, weight.shape, 8, codes, weight)

    def _affine(
        self,
        parts: Parts,
        module: str,
        shape: tuple[int, ...],
        bits: int,
        codes: Callable[[int, int], NDArray[np.uint8]],
        stored: TensorInfo,
    ) -> AffineWeight:
        outputs, inputs = shape
        scale = parts.left.get(module + ".weight_scale")
        groups = scale.shape[-1] or 1 if scale is not None and scale.shape else 1
        one = scale is not None and scale.shape in ((), (1,), (1, 1)) and outputs > 1
        if inputs % groups:
            raise CheckpointError(f"{stored.name}: {inputs} inputs do not divide into its {groups} groups.")
        size = inputs // groups if groups > 1 else 0
        expected = scale.shape if one and scale is not None else (outputs, groups)
        scale = parts.take(module + ".weight_scale", FLOATS, expected)
        zeros = self._zeros(parts, module, scale.shape, bits)
        strategy = "" if size else "tensor" if one else "channel"
        self._agree(stored.name, bits, zeros is None, inputs // groups, strategy)
        index = None
        if module + ".weight_g_idx" in parts.left:
            g_idx = parts.take(module + ".weight_g_idx", ("I32",), (inputs,))
            values = parts.whole(g_idx)
            if (values != -1).any():  # so are they where no order was chosen
                index = scattered(g_idx.name, values, groups, size)
        return AffineWeight(
            stands_for(module + ".weight", (outputs, inputs), f"CT_INT{bits}", [stored, scale]),
            bits=bits,
            group_size=size,
            codes=codes,
            scales=_scales(parts, scale, one=one),
            zeros=zeros or constant(1 << (bits - 1)),
            index=index,
        )

    def _zeros(self, parts: Parts, module: str, shape: tuple[int, ...], bits: int) -> Integers | None:
        """Raised by half the range, as the codes are; None where there are none."""
        name = module + ".weight_zero_point"
        if name not in parts.left:
            return None
        one = math.prod(shape) == 1
        if one or parts.left[name].dtype == "I8":  # one for all is never packed
            plain = parts.take(name, ("I8",), shape)
            read = _scales(parts, plain, one=one)
            return lambda start, stop: read(start, stop) + (1 << (bits - 1))
        per_word = 32 // bits
        packed = parts.take(name, ("I32",), (-(-shape[0] // per_word), shape[-1]))

        def zeros(start: int, stop: int) -> NDArray[np.uint8]:
            first = start // per_word
            stored = unpack(parts.rows(packed, first, -(-stop // per_word)).T, bits).T
            codes: NDArray[np.uint8] = stored[start - per_word * first : stop - per_word * first]
            return codes

        return zeros

    def _agree(self, name: str, bits: int, symmetric: bool, size: int, strategy: str) -> None:
        """`strategy`: "" of several groups; a single one of all inputs is a "channel" too."""
        for group in self._groups:
            same = (group["type"], group["num_bits"], group["symmetric"]) == ("int", bits, symmetric)
            of_groups = group["strategy"] == "group" and strategy != "tensor" and group_size(group) == size
            if same and (of_groups or group["strategy"] == strategy):
                return
        kind = "symmetric" if symmetric else "asymmetric"
        groups = f"a scale per {strategy}" if strategy else f"groups of {size}"
        raise CheckpointError(
            f"{name} has {bits} bits, is {kind} and has {groups}, but none of the config_groups in "
            "config.json says so. Download both again."
        )


def _groups(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The `weights` of every group, checked; none where FP8 weights have no groups."""
    if "config_groups" not in settings and settings["format"] == "float-quantized":
        return
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        raise UnsupportedError(f"{WHERE}: config_groups is {groups!r:.60}; expected an object.")
    for name, group in groups.items():
        where = f"{WHERE}.config_groups[{name!r:.40}]"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise UnsupportedError(f"{where} is {group!r:.60}; expected an object with 'weights'.")
        known_keys(group, _OF_GROUPS, where)
        if group.get("format") is not None or settings["format"] == "mixed-precision":
            choose(group, "format", _FORMATS, where)
        weights = group["weights"]
        where += ".weights"
        known_keys(weights, (*_OF_WEIGHTS, *_OF_MAKING), where)
        kind = choose(weights, "type", ("int", "float"), where)
        choose(weights, "num_bits", (4, 8) if kind == "int" else (8,), where)
        choose(weights, "symmetric", (True, False) if kind == "int" else (True,), where)
        known = ("group", "channel", "tensor") if kind == "int" else ("channel", "tensor", "block")
        if choose(weights, "strategy", known, where) == "group":
            group_size(weights, where=where)
        if weights.get("dynamic"):
            choose(weights, "dynamic", (False,), where)
        yield weights


def _shape(parts: Parts, module: str) -> tuple[int, int]:
    info = parts.take(module + ".weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = (int(size) for size in parts.whole(info))
    if not (0 < outputs < 1 << 31 and 0 < inputs < 1 << 31):
        raise CheckpointError(f"{info.name} holds {outputs}, {inputs}; expected two positive sizes.")
    return outputs, inputs


def _scales(parts: Parts, info: TensorInfo, *, one: bool) -> Callable[[int, int], NDArray[np.float32]]:
    """`one`: it has one value, for all rows."""
    if one:
        value = as_floats(parts.whole(info)).reshape(1, 1)
        return lambda start, stop: np.repeat(value, stop - start, axis=0)
    return lambda start, stop: as_floats(parts.rows(info, start, stop))
