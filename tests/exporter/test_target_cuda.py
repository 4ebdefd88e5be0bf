"""The graph of target `cuda`: valid by ONNX Runtime's own schemas, and the numbers of the CPU's graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cuda_on_cpu import Ragged, attention_nodes, on_cpu, run_steps
from families.conftest import write_family
from families.rows import ROWS, Row
from folding import job_in, write
from hypothesis import given
from hypothesis import strategies as st
from lowered import distance, in_float32
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pagelet.exporter.calibration.ranges import measure_ranges
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.graph_attention import Step, add_attention
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import RoundToNearest
from pagelet.exporter.targets.cuda import CudaBuilder, CudaLayout
from pagelet.exporter.targets.lowering import lower_weights
from pagelet.exporter.weights import StoredWeights, WeightsFile
from pagelet.plugins import packing
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat
from pagelet.plugins.session import open_session

Float32 = NDArray[np.float32]
INT4 = LinearFormat(4, 32, asymmetric=False)
INT8 = LinearFormat(8, 32, asymmetric=False)
F16 = FloatFormat("f16")
BLOCK = 16  # so that windows and contexts take several blocks; devices want more
TABLES = np.asarray([[5, 2, 7, 0], [1, 6, 3, -1]], np.int32)


def draw(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 258, count).tolist()


# Two sequences, of which the second step reads on: across blocks, beyond windows, one token alone.
STEPS = (
    Ragged((0, 0), (draw(0, 41), draw(1, 7)), TABLES),
    Ragged((41, 7), (draw(2, 1), draw(3, 30)), TABLES),
)


# Roundings to float16's 11 bits, some hundred of them on the way through four layers of random weights whose
# attention is sharp: 0.1% to 1.4%. `test_the_tolerance_tells` what is more.
TOLERANCE = 0.02
# Float32 sums in another order, and nothing rounded beside them: 4e-7 to 4e-6.
EXACT = 2e-5
FAMILIES = {
    name: ROWS[name]
    for name in (
        "llama yarn", "mistral", "ministral3", "qwen3 bias", "gemma2", "gemma3", "gemma4", "phi3", "smollm3",
        "granite", "olmo2", "gpt2", "stablelm parallel", "cohere2", "exaone4", "apertus",
    )
} | {
    "phi3 partial": Row("Phi3", {
        "hidden_size": 128, "head_dim": None,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    }),
}  # fmt: skip
# The newest definition of each op that CUDA has a kernel of, for float32 and what else we give it, by ONNX
# Runtime's docs/OperatorKernels.md. A kernel without an end serves that definition alone; a node without a
# kernel is refused by the session.
CUDA_KERNELS = {
    "Add": 14, "Cast": 23, "Exp": 13, "Gather": 13, "Gelu": 20, "Gemm": 13, "Greater": 13,
    "LayerNormalization": 17, "Max": 13, "Min": 13, "Mul": 14, "RMSNormalization": 23, "Relu": 14,
    "Reshape": 23, "Sigmoid": 13, "Slice": 13, "Split": 18, "Sub": 14, "Tanh": 13, "Where": 16,
}  # fmt: skip
NEEDS_POSITIONS = {"ministral3", "gpt2"}


@dataclass(frozen=True)
class Written:
    """A checkpoint's weights in the CPU's form, and laid out anew for CUDA beside them."""

    part: Part
    lowered: Part

    def cuda(self, cache: CacheFormat, **options: Any) -> onnx.ModelProto:
        builder = partial(CudaBuilder, **options)
        return ir.to_proto(build_graph(replace(self.lowered, builder=builder), cache))  # type: ignore[arg-type]

    def in_float32(self) -> "Written":
        """With weights that are not rounded to the activations' type; the file of the others is replaced."""
        spec, weights, folder = self.part.spec, self.part.weights, self.part.folder
        lowered = lower_weights(spec, weights, folder, CudaLayout(), activations="f32", input_scales={})
        return replace(self, lowered=replace(self.part, weights=lowered))

    def run(self, model: onnx.ModelProto, steps: tuple[Ragged, ...] = STEPS) -> Float32:
        session = open_session(model.SerializeToString(), threads=1, folder=self.part.folder)
        return run_steps(session, steps, len(self.part.spec.window_groups), num_blocks=8)


