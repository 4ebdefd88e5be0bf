"""AWQ as AutoAWQ stores it for GEMM: `X.qweight`, `X.qzeros` and `X.scales`, four bits, inputs first.

A word of `qweight` [in, out/8] has eight outputs of an input, and of `qzeros` [in/group, out/8] their zero
points, in the order 0 2 4 6 1 3 5 7 from the lowest bits on. `scales` is [in/group, out].
Lin et al. 2023 (AWQ); the layout is that of AutoAWQ's WQLinear_GEMM.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.packed.affine import AffineWeight, group_count
from pagelet.exporter.checkpoint.packed.base import FLOATS, PackedWeight, Parts, as_floats, stands_for, unpack
from pagelet.exporter.checkpoint.packed.settings import choose, group_size, known_keys
from pagelet.exporter.checkpoint.tensor_info import TensorInfo

# Where output o of a word stands in it.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# How it was made and how others run it: the tensors say the same without.
_OF_OTHERS = (
    *("modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "meta"),
    *("desc_act", "sym", "damp_percent", "true_sequential", "dataset", "tokenizer", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id"),
    *("max_input_length", "cache_block_outputs", "modules_in_block_to_quantize", "act_group_aware"),
)


class Awq:
    """The scheme; `settings` is the quantization_config."""

    leftovers: tuple[str, ...] = ()
    fp8_block: object = None
    has_fp8 = False
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known_keys(
            settings, ("bits", "group_size", "zero_point", "version", "format", "backend", *_OF_OTHERS)
        )
        choose(settings, "bits", (4,))
        choose(settings, "zero_point", (True,))
        # Newer files say `format`, and may say both.
        for key in [key for key in ("version", "format") if settings.get(key)] or ["version"]:
            choose(settings, key, ("gemm", "GEMM"))
        if settings.get("backend") is not None:  # "llm-awq" packs otherwise
            choose(settings, "backend", ("autoawq", "auto", "auto_trainable"))
        self._group_size = group_size(settings)

    def weights(self, parts: Parts) -> Iterator[PackedWeight]:
        for module in parts.modules(".qweight"):
            yield self._weight(parts, module)

    def _weight(self, parts: Parts, module: str) -> AffineWeight:
        qweight = parts.take(module + ".qweight", ("I32",), (None, None))
        inputs, words = qweight.shape
        groups = group_count(qweight.name, inputs, self._group_size)
        qzeros = parts.take(module + ".qzeros", ("I32",), (groups, words))
        scales = parts.take(module + ".scales", FLOATS, (groups, 8 * words))
        return AffineWeight(
            stands_for(module + ".weight", (8 * words, inputs), "AWQ4", [qweight, qzeros, scales]),
            bits=4,
            group_size=self._group_size,
            codes=partial(_outputs, parts, qweight),
            scales=lambda start, stop: as_floats(parts.columns(scales, start, stop).T),
            zeros=partial(_outputs, parts, qzeros),
        )


def _outputs(parts: Parts, info: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
    """Outputs [start:stop] of packed words [n, out/8], uint8 [outputs, n]."""
    first = start // 8
    words = parts.columns(info, first, -(-stop // 8))
    codes = unpack(words, 4).reshape(*words.shape, 8)[..., _PLACES].reshape(len(words), -1)
    return np.ascontiguousarray(codes.T[start - 8 * first : stop - 8 * first])
