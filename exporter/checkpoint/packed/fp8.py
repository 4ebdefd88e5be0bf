"""Checkpoints of FP8 alone: nothing is packed, `checkpoint/fp8.py` reads weights and scales."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagelet.exporter.checkpoint.packed.base import PackedWeight, Parts
from pagelet.exporter.checkpoint.packed.settings import choose, known_keys

# Of activations, which get scales of their own, and which weights stayed plain.
_OF_OTHERS = (
    "activation_scheme",
    "activation_scale_ub",
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
)


class Fp8:
    """The scheme; `settings` is the quantization_config."""

    leftovers: tuple[str, ...] = ()
    has_fp8 = True
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known_keys(settings, ("weight_block_size", "fmt", "scale_fmt", *_OF_OTHERS))
        if settings.get("fmt") is not None:
            choose(settings, "fmt", ("e4m3",))
        if settings.get("scale_fmt") is not None:  # powers of two, as floats
            choose(settings, "scale_fmt", ("float", "ue8m0"))
        self.fp8_block: object = settings.get("weight_block_size")

    def weights(self, parts: Parts) -> Iterator[PackedWeight]:
        yield from ()
