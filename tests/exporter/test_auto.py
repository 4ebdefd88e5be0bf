"""`auto`: what a matrix's rounding costs, as two bundles would show it; and budgets that are kept."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagelet.exporter import ExportOptions, export
from pagelet.exporter.checkpoint import Checkpoint, open_checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.model_weights import write_weights
from pagelet.exporter.modules import layer_units, linear_units
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.auto import candidates, spend_budget
from pagelet.exporter.quantize.quantizer import RoundToNearest
from pagelet.exporter.sensitivity import Sensitivity, Variant
from pagelet.exporter.stacked_rows import nearest
from pagelet.exporter.weights import stacked
from pagelet.models.errors import InputError
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

MakeCheckpoint = Callable[..., Path]
Float64 = NDArray[np.float64]
F32, INT4 = FloatFormat("f32"), LinearFormat(4, 32, False)
CACHE = CacheFormat(32, "f32")
TEXTS = [np.random.default_rng(seed).integers(2, 258, 40 + 30 * seed).tolist() for seed in range(2)]


def log_probabilities(checkpoint: Checkpoint, folder: Path, modules: Sequence[str]) -> Float64:
    """Of a whole bundle in float32, but for some matrices rounded to four bits; float64 [tokens, vocab]."""
    folder.mkdir()
    job = Job(checkpoint, checkpoint.spec, ExportOptions(cache_type="f32"), folder)
    formats = Formats(F32, F32, dict.fromkeys(modules, INT4))
    with closing(RoundToNearest(job.spec, formats)) as quantizer:
        part = Part(job.spec, write_weights(job, formats, quantizer), folder)
    run = Layerwise(Texts.of(TEXTS), CACHE)
    residual = run.embed(part)
    for layer in range(job.spec.num_layers):
        residual = run.layer(part, layer, residual)
    logits = np.concatenate([rows for _, rows in run.logits(part, residual)]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    result: Float64 = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def measured(checkpoint: Checkpoint) -> dict[str, float]:
    """Divergences of all matrices, from one walk through the model."""
    spec, rounded = checkpoint.spec, (INT4, nearest(INT4))
    longest = max(map(len, TEXTS))
    with Original(checkpoint, spec, longest) as original, Original(checkpoint, spec, longest) as changed:
        run = Sensitivity(TEXTS, CACHE)
        run.embed(original.embedding(), [Variant("embedding", changed.embedding({"embedding": rounded}))])
        for layer in range(spec.num_layers):
            part = original.layer(layer)
            branches = []
            for module, _ in layer_units(spec, layer):
                branches += run.branch(layer, [Variant(module, changed.layer(layer, {module: rounded}))])
            run.advance(part, layer, branches)
        head = "embedding" if spec.tie_embeddings else "head"
        return run.divergences(original.head(), {head: changed.head({head: rounded})})


@pytest.mark.parametrize("tied", [False, True])
def test_a_divergence_is_that_of_two_bundles(tied: bool, make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    with open_checkpoint(make_llama(tie_word_embeddings=tied, initializer_range=0.1)) as checkpoint:
        found = measured(checkpoint)
        modules = [module for module, _ in linear_units(checkpoint.spec)]
        assert found.keys() == set(modules)
        p = log_probabilities(checkpoint, tmp_path / "original", [])
        for module in modules:
            q = log_probabilities(checkpoint, tmp_path / module, [module])
            expected = (np.exp(p) * (p - q)).sum(axis=1).mean()
            assert expected > 1e-5
            # The logits are the same to the bit; their logarithms are float32 here and float64 there.
            assert found[module] == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.fixture(scope="module")
def source(make_llama: MakeCheckpoint) -> Path:
    """Inputs of 64 and 128: several group sizes divide them."""
    return make_llama(intermediate_size=128, initializer_range=0.1)


def spent_bits(checkpoint: Checkpoint, formats: Formats) -> float:
    """Bits per weight of all matrices together."""
    rows = {m: stacked(checkpoint, m, roles, F32) for m, roles in linear_units(checkpoint.spec)}
    num_bytes = sum(formats.of(m).packed_bytes(each.width, each.count) for m, each in rows.items())
    return 8 * num_bytes / sum(each.width * each.count for each in rows.values())


def spend(
    source: Path, folder: Path, texts: list[list[int]] = TEXTS, **options: Any
) -> tuple[Formats, float]:
    folder.mkdir()
    with open_checkpoint(source) as checkpoint:
        chosen = ExportOptions(quantizer="auto", **options)
        formats = spend_budget(Job(checkpoint, checkpoint.spec, chosen, folder, "key"), texts)
        assert formats.modules.keys() == {module for module, _ in linear_units(checkpoint.spec)}
        return formats, spent_bits(checkpoint, formats)


@pytest.mark.parametrize("symmetric", [False, True])
def test_budgets_are_kept_and_used(symmetric: bool, source: Path, tmp_path: Path) -> None:
    used = []
    for bits in (None, 5.0, 6.5, 8.5):
        formats, spent = spend(source, tmp_path / str(bits), bits_per_weight=bits, symmetric=symmetric)
        budget = bits or 4.5
        # A step is at most that of the largest of ten matrices from four bits to eight.
        assert budget - 1 < spent <= budget
        used.append(spent)
        if symmetric:
            assert not any(
                format.asymmetric for format in formats.modules.values() if isinstance(format, LinearFormat)
            )
        assert all(isinstance(format, LinearFormat) for format in formats.modules.values())
    assert used == sorted(used)
    assert used[-1] > 8  # what is there for the taking is taken


def test_candidates_divide_the_inputs() -> None:
    for symmetric in (False, True):
        found = {width: list(candidates(width, symmetric)) for width in (32, 96, 128, 80)}
        sizes = {width: {format.group_size for format in formats} for width, formats in found.items()}
        assert sizes == {32: {32}, 96: {32}, 128: {32, 64, 128}, 80: set()}
        assert all(len(set(formats)) == len(formats) for formats in found.values())
        assert {format.asymmetric for format in found[128]} == ({False} if symmetric else {False, True})
        assert {format.bits for format in found[32]} == {4, 8}


def test_what_was_found_is_kept(source: Path, tmp_path: Path) -> None:
    first, _ = spend(source, tmp_path / "a")
    with open_checkpoint(source) as checkpoint:
        job = Job(checkpoint, checkpoint.spec, ExportOptions(quantizer="auto"), tmp_path / "a", "key")
        assert spend_budget(job, []) == first  # no text is looked at
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"formats.json"}


def test_an_export_says_what_was_spent(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n * n % 97}, " for n in range(200)))
    options = ExportOptions(
        quantizer="auto",
        bits_per_weight=5.0,
        symmetric=True,
        calibration=tmp_path / "text.txt",
        calibration_tokens=1024,
        certificate_seconds=None,
    )
    manifest = export(source, tmp_path / "b", options)
    entries = manifest.tensors.values()
    assert all(entry.symmetric for entry in entries)
    assert {entry.type for entry in entries} <= {"int4", "int8"}
    weights = sum(rows * width for rows, width in (entry.shape for entry in entries))
    assert 4 < 8 * sum(entry.bytes for entry in entries) / weights <= 5.0
    assert manifest.quantization.quantizer == "auto"


def test_a_budget_below_the_smallest_formats_leaves_nothing(source: Path, tmp_path: Path) -> None:
    options = ExportOptions(quantizer="auto", bits_per_weight=4.01, calibration_tokens=1024)
    with pytest.raises(InputError, match=r"smallest formats take 4\.\d{3}: raise --bits-per-weight"):
        export(source, tmp_path / "b", options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "format", "bits"),
    [
        ("Q4_0", LinearFormat(4, 32, False), 4.5),
        ("Q4_1", LinearFormat(4, 32, True), 5.0),
        ("Q8_0", LinearFormat(8, 32, False), 8.5),
    ],
)
def test_the_checkpoints_own_numbers_are_kept_where_they_fit(
    kind: str, format: LinearFormat, bits: float, write_gguf: Any, weights: Any, tmp_path: Path
) -> None:
    texts = [np.random.default_rng(1).integers(0, 48, 60).tolist()]
    formats, _ = spend(write_gguf(weights, kind), tmp_path / "a", texts, bits_per_weight=bits)
    assert set(formats.modules.values()) == {format}
