"""GPTQ as AutoGPTQ and GPTQModel store it: `X.qweight`, `X.qzeros`, `X.scales` and maybe `X.g_idx`.

A word of `qweight` [in·bits/32, out] has the codes of 32/bits inputs of an output, a word of `qzeros`
[in/group, out·bits/32] zero points of as many outputs, the lowest bits first; `scales` is [in/group, out].
`g_idx` [in] names the group of each input. Files of the first version ("gptq") store the zero point less
one, cut to its bits; "gptq_v2" stores it as it is. Frantar et al. 2022 (GPTQ).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.packed.affine import AffineWeight, group_count, scattered
from pagelet.exporter.checkpoint.packed.base import FLOATS, PackedWeight, Parts, as_floats, stands_for, unpack
from pagelet.exporter.checkpoint.packed.settings import choose, group_size, known_keys
from pagelet.exporter.checkpoint.tensor_info import TensorInfo

_FORMATS = ("gptq", "gptq_v2")
# How it was made and how others run it: the tensors say the same without.
_OF_OTHERS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "sym", "dataset"),
    *("tokenizer", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
    *("batch_size", "pad_token_id", "max_input_length", "cache_block_outputs", "act_group_aware"),
    *("modules_in_block_to_quantize", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16"),
    *("backend", "meta", "model_name_or_path", "model_file_base_name", "lm_head", "mse", "parallel_packing"),
    *("uses_desc_act", "modules_to_not_convert", "inner_format", "tokenizer_config"),
)


class Gptq:
    """The scheme; `settings` is the quantization_config."""

    leftovers: tuple[str, ...] = ()
    fp8_block: object = None
    has_fp8 = False
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        meaningful = ("bits", "group_size", "desc_act", "checkpoint_format", "format")
        off = ("is_marlin_format", "dynamic")
        known_keys(settings, (*meaningful, "pack_dtype", *off, *_OF_OTHERS))
        self._bits: int = choose(settings, "bits", (4, 8))
        self._group_size = group_size(settings)
        self._desc_act: bool = choose(settings, "desc_act", (False, True))
        # The word came with the second version: files without it are of the first.
        formats = {
            choose(settings, key, _FORMATS) for key in ("checkpoint_format", "format") if settings.get(key)
        }
        if len(formats) > 1:
            choose(settings, "format", (settings["checkpoint_format"],))
        self._zero_less_one = "gptq_v2" not in formats
        if settings.get("pack_dtype") is not None:
            choose(settings, "pack_dtype", ("int32",))
        for key in off:
            if settings.get(key):
                choose(settings, key, (False, None))

    def weights(self, parts: Parts) -> Iterator[PackedWeight]:
        for module in parts.modules(".qweight"):
            yield self._weight(parts, module)

    def _weight(self, parts: Parts, module: str) -> AffineWeight:
        per_word = 32 // self._bits
        qweight = parts.take(module + ".qweight", ("I32",), (None, None))
        inputs, outputs = per_word * qweight.shape[0], qweight.shape[1]
        groups = group_count(qweight.name, inputs, self._group_size)
        qzeros = parts.take(module + ".qzeros", ("I32",), (groups, -(-outputs // per_word)))
        scales = parts.take(module + ".scales", FLOATS, (groups, outputs))
        index = None
        if self._desc_act or module + ".g_idx" in parts.left:
            g_idx = parts.take(module + ".g_idx", ("I32",), (inputs,))
            index = scattered(g_idx.name, parts.whole(g_idx), groups, self._group_size)
        name = f"GPTQ{self._bits}"
        return AffineWeight(
            stands_for(module + ".weight", (outputs, inputs), name, [qweight, qzeros, scales]),
            bits=self._bits,
            group_size=self._group_size,
            codes=lambda start, stop: unpack(parts.columns(qweight, start, stop).T, self._bits),
            scales=lambda start, stop: as_floats(parts.columns(scales, start, stop).T),
            zeros=self._zeros(parts, qzeros),
            index=index,
        )

    def _zeros(self, parts: Parts, qzeros: TensorInfo) -> Callable[[int, int], NDArray[np.uint8]]:
        per_word = 32 // self._bits

        def zeros(start: int, stop: int) -> NDArray[np.uint8]:
            first = start // per_word
            stored: NDArray[np.uint8] = unpack(parts.columns(qzeros, first, -(-stop // per_word)), self._bits)
            stored = stored[:, start - per_word * first : stop - per_word * first].T
            if self._zero_less_one:
                stored = stored + np.uint8(1) & np.uint8((1 << self._bits) - 1)
            return stored

        return zeros
