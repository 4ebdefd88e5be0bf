"""The graph of TensorRT targets: the CPU's numbers over the same codes, and what the device's graph says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformers
from families.rows import ROWS, config_options
from folding import logits_of
from lowered import Lowered, dequantized, distance, in_float32, lower_family, lower_part
from numpy.typing import NDArray
from onnx import TensorProto, helper

from pagelet.exporter.calibration.ranges import measure_ranges
from pagelet.exporter.formats import Formats
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.part import Part
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.targets.gpu_builder import ATTENTION_INPUTS, refuse_experts
from pagelet.exporter.targets.lowering import QdqLayout
from pagelet.exporter.targets.tensorrt import TensorRTBuilder
from pagelet.models.config import spec_from_config
from pagelet.models.errors import UnsupportedError
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat
from pagelet.plugins.session import open_session
from pagelet.plugins.tensorrt.node import AttentionNode
from pagelet.plugins.whole_graph import CacheArrays, WholeGraph

Float32 = NDArray[np.float32]
INT4 = LinearFormat(4, 32, asymmetric=False)
FP8 = FloatFormat("fp8")
# transformers' models and ours differ by as much in float32: sums in another order (tests/families).
TOLERANCE = 1e-3
# A hundred roundings to 11 bits on the way through four layers of random weights, whose attention is sharp.
F16_TOLERANCE = 0.03
TEXT = np.random.default_rng(0).integers(2, 258, 150).tolist()
CACHE = CacheFormat(16, "f16")
FAMILIES = (
    "llama odd heads", "mistral", "ministral3", "qwen2", "qwen3 bias", "gemma2", "gemma3", "gemma4",
    "phi4 partial", "smollm3", "granite", "olmo2", "gpt_neox", "gpt2", "stablelm", "stablelm parallel",
    "cohere2", "exaone4", "hunyuan", "seed_oss", "ernie4_5", "apertus", "arcee", "nanochat",
)  # fmt: skip

Make = Callable[..., Lowered]


@pytest.fixture
def lower(tmp_path: Path, byte_tokenizer: Callable[[Path], None]) -> Make:
    def make(family: str, layers: WeightFormat = INT4, activations: str = "f16", **options: Any) -> Lowered:
        tables = layers if options.pop("tables", "plain") == "same" else FloatFormat(activations)
        return lower_family(
            ROWS[family],
            tmp_path,
            byte_tokenizer,
            QdqLayout(),
            Formats(layers, tables),
            activations,
            **options,
        )

    return make


def stand_in(lowered: Lowered, activations: str) -> Part:
    return lowered.built(TensorRTBuilder, activations=activations, emulated=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_roundings_it_is_the_cpus_graph(family: str, lower: Make, tmp_path: Path) -> None:
    lowered = lower(family, activations="f32", tables="same")
    expected = logits_of(in_float32(lowered.packed, tmp_path / "f32"), [TEXT])
    found = logits_of(stand_in(lowered, "f32"), [TEXT])
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama odd heads", "qwen3", "gemma2", "hunyuan"])
def test_the_devices_roundings_are_small(family: str, lower: Make, tmp_path: Path) -> None:
    lowered = lower(family)
    expected = logits_of(in_float32(lowered.packed, tmp_path / "f32"), [TEXT], CACHE)
    assert distance(logits_of(stand_in(lowered, "f16"), [TEXT], CACHE), expected) < F16_TOLERANCE


def test_bfloat16_rounds_eight_times_as_much(lower: Make, tmp_path: Path) -> None:
    lowered = lower("qwen3", FloatFormat("bf16"), "bf16")
    expected = logits_of(in_float32(lowered.packed, tmp_path / "f32"), [TEXT], CACHE)
    off = distance(logits_of(stand_in(lowered, "bf16"), [TEXT], CACHE), expected)
    assert F16_TOLERANCE / 8 < off < 8 * F16_TOLERANCE


@pytest.mark.parametrize(("activations", "overflows"), [("f16", True), ("bf16", False)])
def test_the_stand_in_rounds_and_overflows_as_16_bits_do(
    activations: str, overflows: bool, lower: Make
) -> None:
    """Which ONNX Runtime would leave out in front of a product of its own float32."""
    lowered = lower("qwen3", FloatFormat(activations), activations)
    build = stand_in(lowered, activations).build()
    x = build.input("x", "FLOAT", ["T", lowered.packed.spec.query_size(0)])
    y = build.linear(x, "layers.0.attention.o")
    graph = ir.to_proto(build.model({"y": (y, ["T", 64])})).SerializeToString()
    session = open_session(graph, threads=1, folder=lowered.packed.folder)

    def run(values: Float32) -> Float32:
        found: Float32 = session.run(["y"], {"x": values})[0]
        return found

    width = lowered.packed.spec.query_size(0)
    rows = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    rounded = rows.astype(np.float16 if activations == "f16" else ml_dtypes.bfloat16).astype(np.float32)
    assert not np.array_equal(rows, rounded)
    assert np.array_equal(run(rows), run(rounded))
    assert np.isfinite(run(np.full((1, width), 1e6, np.float32))).all() != overflows


def test_fp8_inputs_have_the_scales_that_were_measured(lower: Make, tmp_path: Path) -> None:
    def scales(packed: Part) -> dict[str, float]:
        ranges = measure_ranges(Layerwise(Texts.of([TEXT]), CacheFormat(16, "f32")), packed)
        return {module: ranges.input_scale(module) for module in ranges.inputs}

    lowered = lower("qwen3", FP8, input_scales=scales)
    expected = logits_of(in_float32(lowered.packed, tmp_path / "f32"), [TEXT], CACHE)
    # FP8 keeps 4 bits of a number, float16 11: 0.03 of a row's size for each of seven products a layer.
    assert distance(logits_of(stand_in(lowered, "f16"), [TEXT], CACHE), expected) < 0.35
    linear = lowered.device.weights.linears["layers.1.mlp.down"]
    tenth = {name: scale / 10 for name, scale in scales(lowered.packed).items()}
    assert 0 < linear.input_scale == pytest.approx(10 * tenth["layers.1.mlp.down"])
    clipped = lower_again(lowered, tenth)
    assert distance(logits_of(stand_in(clipped, "f16"), [TEXT], CACHE), expected) > 0.7


def lower_again(lowered: Lowered, input_scales: dict[str, float]) -> Lowered:
    return lower_part(lowered.packed, QdqLayout(), "f16", input_scales)


@pytest.mark.parametrize("cache", ["f16", "int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3 bias", "gemma4", "gpt2"])
def test_the_devices_graph_with_its_plugin_replaced_gives_the_stand_ins_logits(
    family: str, cache: str, lower: Make
) -> None:
    lowered = lower(family)
    spec, folder = lowered.packed.spec, lowered.packed.folder
    format = CacheFormat(16, cache)
    device = build_graph(lowered.built(TensorRTBuilder, activations="f16"), format)
    ir.save(device, folder / "device.onnx")
    model = onnx.load(folder / "device.onnx", load_external_data=False)
    onnx.save(plugin_replaced(model), folder / "replaced.onnx")
    ir.save(build_graph(stand_in(lowered, "f16"), format), folder / "stand_in.onnx")
    arrays = CacheArrays(
        cache,
        16,
        {i: (spec.layers[i].num_kv_heads, spec.layers[i].head_dim) for i in spec.cache_owners},
        len(spec.window_groups),
    )
    text, rows = TEXT[:70], range(70)
    found, expected = (
        WholeGraph(folder / name, arrays, [], threads=1).run(text, rows, rows)[0]
        for name in ("replaced.onnx", "stand_in.onnx")
    )
    # ONNX Runtime takes roundings away in front of products that it computes in float32. Then codes of a
    # quantized cache next to a tie are other ones; such a cache alone costs this gemma4 0.07 and 0.3.
    quantized = {"int8": 0.1, "fp8": 0.25} if family == "gemma4" else {}
    tolerance = quantized.get(cache, F16_TOLERANCE)
    assert distance(found, expected) < tolerance
    assert found.std() > 0.5


def plugin_replaced(model: onnx.ModelProto) -> onnx.ModelProto:
    """Each plugin node becomes the CPU's op between casts; absent inputs are "" there."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type != "PagedAttention":
            model.graph.node.append(node)
            continue
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        given = dict(zip(attributes.pop("inputs").decode().split(), node.input, strict=True))
        for name in ("query", "key", "value"):
            if name in given:
                full = f"{node.name}/{name}/full"
                model.graph.node.append(helper.make_node("Cast", [given[name]], [full], to=TensorProto.FLOAT))
                given[name] = full
        inputs = [given.get(name, "") for name in ATTENTION_INPUTS]
        while not inputs[-1]:
            inputs.pop()
        for name in ("head_dim", "block_size", "activation", "cache", "writes"):
            del attributes[name]
        whole = f"{node.name}/whole"
        outputs = [whole, *node.output[1:]]
        model.graph.node.append(
            helper.make_node("PagedAttention", inputs, outputs, domain="pagelet", **attributes)
        )
        half = helper.make_node("Cast", [whole], [node.output[0]], to=TensorProto.FLOAT16)
        model.graph.node.append(half)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_each_node_is_one_that_the_plugin_takes(family: str, lower: Make) -> None:
    lowered = lower(family)
    graph = build_graph(lowered.built(TensorRTBuilder, activations="f16"), CacheFormat(16, "int8")).graph
    nodes = [node for node in graph if node.op_type == "PagedAttention"]
    assert len(nodes) == lowered.packed.spec.num_layers
    for layer, node in zip(lowered.packed.spec.layers, nodes, strict=True):
        known = AttentionNode.from_fields({name: value.value for name, value in node.attributes.items()})
        assert len(known.inputs) == len(node.inputs)
        assert known.variant.head_dim == layer.head_dim
        assert known.variant.writes != layer.shares_cache
        aliased = [node.inputs[index] for index in known.aliased_inputs[1:]]
        names = [str(value.name).replace("_cache.", "_cache_out.") for value in aliased]
        assert names == [value.name for value in node.outputs[1:]]


