"""Running a model part by part: the engine's logits to the bit, and transformers' numbers."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folding import logits_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions, export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import Formats, choose_formats
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import BATCH_TOKENS, LOGITS_ROWS, TAPS, Layerwise, Texts
from pagelet.exporter.model_weights import write_weights
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import open_quantizer
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import FloatFormat
from pagelet.runtime import Engine, EngineConfig

MakeCheckpoint = Callable[..., Path]
Float32 = NDArray[np.float32]
# One token alone, ends within and at a block's edge, and more rows than one run of the head takes.
LENGTHS = (1, 33, 160, 32, 7)
TEXTS = [np.random.default_rng(seed).integers(2, 258, length).tolist() for seed, length in enumerate(LENGTHS)]
# float32 sums in another order, of numbers that reach 40: as in test_llama.
TOLERANCE = 2e-3


def write_part(source: Path, folder: Path, options: ExportOptions) -> Part:
    """The weights that an export writes, as a part; rounded to nearest."""
    folder.mkdir()
    with open_checkpoint(source) as checkpoint:
        formats: Formats = choose_formats(options, checkpoint)
        job = Job(checkpoint, checkpoint.spec, options, folder)
        with closing(open_quantizer(job, formats, [])) as quantizer:
            spec = checkpoint.spec
            stored = write_weights(job, formats, quantizer)
    return Part(spec, stored, folder)


def assert_as_the_engine(source: Path, folder: Path, options: ExportOptions) -> None:
    export(source, folder / "bundle", options)
    part = write_part(source, folder / "part", options)
    assert (folder / "part" / "model.weights").read_bytes() == (
        folder / "bundle" / "model.weights"
    ).read_bytes()
    found = logits_of(part, TEXTS, CacheFormat(options.tokens_per_block, options.cache_type))
    with Engine.open(folder / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        expected = np.concatenate([engine.logits(text) for text in TEXTS])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "int8", "fp8"])
@pytest.mark.parametrize("weights", ["int4", "fp32"])
def test_the_engines_logits_to_the_bit(
    weights: str, cache_type: str, make_llama: MakeCheckpoint, tmp_path: Path
) -> None:
    options = ExportOptions(weights=weights, cache_type=cache_type, certificate_seconds=None)
    assert_as_the_engine(make_llama(attention_bias=True), tmp_path, options)


@pytest.mark.parametrize("block_size", [1, 7, 512])
def test_blocks_of_any_size(block_size: int, make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    options = ExportOptions(block_size=block_size, cache_type="int8", certificate_seconds=None)
    assert_as_the_engine(make_llama(tie_word_embeddings=True), tmp_path, options)


@pytest.mark.parametrize("window", [5, 40])
def test_windows_to_the_bit(window: int, make_windowed: MakeCheckpoint, tmp_path: Path) -> None:
    options = ExportOptions(weights="fp32", cache_type="f32", certificate_seconds=None)
    assert_as_the_engine(make_windowed(window), tmp_path, options)


def test_a_text_does_not_depend_on_those_beside_it(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    """Nor on its place among them: each begins with an empty context."""
    cache = CacheFormat(32, "fp8")
    part = write_part(make_llama(), tmp_path / "part", ExportOptions(cache_type="fp8"))
    alone = [logits_of(part, [text], cache) for text in TEXTS]
    np.testing.assert_array_equal(logits_of(part, TEXTS, cache), np.concatenate(alone))
    np.testing.assert_array_equal(logits_of(part, TEXTS[::-1], cache), np.concatenate(alone[::-1]))


def test_logits_come_in_rows_that_follow_one_another(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    part = write_part(make_llama(), tmp_path / "part", ExportOptions())
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f16"))
    rows = [rows for rows, _ in run.logits(part, run.embed(part))]
    assert [(r.start, r.stop) for r in rows] == [(0, LOGITS_ROWS), (LOGITS_ROWS, sum(LENGTHS))]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=20))
def test_batches_hold_whole_texts(lengths: list[int]) -> None:
    texts = Texts.of([range(length) for length in lengths])
    batches = list(texts.batches())
    assert [length for _, inside in batches for length in inside] == lengths
    assert [rows.start for rows, _ in batches] == [0, *(rows.stop for rows, _ in batches[:-1])]
    assert batches[-1][0].stop == len(texts) == sum(lengths)
    for (rows, inside), following in zip(batches, [*batches[1:], None], strict=True):
        assert rows.stop - rows.start == sum(inside) <= BATCH_TOKENS
        assert following is None or sum(inside) + following[1][0] > BATCH_TOKENS
    np.testing.assert_array_equal(texts.positions, texts.token_ids)


def test_a_text_longer_than_a_batch_stands_alone() -> None:
    texts = Texts.of([range(10), range(BATCH_TOKENS + 5), range(10)])
    assert [lengths for _, lengths in texts.batches()] == [(10,), (BATCH_TOKENS + 5,), (10,)]


def hidden_states(source: Path, texts: Sequence[Sequence[int]]) -> tuple[list[Float32], Float32]:
    """transformers' residual streams, before each layer and behind the last, and the logits; in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    streams: list[list[Float32]] = [[] for _ in range(model.config.num_hidden_layers + 1)]

    def keep(index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            streams[index].append(hidden[0].numpy().copy())

        return hook

    for index, module in enumerate([*model.model.layers, model.model.norm]):
        module.register_forward_pre_hook(keep(index), with_kwargs=True)
    with torch.no_grad():
        logits = [model(torch.tensor([list(text)])).logits[0].numpy() for text in texts]
    return [np.concatenate(stream) for stream in streams], np.concatenate(logits)


def run_original(original: Original, spec: ModelSpec, run: Layerwise) -> tuple[list[Float32], Float32]:
    streams = [run.embed(original.embedding())]
    for layer in range(spec.num_layers):
        streams.append(run.layer(original.layer(layer), layer, streams[-1]))
    logits = [logits for _, logits in run.logits(original.head(), streams[-1])]
    return [stream.residual for stream in streams], np.concatenate(logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "kept"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")])
def test_the_original_gives_transformers_numbers(
    dtype: str, kept: str, tied: bool, make_llama: MakeCheckpoint
) -> None:
    source = make_llama(dtype=dtype, tie_word_embeddings=tied, attention_bias=True)
    expected, expected_logits = hidden_states(source, TEXTS)
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32"))
    with open_checkpoint(source) as checkpoint, Original(checkpoint, checkpoint.spec, 160) as original:
        layer = original.layer(0)
        assert {linear.format for linear in layer.weights.linears.values()} == {FloatFormat(kept)}
        assert all(entry.exact for entry in layer.weights.entries.values())
        found, logits = run_original(original, checkpoint.spec, run)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found[0], expected[0])  # a look-up
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=TOLERANCE)