def written(
    row: Row,
    home: Path,
    byte_tokenizer: Callable[[Path], None],
    layers: LinearFormat | FloatFormat = INT4,
    activations: str = "f16",
) -> Written:
    source = home / "source"
    write_family(row, source)
    byte_tokenizer(source)
    formats = Formats(layers, INT8 if isinstance(layers, LinearFormat) else layers)
    with open_checkpoint(source) as checkpoint:
        job = job_in(home / "part", checkpoint)
        part = write(job, formats, RoundToNearest(job.spec, formats))
    lowered = lower_weights(
        part.spec, part.weights, part.folder, CudaLayout(), activations=activations, input_scales={}
    )
    return Written(part, replace(part, weights=lowered))


def reference(written: Written, folder: Path, cache_type: str = "f16") -> Float32:
    """The CPU's graph over the same codes, its activations in float32."""
    part = in_float32(written.part, folder)
    graph = ir.to_proto(build_graph(part, CacheFormat(BLOCK, cache_type)))
    session = open_session(graph.SerializeToString(), threads=1, folder=folder)
    return run_steps(session, STEPS, len(part.spec.window_groups), num_blocks=8)


def assert_close(found: Float32, expected: Float32, tolerance: float = TOLERANCE) -> None:
    assert distance(found, expected) <= tolerance


def schemas() -> dict[tuple[str, str], Any]:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {(each.domain, each.name): each for each in get_all_operator_schema()}


