"""The CPU backend on a tiny random Llama: one real ONNX Runtime session, caches updated in place."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from numpy.typing import NDArray

from pagelet.exporter import export
from pagelet.models.cache import cache_bytes_per_token
from pagelet.models.errors import BackendError, BundleError, CancelledError, CapacityError
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.backends.cpu import CpuBackend, cache_shape
from pagelet.runtime.cache_layout import CacheLayout

VOCAB = 320


@pytest.fixture(scope="module", params=["fp32", "int4"])
def bundle(
    request: pytest.FixtureRequest, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / request.param
    export(make_llama(), folder, uncertified(weights=request.param))
    return folder


@pytest.fixture(scope="module")
def windowed_bundle(make_windowed: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, every second one with a window of 40 tokens."""
    bundle = tmp_path_factory.mktemp("windowed") / "bundle"
    export(make_windowed(40), bundle, uncertified(weights="fp32", block_size=8))
    return bundle


def prompt_of(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def layout_of(manifest: Manifest) -> CacheLayout:
    return cache_shape(manifest, max_step_tokens=64).layout(4 << 20, manifest.spec.max_context)


def arrays_of(backend: CpuBackend) -> list[NDArray[Any]]:
    return [array.memory for array in backend._cache.arrays]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sequences_together_give_what_each_gives_alone(bundle: Path, temperature: float) -> None:
    params = SamplingParams(max_tokens=72, ignore_eos=True, temperature=temperature, seed=11)
    prompts = [prompt_of(1 + 6 * i, seed=i) for i in range(16)]
    with Engine.open(bundle, EngineConfig(kv_memory="16MiB", threads=2)) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        logits = [engine.logits(prompt) for prompt in prompts]
    # Few blocks, small steps, another number of threads: chunked, batched and preempted.
    manifest = load_manifest(bundle)
    few = 12 * manifest.block_size * cache_bytes_per_token(manifest.spec, manifest.cache_type)
    crowded = EngineConfig(kv_memory=few, threads=1, max_sequences=8, max_step_tokens=24)
    with Engine.open(bundle, crowded) as engine:
        together = engine._loop.call(lambda: [engine.submit(prompt, params) for prompt in prompts])
        beside = [engine.logits(prompt) for prompt in prompts]
        assert [request.result().token_ids for request in together] == alone
        assert engine.stats().preemptions > 0
    for one, other in zip(logits, beside, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_logits_are_the_same_with_hits_forks_and_samples(
    bundle: Path, windowed_bundle: Path, windowed: bool, temperature: float
) -> None:
    folder = windowed_bundle if windowed else bundle
    # The log-probabilities are a function of the logits, row by row, so equal ones mean equal logits.
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, temperature=temperature, seed=11, logprobs=20, n=3
    )
    prompts = [prompt_of(70, seed=i % 2) + prompt_of(1 + 9 * i, seed=i) for i in range(6)]
    with Engine.open(folder, EngineConfig(kv_memory="16MiB", threads=2, prefix_cache=False)) as engine:
        alone = [engine.generate(prompt, params).choices for prompt in prompts]
    with Engine.open(folder, EngineConfig(kv_memory="16MiB", threads=1, max_step_tokens=48)) as engine:
        first = engine.generate_all(prompts, params)
        again = engine.generate_all(prompts, params)
        assert [done.choices for done in first] == alone
        assert [done.choices for done in again] == alone
        block_size = engine.stats().block_size
        assert all(
            done.usage.cached_tokens >= (len(prompt) - 1) // block_size * block_size
            for done, prompt in zip(again, prompts, strict=True)
        )
        # A fork goes on as its parent does where both draw with the parent's noise.
        parent = engine.submit(prompts[5], params)
        for _ in range(9):
            parent.next_chunk()
        greedy = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=20)
        fork = engine.fork(parent, greedy)
        forked = fork.result()
        assert forked.choices == engine.generate(fork.prompt_ids, greedy, prefix_cache=False).choices
        assert parent.result().choices == alone[5]
        assert engine.stats().blocks_used == 0


def test_blocks_are_copied_in_every_layer_of_their_group_alone(windowed_bundle: Path) -> None:
    manifest = load_manifest(windowed_bundle)
    layout = layout_of(manifest)
    backend = CpuBackend(windowed_bundle / manifest.graph, manifest, layout, threads=1, max_rows=8)
    rng = np.random.default_rng(0)
    for array in arrays_of(backend):
        array[:6] = rng.random((6, *array.shape[1:]))
    before = [array.copy() for array in arrays_of(backend)]
    backend.copy_blocks(1, [(0, 4), (4, 5)])
    for layer in range(4):
        for old, new in zip(before[2 * layer :][:2], arrays_of(backend)[2 * layer :][:2], strict=True):
            copied = layer % 2 == 0  # the layers with a window
            assert (new[4] == old[0 if copied else 4]).all()
            assert (new[5] == old[0 if copied else 5]).all()
            assert (new[:4] == old[:4]).all()
    backend.close()


