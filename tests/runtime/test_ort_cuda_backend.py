"""The backend of target `cuda`, its ONNX Runtime and its driver replaced by fakes that compute on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_on_cpu import Ragged, on_cpu, run_steps
from exporting import uncertified
from fake_cuda import CUresult, FakeCuda
from fake_onnxruntime import CPU, FakeRuntime
from numpy.typing import NDArray

from pagelet.exporter import export
from pagelet.models.errors import BackendError, BundleError, CapacityError
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.plugins.cuda_driver import Driver
from pagelet.plugins.session import open_session
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.backends import StepBatch, ort_cuda
from pagelet.runtime.backends.ort_cuda import OrtCudaBackend
from pagelet.runtime.backends.select import cache_shape
from pagelet.runtime.cache_layout import CacheLayout

Float32 = NDArray[np.float32]
MAX_ROWS, STEP_TOKENS = 8, 48
BLOCKS = (7, 5)  # of full attention, and of windows


def draw(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 258, count).tolist()
    return tokens


TABLES = np.asarray([[3, -1], [1, 4]], np.int32)
STEPS = (
    Ragged((0, 0), (draw(0, 40), draw(1, 7)), TABLES),
    Ragged((40, 7), (draw(2, 1), draw(3, 1)), TABLES),
    Ragged((41, 8), (draw(4, 3), draw(5, 30)), TABLES),
)


@pytest.fixture(scope="module", params=["f16", "int8", "fp8"])
def bundle(
    request: pytest.FixtureRequest,
    make_windowed: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Four layers, every second one with a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("cuda") / request.param
    export(make_windowed(20), folder, uncertified(target="cuda", cache_type=request.param))
    return folder


@pytest.fixture(scope="module")
def plain(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "plain"
    export(make_llama(), folder, uncertified(target="cuda"))
    return folder


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(total_memory=256 << 20)


@pytest.fixture
def runtime(cuda: FakeCuda) -> FakeRuntime:
    return FakeRuntime(cuda)


def layout_of(manifest: Manifest) -> CacheLayout:
    layout = cache_shape(manifest, STEP_TOKENS).layout(8 << 20, manifest.spec.max_context)
    groups = tuple(
        replace(group, num_blocks=count) for group, count in zip(layout.groups, BLOCKS, strict=False)
    )
    return replace(layout, groups=groups)


def opened(folder: Path, cuda: FakeCuda, runtime: FakeRuntime) -> OrtCudaBackend:
    manifest = load_manifest(folder)
    driver = Driver.open(bindings=cuda)
    return OrtCudaBackend(
        folder / manifest.graph,
        manifest,
        layout_of(manifest),
        max_rows=MAX_ROWS,
        driver=driver,
        runtime=runtime,
    )


def batch_of(step: Ragged, groups: int, rows: Sequence[int]) -> StepBatch:
    feeds = step.feeds(groups)
    return StepBatch(
        feeds["input_ids"],
        feeds["position_ids"],
        feeds["cumulative_sequence_length"],
        feeds["past_seqlens"],
        (step.tables,) * groups,
        np.asarray(rows, np.int64),
    )


def test_the_installed_package_without_cuda_is_refused(plain: Path, cuda: FakeCuda) -> None:
    """No fake: the wheel for processors is what the tests are run with."""
    manifest = load_manifest(plain)
    with pytest.raises(BackendError, match=r"no CUDAExecutionProvider. Install onnxruntime-gpu in the place"):
        OrtCudaBackend(plain / manifest.graph, manifest, layout_of(manifest), max_rows=1)
    assert cuda.calls == []


def test_logits_are_those_of_the_graph(bundle: Path, cuda: FakeCuda, runtime: FakeRuntime) -> None:
    """Ragged prefill, decoding and chunks, in one cache: to the bit."""
    manifest = load_manifest(bundle)
    graph = on_cpu(onnx.load(bundle / manifest.graph, load_external_data=False))
    session = open_session(graph.SerializeToString(), threads=1, folder=bundle)
    expected = run_steps(session, STEPS, groups=2, num_blocks=8)
    backend = opened(bundle, cuda, runtime)
    start = 0
    for step in STEPS:
        count = sum(map(len, step.texts))
        rows = [0, count - 1] if count > MAX_ROWS else list(range(count))
        found = backend.run(batch_of(step, 2, rows))
        assert found.shape == (len(rows), backend.vocab_size)
        np.testing.assert_array_equal(found, expected[start + np.asarray(rows)])
        start += count
    backend.close()
    cuda.assert_nothing_is_left()


def test_bounds_of_lengths_are_exact(plain: Path, cuda: FakeCuda, runtime: FakeRuntime) -> None:
    backend = opened(plain, cuda, runtime)
    backend.run(batch_of(STEPS[2], 1, [0]))
    runs = runtime.sessions[0].runs
    # The warm-up has the largest step; the graph asks for no positions, and knows no trees.
    assert [run["attention_metadata"].tolist() for run in runs] == [[48, 48, 48], [30, 44, 44]]
    assert not {"position_ids", "ancestor_mask"} & set(runs[1])
    backend.close()


def test_opening_runs_the_largest_step_and_leaves_zeros(
    bundle: Path, cuda: FakeCuda, runtime: FakeRuntime
) -> None:
    backend = opened(bundle, cuda, runtime)
    (run,) = runtime.sessions[0].runs
    assert len(run["input_ids"]) == STEP_TOKENS
    assert len(run["logits_indices"]) == MAX_ROWS
    for group, count in enumerate(BLOCKS):
        assert not backend.read_blocks(group, range(count)).any()
    backend.close()


def test_blocks_and_tokens_are_moved_before_the_next_step(
    plain: Path, cuda: FakeCuda, runtime: FakeRuntime
) -> None:
    """A sequence goes on in a copy of its blocks; the session fails if a copy still waits."""
    backend = opened(plain, cuda, runtime)
    backend.run(batch_of(STEPS[0], 1, [0]))
    expected = backend.run(batch_of(STEPS[1], 1, [0, 1])).copy()
    backend.copy_blocks(0, [(3, 6), (1, 5)])
    moved = replace(STEPS[1], tables=np.asarray([[6, -1], [5, 0]], np.int32))
    np.testing.assert_array_equal(backend.run(batch_of(moved, 1, [0, 1])), expected)
    saved = backend.read_blocks(0, [6, 5])
    assert saved.shape == (2, backend.layout.groups[0].block_bytes)
    backend.write_blocks(0, [2, 0], list(saved))
    again = replace(STEPS[1], tables=np.asarray([[2, -1], [0, 4]], np.int32))
    np.testing.assert_array_equal(backend.run(batch_of(again, 1, [0, 1])), expected)
    np.testing.assert_array_equal(backend.read_blocks(0, [2, 0]), saved)
    # The second sequence's token of the step before lies at offset 7 of its block.
    size = backend.layout.block_size
    backend.copy_slots(0, [(0 * size + 7, 0 * size + 9)])
    slots = backend.read_blocks(0, [0])[0].reshape(4, size, -1)  # two layers' keys and values
    np.testing.assert_array_equal(slots[:, 9], slots[:, 7])
    assert slots[:, 7].any()
    backend.close()


def test_what_it_cannot_do_is_refused(plain: Path, cuda: FakeCuda, runtime: FakeRuntime) -> None:
    backend = opened(plain, cuda, runtime)
    assert not backend.supports_trees
    assert backend.row_noise > 0
    batch = batch_of(STEPS[0], 1, [0])
    with pytest.raises(BackendError, match="verifies no trees"):
        backend.run(replace(batch, ancestor_mask=np.zeros((47, 1), np.int32)))
    with pytest.raises(BackendError, match=r"asks for 9 rows of logits; .* opened for 8"):
        backend.run(replace(batch, logits_indices=np.arange(9)))
    runtime.sessions[0].failure = RuntimeError("CUDA failure 700: an illegal memory access")
    with pytest.raises(BackendError, match="failed in a step: CUDA failure 700"):
        backend.run(batch)
    cuda.fail("cuMemcpyDtoDAsync", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(BackendError, match=r"cannot be copied: .* CUDA_ERROR_INVALID_VALUE"):
        backend.copy_blocks(0, [(0, 1)])
    backend.close()
    backend.close()
    cuda.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"available": [CPU]}, BackendError, "Install onnxruntime-gpu in the place of onnxruntime"),
        ({"loads": False}, BackendError,
         r"cannot be loaded \(Failed to load libcublasLt.*\). Install onnxruntime-gpu\[cuda,cudnn\].* 13.0"),
        ({"used": [CPU]}, BackendError, "without CUDAExecutionProvider. Is the driver too old"),
        ({"__version__": "1.27.1"}, BackendError, "1.27.1 is installed; .* needs 1.31 or later"),
        ({"failure": RuntimeError("fallback to CPU EP has been explicitly disabled")}, BackendError,
         "cannot be opened: fallback to CPU EP"),
        ({"failure": RuntimeError("BFCArena: Failed to allocate memory for requested buffer")}, CapacityError,
         "memory is too small .* Lower kv_memory"),
    ],
)  # fmt: skip
def test_a_runtime_that_does_not_serve_is_named(
    change: dict[str, Any],
    error: type[Exception],
    message: str,
    plain: Path,
    cuda: FakeCuda,
    runtime: FakeRuntime,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        setattr(runtime, name, value)
    with pytest.raises(error, match=message) as caught:
        opened(plain, cuda, runtime)
    assert "\n" not in str(caught.value)
    assert runtime.severities in ([], [4, 2])  # its own messages are off meanwhile, and on again
    assert capsys.readouterr().out == ""
    cuda.assert_nothing_is_left()


def test_a_cache_that_does_not_fit_is_refused_and_nothing_stays(plain: Path) -> None:
    cuda = FakeCuda(total_memory=100_000)
    with pytest.raises(CapacityError, match=r"the KV cache needs \d+ bytes .* Lower kv_memory"):
        opened(plain, cuda, FakeRuntime(cuda))
    cuda.assert_nothing_is_left()


def test_no_device_is_one_line(plain: Path, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagelet.plugins.cuda_driver._bindings", lambda: FakeCuda(devices=0))
    manifest = load_manifest(plain)
    with pytest.raises(BackendError, match=r"no CUDA device can be used: .*NO_DEVICE") as caught:
        OrtCudaBackend(plain / manifest.graph, manifest, layout_of(manifest), max_rows=1, runtime=runtime)
    assert "\n" not in str(caught.value)


def test_a_foreign_graph_is_named(plain: Path, tmp_path: Path, cuda: FakeCuda, runtime: FakeRuntime) -> None:
    manifest = load_manifest(plain)
    model = onnx.load(plain / manifest.graph, load_external_data=False)
    model.graph.output.pop()
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / manifest.graph).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"outputs .* missing \['value_cache_out.1'\]"):
        opened(tmp_path, cuda, runtime)
    cuda.assert_nothing_is_left()


@pytest.mark.parametrize("bundle", ["f16", "int8"], indirect=True)
def test_an_engine_generates_the_same_with_company_and_from_its_cache(
    bundle: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens alone, then of many sequences at once, in small steps, with prefixes that are found."""
    monkeypatch.setattr("pagelet.plugins.cuda_driver._bindings", lambda: cuda)
    monkeypatch.setattr(ort_cuda, "import_runtime", lambda: FakeRuntime(cuda))
    prompts = [draw(9, 270) + draw(seed, 5 + 3 * seed) for seed in range(3)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    config = EngineConfig(kv_memory="12MiB", max_step_tokens=64, speculate="off")
    with Engine.open(bundle, config) as engine:
        alone = [engine.generate(prompt, params, prefix_cache=False).token_ids for prompt in prompts]
        together = engine.generate_all(prompts, params)
        again = engine.generate_all(prompts, params)
        assert [done.token_ids for done in together] == alone
        assert [done.token_ids for done in again] == alone
        assert all(done.usage.cached_tokens >= 256 for done in again)
    cuda.assert_nothing_is_left()
