"""The CUDA driver's calls over a driver of paper: what is called how, and what is said when it fails."""

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import CUresult, FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagelet.plugins.cuda_driver import CudaError, Driver, OutOfMemory


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def driver(cuda: FakeCuda) -> Driver:
    return Driver.open(bindings=cuda)


def address(array: NDArray[Any]) -> int:
    return array.ctypes.data


def test_a_device_says_what_it_is(driver: Driver) -> None:
    assert (driver.name, driver.compute_capability, driver.multiprocessors) == ("Fake RTX", 89, 24)
    assert (driver.total_memory, driver.free_memory(), driver.integrated) == (1 << 30, 1 << 30, False)
    pointer = driver.malloc(1 << 20)
    assert driver.free_memory() == (1 << 30) - (1 << 20)
    driver.free(pointer)
    assert Driver.open(bindings=FakeCuda(sm=121, integrated=True)).compute_capability == 121


def test_bytes_go_there_and_back(cuda: FakeCuda, driver: Driver) -> None:
    stream = driver.create_stream()
    sent = np.arange(100, dtype=np.float32)
    got = np.zeros_like(sent)
    first, second = driver.malloc(400), driver.malloc(400)
    driver.to_device(first, address(sent), 400, stream)
    driver.on_device(second, first, 400, stream)
    driver.memset(second + 40, 0, 8, stream)
    driver.to_host(address(got), second, 400, stream)
    assert not got.any()  # nothing is done before somebody waits
    driver.synchronize(stream)
    np.testing.assert_array_equal(got, np.where((sent >= 10) & (sent < 12), 0, sent))
    pinned = driver.host_alloc(4096)
    driver.host_free(pinned)
    for pointer in (first, second):
        driver.free(pointer)
    driver.destroy_stream(stream)
    driver.close()
    driver.close()
    cuda.assert_nothing_is_left()