def test_a_window_group_is_given_less_memory(windowed_bundle: Path) -> None:
    manifest = load_manifest(windowed_bundle)
    assert manifest.spec.window_groups == (0, 40)
    block_bytes = 2 * 2 * 2 * 16 * 2 * 8  # K and V, layers of the group, KV heads, head size, bytes, tokens
    with Engine.open(windowed_bundle, EngineConfig(kv_memory="1MiB", max_step_tokens=32)) as engine:
        full, windowed = engine._loop.blocks.layout.groups
        assert full.block_bytes == windowed.block_bytes == block_bytes
        assert windowed.num_blocks * 5 < full.num_blocks
        assert engine.stats().kv_bytes <= 1 << 20
        assert engine.spec == manifest.spec
        assert engine.manifest == manifest
        # The whole context fits although the windowed layers have no room for it.
        assert windowed.num_blocks * 8 < 512
        long = prompt_of(480, seed=1)
        assert len(engine.generate(long, SamplingParams(max_tokens=31, ignore_eos=True)).token_ids) == 31


def test_the_logits_do_not_depend_on_what_the_blocks_held(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    layout = layout_of(manifest)
    backend = CpuBackend(bundle / manifest.graph, manifest, layout, threads=2, max_rows=8)
    tokens = np.array(prompt_of(40, seed=3))

    def run(blocks: list[int], begin: int, end: int) -> np.ndarray:
        count = end - begin
        batch = StepBatch(
            tokens[begin:end],
            np.arange(begin, end),
            np.array([0, count], np.int32),
            np.array([begin], np.int32),
            (np.array([[*blocks, -1]], np.int32),),
            np.array([count - 1]),
        )
        return backend.run(batch).copy()

    expected = run([0, 1], 0, 40)
    for cache in arrays_of(backend):
        cache[2:] = np.nan
    run([5, 3], 0, 33)
    assert (run([5, 3], 33, 40) == expected).all()
    written = [np.flatnonzero(np.isfinite(cache[2:]).any(axis=(1, 2, 3))) + 2 for cache in arrays_of(backend)]
    assert all(blocks.tolist() == [3, 5] for blocks in written), "the cache is not updated in place"
    backend.close()
    backend.close()


def test_a_failing_run_is_a_backend_error_and_the_session_goes_on(bundle: Path) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="4MiB", threads=1)) as engine:
        expected = engine.logits([5, 6])
        fill = engine._loop._buffers.fill
        spoiled = engine._loop._buffers

        def fill_wrongly(runs: list) -> StepBatch:  # type: ignore[type-arg]
            batch = fill(runs)
            batch.block_tables[0][:] = 10**6
            return batch

        spoiled.fill = fill_wrongly  # type: ignore[method-assign, assignment]
        with pytest.raises(BackendError, match="block_table"):
            engine.logits([5, 6])
        spoiled.fill = fill  # type: ignore[method-assign]
        assert (engine.logits([5, 6]) == expected).all()


def test_more_rows_than_the_buffer_holds_are_refused(windowed_bundle: Path) -> None:
    manifest = load_manifest(windowed_bundle)
    layout = layout_of(manifest)
    backend = CpuBackend(windowed_bundle / manifest.graph, manifest, layout, threads=1, max_rows=2)
    starts = np.array([0, 3], np.int32), np.array([0], np.int32)
    tables = (np.array([[0, -1]], np.int32),) * 2
    with pytest.raises(BackendError, match="asks for 3 rows of logits; the backend was opened for 2"):
        backend.run(StepBatch(np.arange(3), np.arange(3), *starts, tables, np.arange(3)))
    backend.close()


def test_an_idle_session_uses_no_processor(bundle: Path) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="4MiB", threads=2)) as engine:
        engine.generate([5], SamplingParams(max_tokens=20, ignore_eos=True))
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.02  # spinning on would take 0.03 and more


def test_opening_reports_progress_and_can_be_cancelled(bundle: Path) -> None:
    seen: list[tuple[str, float]] = []
    Engine.open(bundle, verify=True, on_progress=lambda *step: seen.append(step)).close()
    assert list(dict.fromkeys(stage for stage, _ in seen)) == ["verify", "tokenizer", "session"]
    for stage in ("verify", "tokenizer", "session"):
        fractions = [fraction for name, fraction in seen if name == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    for stop in ("verify", "tokenizer", "session"):
        with pytest.raises(CancelledError, match=stop):
            Engine.open(bundle, on_progress=lambda stage, fraction, stop=stop: stage != stop)


def test_a_pool_that_cannot_be_is_refused_with_numbers(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    block_bytes = manifest.block_size * cache_bytes_per_token(manifest.spec, manifest.cache_type)
    # K and V, layers, KV heads, head size, bytes of an f16
    assert block_bytes == 2 * 2 * 2 * 16 * 2 * manifest.block_size
    with pytest.raises(CapacityError, match=f"takes {block_bytes}"):
        Engine.open(bundle, EngineConfig(kv_memory=block_bytes - 1))
    with Engine.open(bundle, EngineConfig(kv_memory=3 * block_bytes + 5)) as engine:
        assert (engine.stats().blocks_total, engine.stats().kv_bytes) == (3, 3 * block_bytes)


def test_a_graph_of_another_kind_is_refused(bundle: Path, tmp_path: Path) -> None:
    manifest = load_manifest(bundle)
    data = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    data["spec"]["layers"].append(data["spec"]["layers"][0])
    for file in bundle.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    changed = load_manifest(tmp_path)
    layout = layout_of(manifest)
    with pytest.raises(BundleError, match=r"missing \['key_cache.2', 'value_cache.2'\]"):
        CpuBackend(bundle / changed.graph, changed, layout, threads=1, max_rows=4)
    with pytest.raises(BackendError, match="cannot load"):
        CpuBackend(tmp_path / "manifest.json", manifest, layout, threads=1, max_rows=4)
