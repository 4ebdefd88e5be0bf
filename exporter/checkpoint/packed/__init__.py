"""Checkpoints whose weights are quantized in the files: one scheme for each `quant_method`.

A scheme puts one weight in the place of the tensors that it consists of: read as float32, and, where our
blocks have the same form, as the file's own codes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pagelet.exporter.checkpoint.packed.awq import Awq
from pagelet.exporter.checkpoint.packed.base import PackedExperts, PackedWeight, Parts, Scheme
from pagelet.exporter.checkpoint.packed.bitsandbytes import BitsAndBytes
from pagelet.exporter.checkpoint.packed.compressed_tensors import CompressedTensors
from pagelet.exporter.checkpoint.packed.fp8 import Fp8
from pagelet.exporter.checkpoint.packed.gptq import Gptq
from pagelet.exporter.checkpoint.packed.mxfp4 import Mxfp4
from pagelet.models.errors import UnsupportedError

__all__ = ["SCHEMES", "PackedExperts", "PackedWeight", "Parts", "Scheme", "scheme_of"]

SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that config.json's `quantization_config` names; None where the weights are plain.

    Raises:
        UnsupportedError: one that is not known, or a setting of it.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in SCHEMES:
        raise UnsupportedError(
            f"config.json says that the weights are quantized already ({method!r:.40}); this version reads "
            f"{', '.join(SCHEMES)}. Export the original weights."
        )
    return SCHEMES[method](settings)