def assert_valid(model: onnx.ModelProto, folder: Path) -> None:
    """onnx's checker for its own ops; ONNX Runtime's schemas for the others: counts, types, attributes."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    onnx.checker.check_model(folder / "model.onnx")
    assert {each.domain for each in model.opset_import} == {"", "com.microsoft"}
    inferred = types_of(model)
    known = schemas()
    opset = next(each.version for each in model.opset_import if not each.domain)
    for node in model.graph.node:
        if node.domain == "com.microsoft":
            assert_node(node, known[node.domain, node.op_type], inferred)
        else:
            assert onnx.defs.get_schema(node.op_type, opset).since_version == CUDA_KERNELS[node.op_type]


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Element types by the values' names, as far as the graph says or its casts and products do."""
    known = {each.name: each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)}
    known |= {each.name: each.data_type for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Cast":
            known[node.output[0]] = helper.get_node_attr_value(node, "to")
        elif node.input and node.input[0] in known:
            known.setdefault(node.output[0], known[node.input[0]])
    return known


def assert_node(node: onnx.NodeProto, schema: Any, types: dict[str, int]) -> None:
    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    assert schema.min_input <= len(node.input) <= schema.max_input
    assert schema.min_output <= len(node.output) <= schema.max_output
    bound: dict[str, str] = {}
    for formals, names in ((schema.inputs, node.input), (schema.outputs, node.output)):
        for formal, name in zip(formals, names, strict=False):
            if not name:
                assert formal.option.name == "Optional", formal.name
                continue
            kind = f"tensor({TensorProto.DataType.Name(types[name]).lower()})"
            assert kind in allowed.get(formal.typeStr, [formal.typeStr]), (node.name, formal.name, kind)
            if formals is schema.inputs or formal.typeStr in bound:
                assert bound.setdefault(formal.typeStr, kind) == kind, (node.name, formal.name)
    missing = {name for name, each in schema.attributes.items() if each.required}
    for each in node.attribute:
        assert int(schema.attributes[each.name].type) == each.type, each.name
    assert missing <= {each.name for each in node.attribute}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpus_graph(
    name: str, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    one = written(FAMILIES[name], tmp_path, byte_tokenizer)
    cache = CacheFormat(BLOCK, "f16")
    model = one.cuda(cache)
    assert_valid(model, one.part.folder)
    names = {each.name for each in model.graph.input}
    assert ("position_ids" in names) == (name in NEEDS_POSITIONS)
    assert "ancestor_mask" not in names
    expected = reference(one, tmp_path / "float")
    assert_close(one.run(on_cpu(model)), expected)
    # What the certificate runs stands for the same.
    assert_close(one.run(one.cuda(cache, emulated=True)), expected)
    exact, cache = one.in_float32(), CacheFormat(BLOCK, "f32")
    expected = reference(one, tmp_path / "exact", "f32")
    device = on_cpu(exact.cuda(cache, activations="f32"), TensorProto.FLOAT)
    assert_close(one.run(device), expected, EXACT)
    assert_close(one.run(exact.cuda(cache, activations="f32", emulated=True)), expected, EXACT)


@pytest.mark.parametrize(
    ("name", "attribute", "wrong"),
    [
        ("gemma2", "softcap", 0.0),
        ("gemma2", "local_window_size", 17),
        ("gemma2", "scale", 0.25),
        ("cohere2", "rotary_interleaved", 0),
        ("qwen3 bias", "do_rotary", 0),
    ],
)
def test_the_tolerance_tells(
    name: str, attribute: str, wrong: Any, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    """One attribute of the attention nodes that is a little wrong is seen in the logits."""
    one = written(FAMILIES[name], tmp_path, byte_tokenizer)
    model = one.cuda(CacheFormat(BLOCK, "f16"))
    expected = reference(one, tmp_path / "float")
    for node in attention_nodes(model):
        for each in node.attribute:
            if each.name == attribute and helper.get_attribute_value(each) not in (-1, wrong):
                each.CopyFrom(helper.make_attribute(attribute, wrong))
    assert distance(one.run(on_cpu(model)), expected) > 1.5 * TOLERANCE


@pytest.mark.parametrize("layers", [INT8, F16, LinearFormat(4, 64, asymmetric=False)])
def test_other_weights(
    layers: LinearFormat | FloatFormat, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    row = Row("Qwen3", {"head_dim": 16, "intermediate_size": 128, "attention_bias": True})
    one = written(row, tmp_path, byte_tokenizer, layers)
    model = one.cuda(CacheFormat(BLOCK, "f16"))
    assert_valid(model, one.part.folder)
    assert_close(one.run(on_cpu(model)), reference(one, tmp_path / "float"))


@pytest.mark.parametrize("cache_type", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["olmo2", "gemma4"])
def test_quantized_caches_have_the_scales_of_their_layers(
    name: str, cache_type: str, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    """Keys and values of the very texts that were measured: what is lost is one rounding, by no clipping."""
    one = written(ROWS[name], tmp_path, byte_tokenizer)
    texts = [[*STEPS[0].texts[number], *STEPS[1].texts[number]] for number in range(2)]
    ranges = measure_ranges(Layerwise(Texts.of(texts), CacheFormat(BLOCK, "f32")), one.part)
    scales = {layer: ranges.cache_scales(layer, cache_type) for layer in ranges.caches}
    model = one.cuda(CacheFormat(BLOCK, cache_type), cache_scales=scales)
    assert_valid(model, one.part.folder)
    assert not [each.name for each in model.graph.input if "_scale_cache" in each.name]
    stored = {
        each.name: numpy_helper.to_array(each) for each in model.graph.initializer if not each.data_location
    }
    for node in attention_nodes(model):
        layer = int(node.input[3].rpartition(".")[2])
        pair = [float(stored[node.input[index]][0]) for index in (14, 15)]
        assert pair == pytest.approx(scales[layer])
        assert {each.name: each.s for each in node.attribute if each.name.endswith("quant_type")} == {
            "k_quant_type": b"PER_TENSOR", "v_quant_type": b"PER_TENSOR",
        }  # fmt: skip
    expected = reference(one, tmp_path / "float")
    per_token = distance(reference(one, tmp_path / "tokens", cache_type), expected)
    static = distance(one.run(on_cpu(model)), expected)
    # A scale for all tokens costs small ones their digits: INT8 about two bits more, FP8 next to nothing.
    assert static < 3 * per_token
    stand_in = one.run(one.cuda(CacheFormat(BLOCK, cache_type), emulated=True, cache_scales=scales))
    assert distance(stand_in, expected) == pytest.approx(static, rel=0.1)  # what the certificate says
    for node in attention_nodes(model):
        node.input[14], node.input[15] = node.input[15], node.input[14]
    assert distance(one.run(on_cpu(model)), expected) > 1.5 * static


@pytest.mark.parametrize("layers", [INT4, FloatFormat("bf16")])
def test_bfloat16_all_through(
    layers: LinearFormat | FloatFormat, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    """Its caches too; ONNX Runtime computes no bfloat16 on a CPU: the types must do, and what stands in."""
    one = written(FAMILIES["qwen3 bias"], tmp_path, byte_tokenizer, layers, activations="bf16")
    model = one.cuda(CacheFormat(256, "f16"), activations="bf16")
    assert_valid(model, one.part.folder)
    kinds = {each.name: each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)}
    caches = {kind for name, kind in kinds.items() if "_cache" in name}
    assert caches == {TensorProto.BFLOAT16}
    assert kinds["logits"] == TensorProto.FLOAT
    assert TensorProto.FLOAT16 not in {each.data_type for each in model.graph.initializer}
    stand_in = one.run(one.cuda(CacheFormat(BLOCK, "f16"), activations="bf16", emulated=True))
    assert_close(stand_in, reference(one, tmp_path / "float"), 8 * TOLERANCE)  # three bits less


def test_layers_that_share_a_cache_write_nothing(
    tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    one = written(ROWS["gemma4"], tmp_path, byte_tokenizer)
    nodes = attention_nodes(one.cuda(CacheFormat(BLOCK, "f16")))
    assert len(nodes) == one.part.spec.num_layers == 8
    for layer, node in enumerate(nodes):
        kind = one.part.spec.layers[layer]
        owner = kind.cache_of if kind.shares_cache else layer
        suffix = f"_cache_out.{owner}" if kind.shares_cache else f"_cache.{owner}"
        assert list(node.input[3:5]) == ["key" + suffix, "value" + suffix]
        assert bool(node.input[10]) == kind.shares_cache  # slot_mapping
        assert len(node.output) == (1 if kind.shares_cache else 3)


def test_sinks_are_of_the_activations_type(tmp_path: Path, byte_tokenizer: Callable[[Path], None]) -> None:
    """Of GPT-OSS, whose experts the target refuses: its attention alone."""
    source = tmp_path / "source"
    write_family(ROWS["gpt_oss"], source)
    byte_tokenizer(source)
    with open_checkpoint(source) as checkpoint:
        spec = checkpoint.spec
        with WeightsFile(tmp_path / "model.data") as file:
            vectors = {
                name: file.add(name, "float32", shape, iter([np.zeros(shape, np.float32)]))
                for name, shape in (
                    ("layers.0.attention.sinks.values", (spec.num_heads,)),
                    ("rope.0.cos", (spec.max_context, 8)),
                    ("rope.0.sin", (spec.max_context, 8)),
                )
            }
    build = CudaBuilder(spec, StoredWeights({}, vectors, {}), tmp_path)
    qkv = build.input("qkv", "FLOAT", ["T", spec.query_size(0) + 2 * spec.kv_size(0)])
    step = Step.inputs(build, spec)
    attended = add_attention(build, spec, qkv, step, 0, CacheFormat(256, "f16"))
    model = ir.to_proto(build.model({"attended": (attended, ["T", spec.query_size(0)])}))
    assert_valid(model, tmp_path)
    (node,) = attention_nodes(model)
    assert node.input[11].startswith("layers.0.attention.sinks.values")
    assert helper.get_node_attr_value(node, "local_window_size") == 16


@given(
    st.sampled_from([4, 8]), st.sampled_from([32, 64, 128]), st.integers(1, 3), st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_codes_keep_their_numbers(bits: int, group: int, groups: int, rows: int, seed: int) -> None:
    """(code - 2^(bits - 1)) · scale, the first code of a byte in its low half: MatMulNBits' schema."""
    rng = np.random.default_rng(seed)
    format = LinearFormat(bits, group, asymmetric=False)
    codes, scales, _ = packing.quantize_rtn(
        rng.standard_normal((rows, group * groups)).astype(np.float32), format
    )
    laid, steps = CudaLayout().integers(codes, scales.astype(np.float32), format, np.float16)
    assert laid.shape == (rows, groups, group * bits // 8)
    assert laid.data.dtype == np.uint8
    data = laid.data.reshape(rows, -1)
    if bits == 4:
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(rows, -1)
    values = (data.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(steps.data, group, axis=1)
    np.testing.assert_array_equal(values, packing.dequantize(codes, scales, None, format))
