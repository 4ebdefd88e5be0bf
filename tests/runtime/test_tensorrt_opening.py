"""What the TensorRT backend refuses and says, and that nothing of the device is lost when something fails."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from fake_cuda import CUresult
from fake_device import BLOCK_SIZE, Device, batch_of, open_cpu, open_device, open_memory
from fake_tensorrt import FakeContext, FakeEngine, FakeRuntime, FakeRuntimeConfig, FakeTensorRT

from pagelet.exporter import export
from pagelet.models.errors import BackendError, BundleError, CapacityError
from pagelet.models.manifest import Quantization, load_manifest
from pagelet.plugins.cuda_driver import Driver
from pagelet.plugins.tensorrt.runtime_library import import_tensorrt
from pagelet.runtime.backends.device_cache import DeviceCache
from pagelet.runtime.backends.device_memory import device_free_memory

OUT_OF_MEMORY = CUresult.CUDA_ERROR_OUT_OF_MEMORY
LAUNCH_FAILED = CUresult.CUDA_ERROR_LAUNCH_FAILED


@pytest.fixture(scope="module")
def bundle(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "int8"
    export(make_llama(), folder, uncertified(weights="int4", cache_type="int8", block_size=BLOCK_SIZE))
    return folder


@pytest.fixture(scope="module")
def windowed(make_windowed: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "windowed"
    export(make_windowed(20), folder, uncertified(weights="fp32", cache_type="f16", block_size=BLOCK_SIZE))
    return folder


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path) as device:
        yield device


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"engine": ""}, ["has no engine yet", "Run `pagelet build"]),
        (
            {"engine_sms": (86, 120)},
            ["for compute capability 8.6, 12.0", "Fake RTX (compute capability 8.9)"],
        ),
        ({"engine_version": "TensorRT-RTX 1.6.0.9"}, ["TensorRT-RTX 1.6.0.9", "TensorRT-RTX 1.7.1.116"]),
        ({"engine_version": "TensorRT 1.7.1.116"}, ["TensorRT 1.7.1.116", "TensorRT-RTX 1.7.1.116"]),
        ({"engine": "gone.engine"}, ["gone.engine is missing"]),
    ],
)
def test_an_engine_for_elsewhere_is_refused_before_it_is_read(
    device: Device, bundle: Path, settings: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(BundleError) as caught:
        device.open(bundle, **settings)
    for part in [*parts, "`pagelet build "]:
        assert part in str(caught.value)
    assert ("--rebuild" in str(caught.value)) == (settings != {"engine": ""})
    assert device.trt.num_deserialized == 0
    device.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"cache_type": "fp8"}, "cache"),
        ({"quantization": Quantization("fp8")}, "weights"),
        ({"cache_type": "fp8", "quantization": Quantization("fp8")}, "weights and cache"),
    ],
)
def test_fp8_needs_a_device_that_has_it(
    bundle: Path, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    with open_device(tmp_path, sm=86) as device:
        with pytest.raises(
            BundleError, match=rf"has {what} in FP8, which needs .* 8\.9; .* 8\.6\)"
        ) as caught:
            device.open(bundle, change=change, engine_sms=(86,))
        assert "Export the model with other types" in str(caught.value)
        assert device.trt.num_deserialized == 0


def test_logits_that_differ_with_the_step_are_announced(device: Device, bundle: Path) -> None:
    noise = {
        activations: device.open(bundle, activations=activations).row_noise for activations in ("f16", "bf16")
    }
    assert 0 < noise["f16"] < noise["bf16"]
    fp8 = device.open(bundle, change={"quantization": Quantization("fp8")})
    assert fp8.row_noise > noise["f16"]


def test_the_fingerprint_names_device_and_version(device: Device, bundle: Path) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    assert gpu.fingerprint == f"{cpu.fingerprint} rtx sm89 TensorRT-RTX 1.7.1.116"
    assert (gpu.vocab_size, gpu.max_context, gpu.cache_type) == (320, 512, "int8")
    cpu.close()


def test_an_engine_of_another_model_is_refused(device: Device, bundle: Path) -> None:
    with pytest.raises(
        BundleError, match=r"inputs are not those of the contract: missing \[\], unexpected.*_scale_"
    ):
        device.open(bundle, change={"cache_type": "f16"})
    device.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step_tokens": 100}, "max_step_tokens is 128, but the engine was built for 100"),
        ({"max_rows": 161}, "most rows of logits in a step are 161, but the engine was built for 160"),
    ],
)
def test_steps_larger_than_the_engines_are_refused_at_once(
    device: Device, bundle: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(CapacityError, match=says):
        device.open(bundle, **options)
    device.assert_nothing_is_left()


def test_more_blocks_than_the_engine_numbers_are_refused(
    device: Device, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagelet.models.engine_profiles._MOST_ELEMENTS", 10 * BLOCK_SIZE * 2 * 16)
    with pytest.raises(
        CapacityError, match=r"has \d+ blocks, but the engine was built for 10\. Lower kv_memory"
    ):
        device.open(bundle)


def test_a_pool_that_does_not_fit_says_what_is_free(bundle: Path, tmp_path: Path) -> None:
    with open_device(tmp_path, total_memory=1 << 20) as device:
        with pytest.raises(CapacityError) as caught:
            device.open(bundle, kv_bytes=1 << 21)
        for part in (
            "the KV cache needs 20",
            "of the memory of Fake RTX",
            "of 1048576 bytes are free",
            "Lower kv_memory",
        ):
            assert part in str(caught.value)
        device.assert_nothing_is_left()
        assert device.open(bundle, kv_bytes=1 << 17).layout.num_bytes <= 1 << 17


def test_an_engine_that_does_not_fit_is_not_read(bundle: Path, tmp_path: Path) -> None:
    with open_device(tmp_path, total_memory=64) as device:
        with pytest.raises(CapacityError, match="only 64 bytes of the memory of Fake RTX are free"):
            device.open(bundle)
        assert device.trt.num_deserialized == 0


def test_nothing_is_left_whatever_fails_at_opening(device: Device, bundle: Path) -> None:
    """Each call of the driver fails in turn, once."""
    Driver.open(bindings=device.cuda).close()
    before = Counter(device.cuda.names())
    device.cuda.calls.clear()
    device.open(bundle)
    calls = Counter(device.cuda.names())
    device.opened.pop().close()
    assert calls["cuMemAlloc"] == 4  # the engine's workspace, the cache, a step's inputs, its logits
    assert calls["cuMemHostAlloc"] == 2
    for name, count in calls.items():
        for nth in range(before[name] + 1, count + 1):
            device.cuda.fail(name, OUT_OF_MEMORY, nth)
            with pytest.raises(CapacityError, match=r"needs|failed with CUDA_ERROR_OUT_OF_MEMORY"):
                device.open(bundle)
            device.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("deserialize_cuda_engine", "model.engine cannot be loaded: it is of no use"),
        ("create_execution_context", "a context of the engine cannot be created: it is of no use"),
        ("set_optimization_profile_async", "the engine's profile 0 cannot be used: it is of no use"),
    ],
)
def test_what_tensorrt_refuses_is_told_in_its_words(
    device: Device, bundle: Path, method: str, says: str
) -> None:
    device.trt.failures[method] = "it is of no use"
    with pytest.raises(BackendError, match=says):
        device.open(bundle)
    device.assert_nothing_is_left()


def test_a_plugin_that_fails_is_told_in_its_words(device: Device, bundle: Path) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    batch = batch_of((0, 0, 20))
    device.attention.error = RuntimeError("PagedAttention plugin, enqueue: a pointer is not aligned")
    device.trt.failures["execute_async_v3"] = "IPluginV3 failed"
    with pytest.raises(BackendError, match="a step failed: PagedAttention plugin, enqueue: a pointer is not"):
        gpu.run(batch)
    np.testing.assert_array_equal(gpu.run(batch), cpu.run(batch))
    cpu.close()


@pytest.mark.parametrize(
    "name", ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuGraphLaunch"]
)
def test_a_step_that_fails_does_not_end_the_next(device: Device, bundle: Path, name: str) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    for past in range(3):
        gpu.run(batch_of((0, past, 1)))
        cpu.run(batch_of((0, past, 1)))
    device.cuda.fail(name, CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(BackendError, match=f"a step failed: {name}.*INVALID_VALUE"):
        gpu.run(batch_of((0, 3, 1)))
    np.testing.assert_array_equal(gpu.run(batch_of((0, 3, 1))), cpu.run(batch_of((0, 3, 1))))
    cpu.close()


def test_a_step_that_was_bound_in_part_is_bound_anew(device: Device, bundle: Path) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    np.testing.assert_array_equal(gpu.run(batch_of((0, 0, 20))), cpu.run(batch_of((0, 0, 20))))
    device.trt.failures["set_tensor_address"] = "no more addresses"
    with pytest.raises(BackendError, match="does not take the address of input_ids: no more addresses"):
        gpu.run(batch_of((0, 20, 5)))
    np.testing.assert_array_equal(gpu.run(batch_of((12, 0, 20))), cpu.run(batch_of((12, 0, 20))))
    cpu.close()


def test_after_a_failed_kernel_everything_fails_and_closing_does_not(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="memory was not given back"), open_device(tmp_path) as device:
        gpu = device.open(bundle)
        device.cuda.fail("cuStreamSynchronize", LAUNCH_FAILED)
        with pytest.raises(
            BackendError, match=r"a step failed: cuStreamSynchronize failed with .*LAUNCH_FAILED"
        ):
            gpu.run(batch_of((0, 0, 20)))
        with pytest.raises(BackendError, match="LAUNCH_FAILED"):
            gpu.run(batch_of((0, 0, 20)))
        gpu.close()  # the process has to end before the device gives anything back
        gpu.close()


def test_a_step_that_is_too_large_is_a_bug(device: Device, bundle: Path) -> None:
    gpu = device.open(bundle, max_sequences=2, step_tokens=128)
    with pytest.raises(BackendError, match="asks for 145 rows of logits; the backend was opened for 144"):
        gpu.run(batch_of((0, 0, 50), rows=[0] * 145))
    for batch in (
        batch_of((0, 0, 1), (12, 0, 1), (24, 0, 1)),
        batch_of((0, 0, 129)),
    ):
        with pytest.raises(
            BackendError, match=r"of shape \[\d+.*; the engine takes at most .* a bug in pagelet"
        ):
            gpu.run(batch)
    with pytest.raises(BackendError, match="a sequence of 520 tokens; the engine takes at most 512"):
        gpu.run(batch_of((0, 519, 1), width=70))


def test_steps_run_in_another_thread_than_the_one_that_opened(device: Device, bundle: Path) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    got = []

    def work() -> None:
        got.append(gpu.run(batch_of((0, 0, 20))).copy())
        gpu.copy_blocks(0, [(0, 5)])
        gpu.copy_slots(0, [(0, 9)])
        gpu.write_blocks(0, [7], gpu.read_blocks(0, [0]))
        gpu.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(got[0], cpu.run(batch_of((0, 0, 20))))
    device.assert_nothing_is_left()
    with pytest.raises(BackendError, match="the device was closed"):
        gpu.run(batch_of((0, 0, 20)))
    cpu.close()


@pytest.mark.parametrize("name", ["bundle", "windowed"])
def test_blocks_and_slots_move_as_on_the_cpu(
    device: Device, name: str, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(name)
    backends = [device.open(bundle), open_cpu(bundle)]
    rng = np.random.default_rng(0)
    for group, layout in enumerate(backends[0].layout.groups):
        rows = rng.integers(0, 256, (6, layout.block_bytes), np.uint8)
        for backend in backends:
            backend.write_blocks(group, [0, 1, 2, 3, 8, 9], list(rows))
            backend.copy_blocks(group, [(0, 4), (4, 5), (8, 1)])
            backend.copy_slots(group, [(2, 9), (9, 31), (8 * BLOCK_SIZE, 7)])
        np.testing.assert_array_equal(backends[0].read_blocks(group, [8]), rows[4:5])
    for group in range(len(backends[0].layout.groups)):
        blocks = [9, 8, 5, 4, 3, 2, 1, 0]
        gpu, cpu = (backend.read_blocks(group, blocks) for backend in backends)
        np.testing.assert_array_equal(gpu, cpu)
    backends[1].close()


def test_the_caches_arrays_are_apart_and_aligned(device: Device, windowed: Path) -> None:
    gpu = device.open(windowed)
    cache: DeviceCache = gpu._cache
    ends = 0
    for array in cache.arrays:
        assert array.offset % 256 == 0
        assert array.offset >= ends
        ends = array.offset + array.shape[0] * array.block_bytes
    assert ends <= cache.num_bytes
    spec = load_manifest(windowed).spec
    assert [array.group for array in cache.arrays] == [
        spec.group_of(layer) for layer in range(4) for _ in "kv"
    ]
    assert sum(array.shape[0] * array.block_bytes for array in cache.arrays) == gpu.layout.num_bytes
    assert not gpu.read_blocks(0, range(gpu.layout.groups[0].num_blocks)).any()


def test_jetsons_memory_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the driver does not count what the system would give back."""
    monkeypatch.setattr("pagelet.runtime.backends.device_memory.available_memory", lambda: 5 << 30)
    for integrated, free in ((False, 1 << 30), (True, 5 << 30)):
        with open_memory(integrated=integrated) as memory:
            assert device_free_memory(memory.driver) == free