def test_nothing_reads_a_value_that_was_rounded_to_and_fro(lower: Make) -> None:
    graph = build_graph(lower("qwen3").built(TensorRTBuilder, activations="f16"), CACHE).graph
    for node in graph:
        if node.op_type == "Cast" and (value := node.inputs[0]) is not None:
            producer = value.producer()
            assert producer is None or producer.op_type != "Cast", node.name


def test_int4_codes_are_stored_two_to_a_byte_as_onnx_has_them(lower: Make) -> None:
    lowered = lower("qwen3")
    model = build_graph(lowered.built(TensorRTBuilder, activations="f16"), CACHE)
    weight = model.graph.initializers["layers.0.mlp.down.weight"].const_value
    assert weight is not None
    codes = weight.numpy().astype(np.int32)
    scales = model.graph.initializers["layers.0.mlp.down.scales"].const_value
    assert scales is not None
    steps = np.repeat(scales.numpy().astype(np.float32), 32, axis=0)
    linear = lowered.packed.weights.linears["layers.0.mlp.down"]
    data = np.fromfile(lowered.packed.folder / "model.weights", np.uint8)
    packed = data[linear.weight.offset : linear.weight.offset + linear.weight.length]
    values = dequantized(packed, linear.out_features, linear.in_features, linear.format)
    assert np.array_equal((codes * steps).T, values)


def test_mixtures_of_experts_are_refused_by_name() -> None:
    config = transformers.Qwen3MoeConfig(**config_options(ROWS["qwen3_moe"]))
    config.architectures = ["Qwen3MoeForCausalLM"]
    with pytest.raises(UnsupportedError, match="mixtures of experts, which GPU targets do not compute yet"):
        refuse_experts(spec_from_config(config.to_dict()))
