"""The quantizers in an export: AWQ's scales cancel in every model, and each comes nearer than rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from folding import (
    CACHE,
    TEXTS,
    Float32,
    Float64,
    folded,
    job_in,
    random_scales,
    unfolded,
    write,
)

from pagelet.exporter import ExportOptions, export
from pagelet.exporter.calibration.moments import LayerMoments, small_weights
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.modules import layer_units, linear_units
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.quantize import quantizer as quantizers
from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.quantizer import (
    LayerPlan,
    open_quantizer,
)
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.exporter.stacked_rows import Treatment
from pagelet.exporter.weights import stacked
from pagelet.plugins.packing import LinearFormat, dequantize, quantize_rtn, unpack
from pagelet.runtime import Engine, EngineConfig

MakeCheckpoint = Callable[..., Path]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1, "attention_bias": True},
    "no gqa": {"num_key_value_heads": 4},
    "odd heads": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
}


def without_norms(plan: LayerPlan) -> LayerPlan:
    return LayerPlan(plan.treatments, {})


def without_outputs(plan: LayerPlan) -> LayerPlan:
    treatments = {module: Treatment(None, each.input_scales) for module, each in plan.treatments.items()}
    return LayerPlan(treatments, plan.norm_scales)


@pytest.mark.parametrize("variant", VARIANTS)
def test_folded_scales_change_nothing(
    variant: str, make_llama: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizers, "search_input_scales", random_scales(3))
    with open_checkpoint(make_llama(initializer_range=0.1, **VARIANTS[variant])) as checkpoint:
        expected = unfolded(checkpoint, tmp_path / "plain")
        found, plans = folded(checkpoint, tmp_path / "folded")
        # Two roundings of float32 for each weight and norm; the logits reach 5.
        assert np.abs(found - expected).max() <= 1e-4
        for number, spoil in enumerate((without_norms, without_outputs)):
            spoiled, _ = folded(checkpoint, tmp_path / f"spoiled{number}", spoil)
            assert np.abs(spoiled - expected).max() > 0.1
    for layer, plan in enumerate(plans):
        at = f"layers.{layer}."
        assert plan.treatments.keys() == {module for module, _ in layer_units(checkpoint.spec, layer)}
        assert all(each.input_scales is not None for each in plan.treatments.values())
        assert plan.norm_scales.keys() == {at + "attention.norm", at + "mlp.norm"}
        assert plan.of(at + "attention.qkv").output_scales.keys() == {at + "attention.v"}
        assert plan.of(at + "mlp.gate_up").output_scales.keys() == {at + "mlp.up"}


def test_what_awq_itself_folds_changes_nothing(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    """The scales that the search finds, of which some are not 1."""
    with open_checkpoint(make_llama(initializer_range=0.1, num_hidden_layers=1)) as checkpoint:
        found, plans = folded(checkpoint, tmp_path / "folded")
        expected = unfolded(checkpoint, tmp_path / "plain")
    assert plans[0].norm_scales
    assert np.abs(found - expected).max() <= 1e-4  # as above


# ---- whole exports ----


def log_softmax(logits: Float32) -> Float64:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: Float64 = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


@pytest.fixture(scope="module")
def source(make_llama: MakeCheckpoint) -> Path:
    """Weights small enough that activations are not all noise behind a layer."""
    return make_llama(hidden_size=64, intermediate_size=128, initializer_range=0.1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text("".join(f"The {n}th of {n * n % 97} steps, and {n % 7} more. " for n in range(40)))
    return path


@pytest.fixture(scope="module")
def divergence(
    source: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., float]:
    """Mean KL divergence of an export from the fp32 bundle, in nats, on the calibration's text."""
    home = tmp_path_factory.mktemp("exports")
    text = calibration.read_text(encoding="utf-8")
    ids = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids[:500]

    def logits(name: str, options: ExportOptions) -> Float32:
        if not (home / name).exists():
            export(source, home / name, options)
        with Engine.open(home / name, EngineConfig(kv_memory="4MiB")) as engine:
            return engine.logits(ids)

    def measure(quantizer: str, **options: Any) -> float:
        given: dict[str, Any] = {"calibration": calibration} if quantizer != "rtn" else {}
        chosen = ExportOptions(
            quantizer=quantizer,
            calibration_tokens=1024,
            certificate_seconds=None,
            cache_type="f32",
            **given,
            **options,
        )
        plain = ExportOptions(weights="fp32", cache_type="f32", certificate_seconds=None)
        name = f"{quantizer}-" + "-".join(f"{key}={value}" for key, value in options.items())
        p, q = (log_softmax(logits(*each)) for each in (("fp32", plain), (name, chosen)))
        return float((np.exp(p) * (p - q)).sum(axis=1).mean())

    return measure


@pytest.mark.parametrize(
    ("quantizer", "options"),
    [
        ("gptq", {"symmetric": True, "group_size": 64}),
        ("gptq", {"embedding": "int4"}),
        ("awq", {"embedding": "int4"}),
    ],
)
def test_activations_bring_it_nearer(
    quantizer: str, options: dict[str, Any], divergence: Callable[..., float]
) -> None:
    # Seen: 0.02 to 0.3.
    assert 0 < divergence(quantizer, **options) < 0.6 * divergence("rtn", **options)