def test_windows_of_the_original(make_windowed: MakeCheckpoint) -> None:
    source = make_windowed(9)
    expected, expected_logits = hidden_states(source, TEXTS)
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32"))
    with open_checkpoint(source) as checkpoint, Original(checkpoint, checkpoint.spec, 160) as original:
        found, logits = run_original(original, checkpoint.spec, run)
    for ours, theirs in zip([*found, logits], [*expected, expected_logits], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_part_holds_until_the_next_and_nothing_stays(make_llama: MakeCheckpoint) -> None:
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32"))
    with open_checkpoint(make_llama()) as checkpoint:
        with Original(checkpoint, checkpoint.spec, 160) as original:
            stream = run.embed(original.embedding())
            first = original.layer(0)
            outputs = [run.layer(first, 0, stream).residual for _ in range(2)]
            np.testing.assert_array_equal(*outputs)
            other = run.layer(original.layer(1), 1, stream).residual
            assert not np.array_equal(outputs[0], other)
            again = run.layer(original.layer(0), 0, stream).residual
            np.testing.assert_array_equal(again, outputs[0])
            home = first.folder
            assert [path.name for path in home.iterdir()] == ["model.weights"]
        assert not home.exists()


def test_two_originals_do_not_share_a_file(make_llama: MakeCheckpoint) -> None:
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32"))
    with open_checkpoint(make_llama()) as checkpoint:
        spec = checkpoint.spec
        with Original(checkpoint, spec, 160) as original, Original(checkpoint, spec, 160) as other:
            stream = run.embed(original.embedding())
            part = original.layer(0)
            expected = run.layer(part, 0, stream).residual
            other.layer(1)
            np.testing.assert_array_equal(run.layer(part, 0, stream).residual, expected)


def test_taps_are_those_of_the_run(make_llama: MakeCheckpoint) -> None:
    """Told batch by batch, in order, and without changing what comes out."""
    texts = [np.random.default_rng(seed).integers(2, 258, 500).tolist() for seed in range(5)]
    run = Layerwise(Texts.of(texts), CacheFormat(32, "f32"))
    seen: list[tuple[int, ...]] = []
    inputs: list[Float32] = []
    with open_checkpoint(make_llama()) as checkpoint, Original(checkpoint, checkpoint.spec, 500) as original:
        stream = run.embed(original.embedding())

        def on_taps(taps: Any, lengths: Sequence[int]) -> None:
            assert set(taps) == set(TAPS)
            assert {len(value) for value in taps.values()} == {sum(lengths)}
            seen.append(tuple(lengths))
            inputs.append(taps["attention_in"])

        part = original.layer(0)
        tapped = run.layer(part, 0, stream, on_taps)
        np.testing.assert_array_equal(tapped.residual, run.layer(part, 0, stream).residual)
    assert seen == [(500,) * 4, (500,)]
    np.testing.assert_array_equal(np.concatenate(inputs), stream.residual)
