"""Exports at the edges: tiny contexts, odd tokenizers, weights that nothing can hold, two at once."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from safetensors.numpy import load_file, save_file

from pagelet.exporter import ExportOptions, export
from pagelet.exporter.calibration.corpus import calibration_texts
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import choose_formats
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.modules import layer_units, layer_vectors
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import open_quantizer
from pagelet.exporter.weights import WEIGHTS_NAME, WeightsFile, WeightsWriter
from pagelet.models.certificate import CERTIFICATE_NAME, OUTPUTS_NAME, load_certificate
from pagelet.models.errors import CheckpointError, InputError, UnfinishedError
from pagelet.models.manifest import load_manifest
from pagelet.models.text import Tokenizer

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(make_llama: MakeCheckpoint) -> Path:
    return make_llama(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)


def changed(source: Path, folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of the checkpoint in which one tensor is another."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("context", [2, 8, 40, 71, 72])
def test_a_certificate_in_a_short_context(context: int, tiny: Path, tmp_path: Path) -> None:
    options = ExportOptions(weights="fp32", max_context=context, certificate_seconds=0.01)
    manifest = export(tiny, tmp_path / "b", options)
    certificate = load_certificate(tmp_path / "b", manifest)
    assert certificate
    assert max(max(prompt.position_ids) for prompt in certificate.golden) == context - 1


def test_a_context_of_one_token_leaves_nothing_to_compare(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--no-certificate"):
        export(tiny, tmp_path / "b", ExportOptions(max_context=1))
    with pytest.raises(InputError, match="tokens of the built-in texts"):
        export(tiny, tmp_path / "b", uncertified(quantizer="gptq", max_context=1))
    assert not list(tmp_path.iterdir())
    export(tiny, tmp_path / "b", uncertified(max_context=1))


def test_huge_logits_still_make_a_certificate_that_can_be_read(tiny: Path, tmp_path: Path) -> None:
    """Their perplexity is beyond every float: it is cut, as the reader expects."""
    source = changed(tiny, tmp_path / "loud", "lm_head.weight", lambda head: head * 400)
    manifest = export(source, tmp_path / "b", ExportOptions(weights="fp32", certificate_seconds=0.01))
    certificate = load_certificate(tmp_path / "b", manifest)
    assert certificate
    assert certificate.quality.reference_perplexity > 1e30


LARGE_WEIGHT = "model.layers.1.mlp.down_proj.weight", lambda weight: weight + 1e7 * np.eye(*weight.shape)
LARGE_NORM = "model.layers.1.post_attention_layernorm.weight", lambda weight: weight * np.float32(1e22)


@pytest.mark.parametrize(
    ("quantizer", "name", "change"),
    [
        *((quantizer, *LARGE_WEIGHT) for quantizer in ("rtn", "awq", "gptq", "auto")),
        *((quantizer, *LARGE_NORM) for quantizer in ("awq", "gptq", "auto")),  # rtn reads no activations
    ],
)
def test_what_no_format_holds_is_named(
    quantizer: str, name: str, change: Callable[[Any], Any], tiny: Path, tmp_path: Path
) -> None:
    source = changed(tiny, tmp_path / "large", name, lambda weight: change(weight).astype(np.float32))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp|down_proj"):
        export(source, tmp_path / "b", uncertified(quantizer=quantizer, bits_per_weight=_bits(quantizer)))
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def _bits(quantizer: str) -> float | None:
    return 5.5 if quantizer == "auto" else None


def test_a_refused_certificate_is_not_in_the_next_bundle(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UnfinishedError):
        export(tiny, tmp_path / "b", ExportOptions(max_kl=1e-9, certificate_seconds=0.01))
    manifest = export(tiny, tmp_path / "b", uncertified())
    assert not {CERTIFICATE_NAME, OUTPUTS_NAME} & set(manifest.files)
    assert not (tmp_path / "b" / CERTIFICATE_NAME).exists()


def test_two_threads_do_not_share_a_folder(tiny: Path, tmp_path: Path) -> None:
    """The second is refused while the first writes, and the first ends well."""
    errors: list[Exception] = []

    def second(*_: object) -> None:
        if not errors:
            with pytest.raises(InputError, match="running in this process") as caught:
                export(tiny, tmp_path / "b", uncertified())
            errors.append(caught.value)

    thread = threading.Thread(target=lambda: export(tiny, tmp_path / "b", uncertified(), on_progress=second))
    thread.start()
    thread.join()
    assert errors
    assert load_manifest(tmp_path / "b")


def test_a_budget_below_the_smallest_formats_is_refused_at_once(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"smallest formats take 4\.500"):
        export(
            tiny,
            tmp_path / "b",
            uncertified(quantizer="auto", bits_per_weight=4.1),
            on_progress=lambda *step: pytest.fail(f"something was measured: {step}"),
        )


def test_the_next_layer_gets_what_the_written_one_gives(tiny: Path, tmp_path: Path) -> None:
    """Not what the original's would: quantizers make up for the errors before them."""
    options = uncertified(quantizer="gptq", symmetric=True, calibration_tokens=1024)
    folder = tmp_path / "work"
    folder.mkdir()
    export(tiny, tmp_path / "b", uncertified())
    with open_checkpoint(tiny) as checkpoint, WeightsFile(folder / WEIGHTS_NAME) as file:
        tokenizer = Tokenizer.open(tmp_path / "b", load_manifest(tmp_path / "b").text)
        texts = calibration_texts(options, tokenizer, checkpoint.spec.max_context)
        job = Job(checkpoint, checkpoint.spec, options, folder)
        formats = choose_formats(options, checkpoint)
        quantizer = open_quantizer(job, formats, texts)
        writer = WeightsWriter(checkpoint, file)
        writer.rope_tables(checkpoint.spec)
        writer.linear("embedding", ("embedding",), formats.of("embedding"))
        file.flush()
        written = Part(checkpoint.spec, writer.stored, folder)
        quantizer.start(written)
        before = quantizer.stream
        assert before is not None
        plan = quantizer.plan(0)
        for module, roles in layer_units(checkpoint.spec, 0):
            writer.linear(module, roles, formats.of(module), plan.of(module))
        for role in layer_vectors(checkpoint.spec, 0):
            writer.vector(role, plan.norm_scales)
        file.flush()
        quantizer.advance(0, written)
        quantizer.close()
        expected = Layerwise(Texts.of(texts), job.cache).layer(written, 0, before)
        assert quantizer.stream is not None
        np.testing.assert_array_equal(quantizer.stream.residual, expected.residual)