def test_order_of_activations_is_a_choice(divergence: Callable[..., float]) -> None:
    options = {"symmetric": True, "group_size": 64}
    assert divergence("gptq", desc_act=False, **options) < 0.6 * divergence("rtn", **options)


def test_auto_is_nearer_in_as_many_bits(divergence: Callable[..., float]) -> None:
    """4.5 bits: symmetric groups of 32 throughout."""
    assert divergence("auto", bits_per_weight=4.5) < divergence("rtn", symmetric=True, embedding="int4")


def stored_values(part: Part, module: str) -> Float32:
    linear = part.weights.linears[module]
    assert isinstance(linear.format, LinearFormat)
    data = np.fromfile(part.folder / "model.weights", np.uint8)
    packed = data[linear.weight.offset : linear.weight.offset + linear.weight.length]
    return dequantize(*unpack(packed, linear.in_features, linear.out_features, linear.format), linear.format)


@pytest.mark.parametrize(
    ("format", "desc_act"), [(LinearFormat(4, 64, False), True), (LinearFormat(4, 32, True), False)]
)
def test_no_stored_matrix_of_gptq_errs_more_than_rounding(
    format: LinearFormat, desc_act: bool, source: Path, tmp_path: Path
) -> None:
    """In the Hessian of the inputs that it got: the original's layer, behind the layers as written."""
    formats = Formats(format, LinearFormat(8, 32, False))
    run = Layerwise(Texts.of(TEXTS), CACHE)
    with open_checkpoint(source) as checkpoint, Original(checkpoint, checkpoint.spec, 60) as original:
        spec = checkpoint.spec
        job = job_in(tmp_path / "gptq", checkpoint, quantizer="gptq", desc_act=desc_act)
        part = write(job, formats, open_quantizer(job, formats, TEXTS))
        residual = run.embed(part)
        for layer in range(spec.num_layers):
            moments = LayerMoments(spec, layer, small_weights(checkpoint, spec, layer))
            run.layer(original.layer(layer), layer, residual, moments.add)
            residual = run.layer(part, layer, residual)
            for module, roles in layer_units(spec, layer):
                hessian = moments.hessian(module.removeprefix(f"layers.{layer}."))
                rows = stacked(checkpoint, module, roles, format)
                weight = rows.floats(0, rows.count)
                found = output_error(weight, stored_values(part, module), hessian)
                importance = np.diag(hessian).astype(np.float32)
                for parts in (quantize_rtn(weight, format), round_to_nearest(weight, format, importance)):
                    # The same sums, maybe in another order.
                    assert (
                        found <= (1 + 1e-9) * output_error(weight, dequantize(*parts, format), hessian)
                    ).all()
                nearest = dequantize(*round_to_nearest(weight, format), format)
                assert found.sum() < 0.9 * output_error(weight, nearest, hessian).sum()


@pytest.mark.parametrize("quantizer", ["gptq", "awq"])
def test_a_shared_table_is_quantized_too(
    quantizer: str, make_llama: MakeCheckpoint, calibration: Path, tmp_path: Path
) -> None:
    source = make_llama(tie_word_embeddings=True, num_hidden_layers=1)
    options = ExportOptions(
        quantizer=quantizer,
        calibration=calibration,
        calibration_tokens=1024,
        embedding="int4",
        certificate_seconds=None,
    )
    manifest = export(source, tmp_path / "b", options)
    assert manifest.quantization.quantizer == quantizer
    with open_checkpoint(source) as checkpoint:
        modules = [module for module, _ in linear_units(checkpoint.spec)]
    assert list(manifest.tensors) == modules
    # Of the rounding alone, from 16 levels in a group's range: 7% of values that are normal.
    assert all(entry.type == "int4" and 0.03 < entry.error < 0.15 for entry in manifest.tensors.values())


def test_int8_is_calibrated_too(make_llama: MakeCheckpoint, calibration: Path, tmp_path: Path) -> None:
    source = make_llama(num_hidden_layers=1)
    for quantizer in ("gptq", "awq"):
        options = ExportOptions(
            weights="int8",
            quantizer=quantizer,
            calibration=calibration,
            calibration_tokens=1024,
            certificate_seconds=None,
        )
        manifest = export(source, tmp_path / quantizer, options)
        assert {entry.type for entry in manifest.tensors.values()} == {"int8"}
        assert all(entry.error < 0.01 for entry in manifest.tensors.values())


def test_a_context_shorter_than_a_calibration_window(
    make_llama: MakeCheckpoint, calibration: Path, tmp_path: Path
) -> None:
    options = ExportOptions(
        quantizer="gptq",
        calibration=calibration,
        calibration_tokens=1024,
        max_context=100,
        certificate_seconds=None,
    )
    assert export(make_llama(num_hidden_layers=1), tmp_path / "b", options).spec.max_context == 100


def test_a_calibration_that_is_not_there_is_named(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    from pagelet.models.errors import InputError

    options = ExportOptions(quantizer="gptq", calibration=tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"none\.txt cannot be read"):
        export(make_llama(num_hidden_layers=1), tmp_path / "b", options)