def test_the_real_package_has_what_is_called(bundle: Path, tmp_path: Path) -> None:
    """TensorRT-RTX runs no engine here, but it has the names, and says what it dislikes of a file."""
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    trt = import_tensorrt("tensorrt_rtx")
    for fake, real in (
        (FakeRuntime, trt.Runtime),
        (FakeEngine, trt.ICudaEngine),
        (FakeContext, trt.IExecutionContext),
        (FakeRuntimeConfig, trt.IRuntimeConfig),
    ):
        names = [name for name in vars(fake) if not name.startswith("_")]
        own = {"strategy", "cache", "captured", "runs", "changes", "profile", "workspace"}  # the fake's alone
        assert {name for name in names if not hasattr(real, name)} <= own, real
    for name in ("TensorIOMode", "ExecutionContextAllocationStrategy", "ILogger"):
        for constant in vars(getattr(FakeTensorRT, name)):
            assert constant.startswith("_") or hasattr(getattr(trt, name), constant), constant
    for constant in ("EAGER", "LAZY"):
        assert hasattr(trt.DynamicShapesKernelSpecializationStrategy, constant)
    with open_device(tmp_path) as device:
        version, device.trt = device.trt.__version__, trt
        with pytest.raises(BackendError, match=r"model\.engine cannot be loaded: .*not created.*"):
            device.open(bundle, engine_version=f"TensorRT-RTX {trt.__version__}")
        device.cuda.assert_nothing_is_left()
        device.trt = FakeTensorRT(device.cuda, version=version)
