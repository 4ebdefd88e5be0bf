"""GGUF files: every type against gguf's own dequantization, and the rows of q and k put back in order."""

import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pagelet.exporter.checkpoint import Blocks, open_checkpoint
from pagelet.exporter.checkpoint.gguf_file import _can_dequantize
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.names import GGUF_NAMES
from pagelet.models.weight_shapes import source_name, weight_shapes

WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
READABLE = [kind.name for kind in GGML_QUANT_SIZES if _can_dequantize(kind)]


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    qtype = GGMLQuantizationType[kind]
    return dequantize(quantize(array, qtype), qtype)


@pytest.mark.parametrize("kind", WRITABLE)
def test_rows_equal_the_dequantized_originals(write_gguf, weights, kind):
    """A row is rounded alone, so rounding and permuting can be exchanged: the oracle needs no permutation."""
    with open_checkpoint(write_gguf(weights, kind)) as checkpoint:
        for role, array in weights.items():
            expected = array if array.ndim == 1 else rounded(array, kind)
            np.testing.assert_array_equal(checkpoint.read(role), expected)
            np.testing.assert_array_equal(checkpoint.read(role, 3, 41), expected[3:41])


@pytest.mark.parametrize("kind", READABLE)
def test_every_type_of_the_package_is_read_in_pieces(tmp_path, write_gguf, weights, kind):
    """Random bytes are valid codes of every type; NaN scales among them are handed on."""
    qtype = GGMLQuantizationType[kind]
    items, nbytes = GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(3).integers(0, 256, (256, 256 // items * nbytes), np.uint8)
    role = "layers.1.mlp.down.weight"
    path = write_gguf(weights)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "mixed.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name == source_name(role, GGUF_NAMES):
            writer.add_tensor(tensor.name, raw, raw_dtype=qtype)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = dequantize(raw, qtype)
    with open_checkpoint(tmp_path / "mixed.gguf") as checkpoint:
        assert checkpoint.weights[role].dtype == kind
        pieces = [checkpoint.read(role, at, min(at + 100, 256)) for at in range(0, 256, 100)]
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


def test_types_without_a_decoder_are_refused_by_name(write_gguf, weights):
    path = write_gguf(weights, "F32")
    data = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = (
        data.index(name) + len(name) + 4 + 16
    )  # the type stands behind the number of dimensions and two of them
    data[at : at + 4] = GGMLQuantizationType.I32.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"token_embd.weight has dtype I32, which cannot be read"):
        open_checkpoint(path)


def restored(blocks: Blocks) -> np.ndarray:
    """The formula of each kind, in float32 as gguf computes it."""
    rows = blocks.codes.shape[0]
    codes = blocks.codes.reshape(rows, -1, 32).astype(np.float32)
    scales = blocks.scales[..., None].astype(np.float32)
    if blocks.kind == "Q4_0":
        values = scales * (codes - 8)
    elif blocks.kind == "Q4_1":
        assert blocks.minimums is not None
        values = scales * codes + blocks.minimums[..., None].astype(np.float32)
    else:
        values = scales * codes
    return values.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_blocks_pass_through_exactly(write_gguf, weights, kind, bits):
    with open_checkpoint(write_gguf(weights, kind)) as checkpoint:
        for role, array in weights.items():
            blocks = checkpoint.read_blocks(role, 2, 40)
            if array.ndim == 1:
                assert blocks is None
                continue
            assert blocks is not None
            assert (blocks.kind, blocks.bits) == (kind, bits)
            assert blocks.codes.dtype == (np.int8 if bits == 8 else np.uint8)
            assert blocks.codes.shape == (38, array.shape[1])
            assert blocks.scales.shape == (38, array.shape[1] // 32)
            assert (blocks.minimums is not None) == (kind == "Q4_1")
            np.testing.assert_array_equal(restored(blocks), rounded(array, kind)[2:40])


@pytest.mark.parametrize("kind", ["F16", "Q5_1"])
def test_other_types_have_no_blocks(write_gguf, weights, kind):
    with open_checkpoint(write_gguf(weights, kind)) as checkpoint:
        assert checkpoint.read_blocks("embedding.weight") is None


def test_transformers_reads_the_same_weights(write_gguf, weights, spec):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(weights)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.layers[0].intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.layers[0].num_kv_heads,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    with open_checkpoint(path) as checkpoint:
        for role in checkpoint.weights:
            np.testing.assert_array_equal(
                checkpoint.read(role), theirs[source_name(role, spec.row.names)].numpy()
            )


def test_the_spec_is_that_of_the_config(write_gguf, weights, spec):
    with open_checkpoint(write_gguf(weights)) as checkpoint:
        ours = checkpoint.spec
        assert checkpoint.text_source["general.architecture"] == "llama"
        assert checkpoint.describe()["kind"] == "gguf"
    assert ours.norm.epsilon == pytest.approx(spec.norm.epsilon, rel=1e-7)  # float32 in the file
    assert replace(ours, norm=spec.norm) == spec


def test_biases_are_found_and_put_back_in_order(write_gguf, weights, spec):
    rng = np.random.default_rng(5)
    attention = replace(spec.attention, bias=True, output_bias=True)
    biased = replace(spec, attention=attention, mlp=replace(spec.mlp, bias=True))
    everything = {
        role: weights.get(role, rng.standard_normal(shape).astype(np.float32))
        for role, shape in weight_shapes(biased)
    }
    with open_checkpoint(write_gguf(everything)) as checkpoint:
        assert checkpoint.spec.attention == attention
        assert checkpoint.spec.mlp.bias
        for role, array in everything.items():
            np.testing.assert_array_equal(checkpoint.read(role, 3, 41), array[3:41])


def test_without_an_output_weight_the_head_is_tied(write_gguf, weights):
    body = {role: array for role, array in weights.items() if role != "head.weight"}
    with open_checkpoint(write_gguf(body)) as checkpoint:
        assert checkpoint.spec.tie_embeddings


def test_rope_factors_become_divisors(write_gguf, weights, spec):
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    with open_checkpoint(write_gguf(weights, extra={"rope_freqs.weight": factors})) as checkpoint:
        (rope,) = checkpoint.spec.ropes
        assert checkpoint.unused == ("rope_freqs.weight",)
    np.testing.assert_array_equal(rope.inverse_frequencies(), spec.ropes[0].inverse_frequencies() / factors)


@pytest.mark.parametrize(
    ("factors", "error", "match"),
    [
        (np.ones(31, np.float32), UnsupportedError, r"F32 \[31\]"),
        (np.full(32, np.nan, np.float32), CheckpointError, "not positive"),
        (np.zeros(32, np.float32), CheckpointError, "not positive"),
    ],
)
def test_false_rope_factors_are_refused(write_gguf, weights, factors, error, match):
    with pytest.raises(error, match=match):
        open_checkpoint(write_gguf(weights, extra={"rope_freqs.weight": factors}))


def test_linear_rope_scaling_is_read(write_gguf, weights):
    path = write_gguf(weights, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    with open_checkpoint(path) as checkpoint:
        (rope,) = checkpoint.spec.ropes
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        ({"llama__rope__scaling__type": "dynamic"}, UnsupportedError, "'dynamic'; known: none, linear"),
        ({"llama__rope__dimension_count": 32}, UnsupportedError, "only 32 of 64 elements are rotated"),
        ({"llama__expert_count": 8}, CheckpointError, "no 'num_experts_per_tok'"),
        ({"llama__attention__value_length": 32}, UnsupportedError, "different lengths"),
        ({"llama__attention__clamp_kqv": 1.0}, UnsupportedError, "unknown key 'attention.clamp_kqv'"),
        ({"llama__block_count": 2.0}, CheckpointError, "'block_count' is 2.0; expected int"),
        ({"llama__block_count": 1}, CheckpointError, r"blk.1.attn_norm.weight is unexpected"),
        ({"llama__block_count": 3}, CheckpointError, r"blk.2.attn_norm.weight is missing"),
        ({"llama__block_count": 1 << 30}, CheckpointError, "num_layers is 1073741824"),
        ({"llama__rope__freq_base": float("nan")}, CheckpointError, "expected a positive number"),
        ({"general__architecture": "mamba"}, UnsupportedError, "'mamba'"),
        ({"split__count": 2}, UnsupportedError, "gguf-split --merge"),
        ({"general__alignment": 48}, CheckpointError, "power of two"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused(write_gguf, weights, metadata, error, match):
    with pytest.raises(error, match=match):
        open_checkpoint(write_gguf(weights, **metadata))


def test_a_few_rows_cost_the_memory_of_a_few_rows(write_gguf, weights):
    with open_checkpoint(write_gguf(weights)) as checkpoint:
        checkpoint.read("layers.0.attention.q.weight", 0, 1)
        tracemalloc.start()
        checkpoint.read("layers.0.attention.q.weight", 70, 72)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Two rows of a half lie three rows apart in the file; a row has 1 KiB, a head 64, the tensor 256.
    assert peak < 16 * 1024


def test_smollm2_opens_and_its_blocks_are_its_values(smollm2_gguf):
    with open_checkpoint(smollm2_gguf) as checkpoint:
        assert checkpoint.spec.tie_embeddings
        assert checkpoint.describe()["dtypes"] == {"Q8_0": 1, "Q4_1": 210, "F32": 61}
        for role in ("embedding.weight", "layers.17.mlp.down.weight", "layers.29.attention.k.weight"):
            blocks = checkpoint.read_blocks(role, 11, 99)
            assert blocks is not None
            np.testing.assert_array_equal(restored(blocks), checkpoint.read(role, 11, 99))
