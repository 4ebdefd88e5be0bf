"""Packed weights whose settings are not known, or whose parts do not belong together."""

import json
from typing import Any

import numpy as np
import packers
import pytest
from packers import AWQ, BNB, GPTQ, Array, Tensors, compressed, draw, named, opened

from pagelet.exporter.checkpoint.packed import SCHEMES
from pagelet.models.errors import CheckpointError, UnsupportedError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ, "group_size is None"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (AWQ | {"group_size": 128, "bits": 3}, "bits is 3; this version reads 4"),
        (AWQ | {"group_size": 128, "version": "gemv"}, "version is 'gemv'"),
        (AWQ | {"group_size": 128, "version": None}, "version is None"),
        (AWQ | {"group_size": 128, "backend": "llm-awq"}, "backend is 'llm-awq'"),
        (AWQ | {"group_size": 128, "zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 128, "zero_point": 1}, "zero_point is 1"),
        (AWQ | {"group_size": 128, "rotation": "x"}, "unknown key 'rotation'"),
        (GPTQ | {"group_size": 128, "bits": 2}, "bits is 2"),
        (GPTQ | {"group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"group_size": 128, "checkpoint_format": "gptq", "format": "gptq_v2"}, "format is 'gptq_v2'"),
        (GPTQ | {"group_size": 128, "dynamic": {"+:x": {"bits": 8}}}, "dynamic is"),
        (GPTQ | {"group_size": 128, "pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "'desc_act' is missing"),
        (compressed("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3"),
        (compressed("pack-quantized", strategy="tensor_group"), "strategy is 'tensor_group'"),
        (compressed("pack-quantized", dynamic=True), "dynamic is True"),
        (compressed("pack-quantized", rotated=True), "unknown key 'rotated'"),
        (compressed("pack-quantized") | {"transform_config": {"a": 1}}, "transform_config is"),
        (compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (compressed("pack-quantized") | {"config_groups": None}, "config_groups is None"),
        (compressed("mixed-precision"), "'format' is missing"),
        (BNB | {"load_in_8bit": True}, "load_in_8bit is True"),
        (BNB | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'"),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
        ({"quant_method": "mxfp4", "dequantize": True}, "dequantize is True"),
    ],
)
def test_settings_that_are_not_known(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SCHEMES[config["quant_method"]](config)


def cut(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def missing(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def changed(name: str, value: Array) -> Any:
    return lambda tensors: tensors.update({name: value})


GPTQ_32 = (GPTQ | {"group_size": 32}, packers.gptq(*draw(0, 16, 64, 2)))
AWQ_32 = (AWQ | {"group_size": 32}, packers.awq(*draw(0, 16, 64, 2)))
PACKED = (compressed("pack-quantized", symmetric=False), packers.pack_quantized(*draw(0, 16, 64, 2)))
NF4 = (BNB, packers.nf4(np.zeros((4, 32), int), np.ones(2, np.float32), 64))
QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Array:
    stored = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [4, 32]} | changes
    return np.frombuffer(json.dumps(stored).encode(), np.uint8)


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        (AWQ_32, missing("scales"), "a.scales is missing"),
        (AWQ_32, cut("qzeros"), r"a.qzeros is I32 \[1, 2\]; expected I32 \[2, 2\]"),
        (AWQ_32, cut("qweight"), "63 inputs do not divide into its groups of 32"),
        (AWQ_32, changed("scales", np.ones((2, 16), np.int32)), "a.scales is I32 .* expected F32 or F16"),
        (GPTQ_32, missing("qzeros"), "a.qzeros is missing"),
        (GPTQ_32, cut("scales"), r"a.scales is F16 \[1, 16\]"),
        (
            GPTQ_32,
            changed("g_idx", np.full(64, 2, np.int32)),
            "a.g_idx holds 2 to 2; expected groups from 0 to 1",
        ),
        (GPTQ_32, changed("g_idx", np.zeros(63, np.int32)), r"a.g_idx is I32 \[63\]"),
        (PACKED, missing("weight_shape"), "a.weight_shape is missing"),
        (PACKED, missing("weight_scale"), "a.weight_scale is missing"),
        (
            PACKED,
            missing("weight_zero_point"),
            "is symmetric and has groups of 32, but none of the config_groups",
        ),
        (PACKED, changed("weight_scale", np.ones((16, 0), np.float16)), r"weight_scale is F16 \[16, 0\]"),
        (
            PACKED,
            changed("weight_scale", np.ones((16, 3), np.float16)),
            "64 inputs do not divide into its 3 groups",
        ),
        (
            PACKED,
            changed("weight_scale", np.ones((), np.float16)),
            r"weight_zero_point is I32 .* expected I8 \[\]",
        ),
        (PACKED, changed("weight_shape", np.array([16, 1 << 40])), "holds 16, 1099511627776"),
        (PACKED, changed("weight_shape", np.array([16, 65])), "for a weight .16, 65."),
        (NF4, missing("weight.absmax"), "absmax is missing"),
        (NF4, cut("weight.quant_map"), "quant_map is F32 .15."),
        (NF4, cut("weight"), r"a.weight is U8 \[63, 1\]; expected U8 \[64, 1\]"),
        (NF4, changed(QUANT_STATE, state(shape=[4, -1])), "expected nf4 of two sizes"),
        (NF4, changed(QUANT_STATE, state(blocksize=0)), "expected nf4 of two sizes"),
        (NF4, changed(QUANT_STATE, state(rotated=True)), "unknown key 'rotated'"),
        (NF4, changed(QUANT_STATE, state(quant_type="fp4")), "expected nf4"),
        (NF4, changed(QUANT_STATE, np.full(9, 0xFF, np.uint8)), "no UTF-8"),
        (NF4, changed("weight.quant_map", np.full(16, np.nan, np.float32)), "holds NaN"),
    ],
)
def test_parts_that_do_not_belong_together(
    form: tuple[dict[str, Any], Tensors], damage: Any, message: str
) -> None:
    config, good = form
    tensors = dict(good)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message), opened(config, named("a", tensors)):
        pass