def test_too_much_memory_is_an_error_with_its_size(driver: Driver) -> None:
    with pytest.raises(OutOfMemory, match=r"cuMemAlloc \(2147483648 bytes\) failed.*OUT_OF_MEMORY") as caught:
        driver.malloc(2 << 30)
    assert (caught.value.code, caught.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize(
    ("function", "call", "says"),
    [
        ("cuMemHostAlloc", lambda driver: driver.host_alloc(77), "77 bytes"),
        ("cuMemcpyHtoDAsync", lambda driver: driver.to_device(1, 2, 77, 3), "77 bytes"),
        ("cuMemcpyDtoHAsync", lambda driver: driver.to_host(1, 2, 77, 3), "77 bytes"),
        ("cuMemcpyDtoDAsync", lambda driver: driver.on_device(1, 2, 77, 3), "77 bytes"),
        ("cuMemsetD8Async", lambda driver: driver.memset(1, 2, 77, 3), "77 bytes"),
        ("cuModuleLoadData", lambda driver: driver.load_module(b"7" * 77), "77 bytes"),
        ("cuModuleGetFunction", lambda driver: driver.function(1, "attend"), "attend"),
        ("cuFuncSetAttribute", lambda driver: driver.allow_shared(1, 77), "77 bytes shared"),
        (
            "cuLaunchKernel",
            lambda driver: driver.launch(1, (4, 5, 6), 128, 77, 3, [], []),
            "grid 4 × 5 × 6, 128 threads, 77 bytes shared",
        ),
        ("cuStreamSynchronize", lambda driver: driver.synchronize(1), "cuStreamSynchronize failed"),
    ],
)
def test_an_error_names_the_call_its_size_and_cudas_name(
    cuda: FakeCuda, driver: Driver, function: str, call: Any, says: str
) -> None:
    cuda.fail(function, CUresult.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(CudaError) as caught:
        call(driver)
    assert not isinstance(caught.value, OutOfMemory)
    assert (caught.value.code, caught.value.name) == (719, "CUDA_ERROR_LAUNCH_FAILED")
    for part in (function, says, "CUDA_ERROR_LAUNCH_FAILED"):
        assert part in str(caught.value)


def test_a_kernel_gets_its_arguments(cuda: FakeCuda, driver: Driver) -> None:
    seen: list[tuple[Any, ...]] = []
    cuda.functions["attend"] = (4, lambda *launch: seen.append(launch))
    module = driver.load_module(b"\x7fELF cubin")
    function = driver.function(module, "attend")
    stream = driver.create_stream()
    pointer = (1 << 63) + 256
    driver.allow_shared(function, 64 << 10)
    driver.launch(
        function, (3, 2, 1), 256, 64 << 10, stream, [pointer, -5, 7, 0], ["*fp16", "i32", "i64", "*i8"]
    )
    assert not seen
    driver.synchronize(stream)
    ((grid, threads, shared, values),) = seen
    assert (grid, threads, shared) == ((3, 2, 1), 256, 64 << 10)
    assert values.tolist()[::2] == [pointer, 7]
    assert values.view(np.int32).reshape(4, 2)[:, 0].tolist() == [256, -5, 7, 0]
    driver.unload_module(module)
    assert not cuda.modules


@given(
    st.lists(
        st.tuples(st.integers(-(2**31), 2**31 - 1), st.sampled_from(["i32", "i64", "*fp32"])), max_size=30
    )
)
def test_any_arguments_arrive(arguments: list[tuple[int, str]]) -> None:
    seen: list[NDArray[np.uint64]] = []
    cuda = FakeCuda(functions={"f": (len(arguments), lambda *launch: seen.append(launch[-1]))})
    driver = Driver.open(bindings=cuda)
    function, stream = driver.function(driver.load_module(b"\x7fELF"), "f"), driver.create_stream()
    driver.launch(
        function, (1, 1, 1), 32, 0, stream, [value for value, _ in arguments], [kind for _, kind in arguments]
    )
    driver.synchronize(stream)
    assert seen[0].view(np.int64).tolist() == [value for value, _ in arguments]


def test_arguments_that_cannot_be_are_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="1 arguments are given for 2"):
        driver.launch(1, (1, 1, 1), 32, 0, 1, [1], ["i32", "i32"])
    with pytest.raises(ValueError, match="'fp32' is no type"):
        driver.launch(1, (1, 1, 1), 32, 0, 1, [1], ["fp32"])


def test_a_graph_replays_what_was_captured(cuda: FakeCuda, driver: Driver) -> None:
    stream = driver.create_stream()
    source, target = np.array([1.0]), np.zeros(1)
    pointer = driver.malloc(8)
    driver.begin_capture(stream)
    driver.to_device(pointer, address(source), 8, stream)
    driver.to_host(address(target), pointer, 8, stream)
    graph = driver.end_capture(stream)
    driver.synchronize(stream)
    assert target[0] == 0.0
    for value in (2.0, 3.0):
        source[0] = value
        driver.launch_graph(graph, stream)
        driver.synchronize(stream)
        assert target[0] == value
    driver.destroy_graph(graph)
    assert not cuda.graphs
    assert not cuda.executables


@pytest.mark.parametrize("function", ["cuStreamEndCapture", "cuGraphInstantiate"])
def test_a_capture_that_fails_leaves_a_stream_that_works(
    cuda: FakeCuda, driver: Driver, function: str
) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    cuda.fail(function, CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    with pytest.raises(CudaError, match="CAPTURE_INVALIDATED"):
        driver.end_capture(stream)
    driver.synchronize(stream)
    for spoilt in (False, True):
        driver.begin_capture(stream)
        if spoilt:
            cuda.fail("cuStreamEndCapture", CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        driver.abandon_capture(stream)
        driver.synchronize(stream)
    assert not cuda.graphs
    assert not cuda.executables


def test_another_thread_must_make_the_device_current(driver: Driver) -> None:
    said: list[str] = []

    def work() -> None:
        with pytest.raises(CudaError, match="INVALID_CONTEXT"):
            driver.malloc(1)
        driver.make_current()
        driver.free(driver.malloc(1))
        said.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["done"]
    driver.close()
    with pytest.raises(CudaError, match="was closed"):
        driver.make_current()


def test_no_device_is_one_clear_line() -> None:
    with pytest.raises(CudaError, match=r"no CUDA device can be used: cuInit failed .*NO_DEVICE") as caught:
        Driver.open(bindings=FakeCuda(devices=0))
    assert caught.value.code == 100
    with pytest.raises(CudaError, match="there is no CUDA device 2: the driver finds 1"):
        Driver.open(2, bindings=FakeCuda())


def test_no_driver_is_one_clear_line() -> None:
    def init(flags: int) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuInit" not found')  # cuda-bindings 12

    with pytest.raises(CudaError, match=r"there is no NVIDIA driver here\. .* install its driver"):
        Driver.open(bindings=SimpleNamespace(cuInit=init))


def test_the_bindings_are_imported_when_a_device_is_opened() -> None:
    code = (
        "import sys; from pagelet.plugins.cuda_driver import CudaError, Driver\n"
        "assert not any(name.split('.')[0] == 'cuda' for name in sys.modules)\n"
        "sys.modules['cuda'] = None\n"
        "try: Driver.open()\n"
        "except CudaError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cuda-bindings cannot be imported" in done.stdout


def test_the_real_bindings_have_what_is_called(cuda: FakeCuda) -> None:
    """Names and constants of the fake are cuda-bindings' own, where that is installed."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name in vars(FakeCuda):
        if name.startswith("_cu"):
            assert callable(getattr(real, name[1:])), name
        elif name.startswith("CU"):
            for constant, value in vars(getattr(cuda, name)).items():
                assert int(getattr(getattr(real, name), constant)) == value, constant
    for result in CUresult:
        assert int(getattr(real.CUresult, result.name)) == result
    # Handles may be passed as whole numbers.
    assert int(real.CUstream(5)) == int(real.CUdeviceptr(5)) == 5
    assert ctypes.sizeof(ctypes.c_void_p) == 8
