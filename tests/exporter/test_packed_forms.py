"""Weights that are quantized in the files, in each form: read as their definition says."""

import ml_dtypes
import numpy as np
import packers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packers import AWQ, BNB, GPTQ, Array, compressed, dequantized, draw, named, opened

from pagelet.exporter.checkpoint.base import Blocks
from pagelet.exporter.checkpoint.packed import PackedWeight
from pagelet.exporter.checkpoint.packed.mxfp4 import Mxfp4Experts

few = settings(max_examples=25, deadline=None)
sizes = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.sampled_from([32, 64, 128])
)  # 8 outs, groups, group


def check(weight: PackedWeight, expected: Array) -> None:
    """All of it, and every cut of it."""
    rows = len(expected)
    assert weight.info.shape == expected.shape
    for start, stop in ((0, rows), (0, 1), (rows // 2, rows), (rows - 1, rows), (rows // 3, rows // 3 + 1)):
        # The same products of the same float32 numbers.
        np.testing.assert_array_equal(weight.read(start, stop), expected[start:stop])


def restored(blocks: Blocks) -> Array:
    size = blocks.group_size or blocks.codes.shape[1]
    scales = np.repeat(blocks.scales.astype(np.float32), size, axis=1)
    if blocks.minimums is not None:
        return scales * blocks.codes + np.repeat(blocks.minimums.astype(np.float32), size, axis=1)
    return scales * (blocks.codes.astype(np.float32) - (8 if blocks.kind == "Q4_0" else 0))


def check_blocks(weight: PackedWeight, codes: Array, expected: Array) -> None:
    """The file's own codes, and numbers that differ by the minimum's rounding to FP16 alone."""
    blocks = weight.blocks(1, len(codes))
    assert blocks is not None
    assert weight.obstacle == ""
    shift = 128 if blocks.kind == "Q8_0" else 0
    np.testing.assert_array_equal(blocks.codes.astype(int) + shift, codes[1:])
    error = np.abs(restored(blocks) - expected[1:])
    if blocks.exact and blocks.minimums is None:
        assert error.max() == 0
    # Of a minimum up to 15 · 0.1, and the sum's own rounding.
    assert error.max() <= 1.5 * 2.0**-11 + 1e-6


@few
@given(sizes, st.integers(0, 99))
def test_awq(size: tuple[int, int, int], seed: int) -> None:
    outs, groups, group = size
    codes, zeros, scales = draw(seed, 8 * outs, groups * group, groups)
    with opened(AWQ | {"group_size": group}, named("a", packers.awq(codes, zeros, scales))) as (
        (weight,),
        parts,
    ):
        assert not parts.left
        assert (weight.info.name, weight.info.dtype) == ("a.weight", "AWQ4")
        expected = dequantized(codes, zeros, scales)
        check(weight, expected)
        check_blocks(weight, codes, expected)


@few
@given(sizes, st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.integers(0, 99))
def test_gptq(size: tuple[int, int, int], bits: int, version: int, seed: int) -> None:
    outs, groups, group = size
    codes, zeros, scales = draw(seed, 8 * outs, groups * group, groups, bits)
    config = GPTQ | {"bits": bits, "group_size": group}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    index = np.arange(groups * group, dtype=np.int32) // group
    tensors = named("a", packers.gptq(codes, zeros, scales, bits=bits, version=version) | {"g_idx": index})
    with opened(config, tensors) as ((weight,), parts):
        assert not parts.left
        expected = dequantized(codes, zeros, scales)
        check(weight, expected)
        if bits == 4:
            check_blocks(weight, codes, expected)
        elif (zeros != 128).any():
            assert weight.blocks(0, 1) is None
            assert "zero point" in weight.obstacle


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_gptq_has_symmetric_blocks(bits: int) -> None:
    codes, _, scales = draw(1, 16, 128, 2, bits)
    zeros = np.full((16, 2), 1 << (bits - 1))
    tensors = named("a", packers.gptq(codes, zeros, scales, bits=bits))
    with opened(GPTQ | {"bits": bits, "group_size": 64}, tensors) as ((weight,), _):
        blocks = weight.blocks(0, 16)
        assert blocks is not None
        assert (blocks.kind, blocks.group_size, blocks.exact) == (f"Q{bits}_0", 64, True)
        check_blocks(weight, codes, dequantized(codes, zeros, scales))


def test_scattered_groups_are_read_exactly_and_have_no_blocks() -> None:
    codes, zeros, scales = draw(2, 24, 128, 4)
    index = np.random.default_rng(3).permutation(np.arange(128, dtype=np.int32) // 32)
    tensors = named("a", packers.gptq(codes, zeros, scales) | {"g_idx": index})
    with opened(GPTQ | {"group_size": 32, "desc_act": True}, tensors) as ((weight,), _):
        check(weight, dequantized(codes, zeros, scales, index))
        assert weight.blocks(0, 24) is None
        assert "act-order" in weight.obstacle


def test_one_group_for_all_inputs() -> None:
    codes, zeros, scales = draw(4, 16, 96, 1)
    with opened(GPTQ | {"group_size": -1}, named("a", packers.gptq(codes, zeros, scales))) as ((weight,), _):
        check(weight, dequantized(codes, zeros, scales))
        check_blocks(weight, codes, dequantized(codes, zeros, scales))


def test_scales_that_fp16_does_not_hold_are_no_blocks() -> None:
    codes, zeros, scales = draw(5, 16, 64, 1, dtype=np.float32)
    scales[7] = 70_000
    with opened(GPTQ | {"group_size": 64}, named("a", packers.gptq(codes, zeros, scales))) as ((weight,), _):
        check(weight, dequantized(codes, zeros, scales))
        assert weight.blocks(0, 1) is None
        assert "beyond FP16" in weight.obstacle


@few
@given(sizes, st.sampled_from([4, 8]), st.booleans(), st.integers(0, 99))
def test_pack_quantized(size: tuple[int, int, int], bits: int, symmetric: bool, seed: int) -> None:
    outs, groups, group = size
    rows = 8 * outs - 3  # packed zero points are padded along the outputs
    codes, zeros, scales = draw(seed, rows, groups * group, groups, bits, ml_dtypes.bfloat16)
    middle = np.full_like(zeros, 1 << (bits - 1))
    stored = packers.pack_quantized(codes, None if symmetric else zeros, scales, bits=bits)
    config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, group_size=group)
    if groups == 1 and seed % 2:  # a group of all inputs may be called either
        config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, strategy="channel")
    with opened(config, named("a", stored)) as ((weight,), parts):
        assert not parts.left
        expected = dequantized(codes, middle if symmetric else zeros, scales)
        check(weight, expected)
        if symmetric or bits == 4:
            check_blocks(weight, codes, expected)


def test_pack_quantized_with_an_order_and_with_plain_zero_points() -> None:
    codes, zeros, scales = draw(6, 12, 128, 4)
    index = np.random.default_rng(7).permutation(np.arange(128, dtype=np.int32) // 32)
    stored = packers.pack_quantized(codes, zeros, scales)
    ordered = stored | {"weight_g_idx": index}
    unordered = stored | {
        "weight_g_idx": np.full(128, -1, np.int32),
        "weight_zero_point": (zeros - 8).astype(np.int8),
    }
    config = compressed("pack-quantized", symmetric=False, actorder="group")
    with opened(config, named("a", ordered) | named("b", unordered)) as ((first, second), parts):
        assert not parts.left
        check(first, dequantized(codes, zeros, scales, index))
        assert first.blocks(0, 1) is None
        check(second, dequantized(codes, zeros, scales))
        check_blocks(second, codes, dequantized(codes, zeros, scales))


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(format: str, strategy: str, symmetric: bool) -> None:
    codes, zeros, scales = draw(8, 20, 64, 1, 8, np.float32)
    if strategy == "tensor":
        zeros, scales = zeros[:1], scales[:1]
    tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
    full = np.broadcast_to(zeros if not symmetric else [[128]], (20, 1))
    config = compressed(format, num_bits=8, symmetric=symmetric, strategy=strategy, group_size=None)
    with opened(config, named("a", tensors)) as ((weight,), parts):
        assert not parts.left
        expected = dequantized(codes, full, np.broadcast_to(scales, (20, 1)))
        check(weight, expected)
        if symmetric:
            blocks = weight.blocks(0, 20)
            assert blocks is not None
            np.testing.assert_array_equal(blocks.codes, tensors["weight"])
            assert not blocks.exact  # the scale is a float32: FP16 holds 11 of its bits
            np.testing.assert_allclose(restored(blocks), expected, rtol=2.0**-11)


@few
@given(st.integers(1, 7), st.integers(1, 90), st.sampled_from([64, 128]), st.booleans(), st.integers(0, 99))
def test_nf4(rows: int, inputs: int, blocksize: int, nested: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, inputs))
    blocks = -(-codes.size // blocksize)
    absmax: Array = rng.uniform(0.01, 1, blocks).astype(np.float32)
    tensors = packers.nf4(codes, absmax, blocksize)
    if nested:
        quantized = rng.integers(0, 256, blocks).astype(np.uint8)
        values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.1, 1, -(-blocks // 4)).astype(np.float32)
        state = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors = packers.nf4(codes, quantized, blocksize, **state)
        tensors |= {"weight.nested_quant_map": values, "weight.nested_absmax": outer}
        absmax = values[quantized] * np.repeat(outer, 4)[:blocks] + np.float32(0.25)
    flat = packers.NF4[codes.reshape(-1)] * np.repeat(absmax, blocksize)[: codes.size]
    with opened(BNB, named("a", tensors)) as ((weight,), parts):
        assert not parts.left
        check(weight, flat.reshape(codes.shape))
        assert weight.blocks(0, 1) is None
        assert weight.obstacle


def test_llm_int8() -> None:
    rng = np.random.default_rng(9)
    codes = rng.integers(-127, 128, (24, 64)).astype(np.int8)
    scb = rng.uniform(0.5, 2, 24).astype(np.float32)
    tensors = {"a.weight": codes, "a.SCB": scb, "a.weight_format": np.array(0, np.uint8)}
    config = BNB | {"load_in_4bit": False, "load_in_8bit": True}
    with opened(config, tensors) as ((weight,), parts):
        assert not parts.left
        # SCB / 127 is rounded once, its product once more.
        np.testing.assert_allclose(
            weight.read(0, 24), codes * scb.astype(np.float64)[:, None] / 127, rtol=2.0**-22
        )
        blocks = weight.blocks(3, 24)
        assert blocks is not None
        np.testing.assert_array_equal(blocks.codes, codes[3:])


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(10)
    blocks = rng.integers(0, 256, (3, 6, 2, 16)).astype(np.uint8)
    scales = rng.integers(110, 135, (3, 6, 2)).astype(np.uint8)
    expected = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    ).numpy()
    assert expected.shape == (3, 64, 6)
    tensors = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    with opened({"quant_method": "mxfp4"}, tensors) as ((weight,), parts):
        assert not parts.left
        assert isinstance(weight, Mxfp4Experts)
        assert (weight.info.name, weight.info.dtype) == ("experts.gate_up_proj", "MXFP4")
        check(weight, expected)
        np.testing.assert_array_equal(weight.read_expert(2, 1, 5), expected[2].T[1:5])


def test_a_scale_of_mxfp4_that_is_no_number() -> None:
    tensors = {
        "a_blocks": np.full((1, 1, 1, 16), 0x22, np.uint8),
        "a_scales": np.full((1, 1, 1), 255, np.uint8),
    }
    with opened({"quant_method": "mxfp4"}, tensors) as ((weight,), _):
        assert np.isnan(weight.read(0, 1)).all()
