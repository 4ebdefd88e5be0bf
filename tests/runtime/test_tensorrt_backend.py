"""The TensorRT backend's steps on a device of paper: the very numbers of the CPU, and in how many calls."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from fake_cuda import CUresult, FakeCuda
from fake_device import BLOCK_SIZE, Device, batch_of, open_cpu, open_device

from pagelet.exporter import export


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


def test_steps_of_every_kind_give_the_cpus_numbers(device: Device, bundle: Path) -> None:
    cpu, gpu = open_cpu(bundle), device.open(bundle)
    tree = np.array([[0], [1], [1], [5]], np.int32)
    for batch in (
        batch_of((0, 0, 50), (12, 0, 9)),  # the prompts
        batch_of((0, 50, 1), (12, 9, 1)),  # decoding, padded or not
        batch_of((0, 51, 1), (12, 10, 1), (24, 0, 1)),
        batch_of((0, 52, 1), (12, 11, 1), (24, 1, 1)),
        batch_of((0, 53, 4), mask=tree, rows=[0, 1, 2, 3]),
        batch_of((0, 57, 3), (12, 12, 2), (36, 0, 40), rows=[0, 1, 2, 44]),
        batch_of((0, 60, 1)),
        batch_of((0, 61, 1)),
    ):
        np.testing.assert_array_equal(gpu.run(batch), cpu.run(batch))
    for group, blocks in enumerate([[0, 7, 12, 13, 24]]):
        np.testing.assert_array_equal(gpu.read_blocks(group, blocks), cpu.read_blocks(group, blocks))
    cpu.close()


def test_a_step_is_one_copy_one_launch_one_copy_and_one_wait(device: Device, bundle: Path) -> None:
    gpu = device.open(bundle)
    device.step_calls()
    enqueued = ["cuMemcpyHtoDAsync", "execute_async_v3", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    captured = [
        "cuStreamBeginCapture",
        "execute_async_v3",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
    ]
    replayed = ["cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    gpu.run(batch_of((0, 0, 50), (12, 0, 9)))
    assert device.step_calls() == enqueued
    gpu.run(batch_of((0, 50, 1), (12, 9, 1)))
    assert device.step_calls() == enqueued + captured
    for position in range(51, 54):
        gpu.run(batch_of((0, position, 1), (12, position - 41, 1)))
        assert device.step_calls() == replayed
    gpu.run(batch_of((0, 54, 2), (12, 13, 1)))  # a candidate to verify
    assert device.step_calls() == enqueued


def test_a_graph_is_captured_once_for_each_number_of_sequences(device: Device, bundle: Path) -> None:
    gpu = device.open(bundle, max_sequences=6)
    sequences = [(12 * index, 5, 1) for index in range(6)]
    for count in (3, 4, 1, 2, 5, 6, 4, 3, 2, 1):
        device.cuda.calls.clear()
        gpu.run(batch_of(*sequences[:count]))
    assert len(device.cuda.executables) == 4  # 1, 2, 4, 6
    assert device.cuda.names().count("cuGraphLaunch") == 1
    # A longer sequence needs a wider table, and has a graph of its own; the widths grow by twos.
    for past in (8 * 32 - 1, 8 * 32, 8 * 32 + 1, 8 * 60):
        gpu.run(batch_of((0, past, 1), width=64))
    assert len(device.cuda.executables) == 5
    gpu.run(batch_of(*[(0, 5, 2)] * 6, rows=[0]))
    assert len(device.cuda.executables) == 5


def test_only_contexts_of_graphs_wait_for_their_kernels(device: Device, bundle: Path) -> None:
    """TensorRT-RTX compiles for the shapes it meets; a graph recorded before would stay slow for ever."""
    gpu = device.open(bundle)
    gpu.run(batch_of((0, 0, 1)))
    assert [context().kernels for context in device.trt.contexts] == ["lazy", "lazy", "eager"]
    assert [context().captured for context in device.trt.contexts] == [False, False, True]


def test_tensorrt_knows_nothing_of_kernels_for_shapes(bundle: Path, tmp_path: Path) -> None:
    with open_device(tmp_path, rtx=False) as device:
        gpu, cpu = device.open(bundle, target="tensorrt"), open_cpu(bundle)
        batch = batch_of((0, 0, 1))
        np.testing.assert_array_equal(gpu.run(batch), cpu.run(batch))
        cpu.close()


@pytest.mark.parametrize("failure", ["capture", "instantiate", "enqueue", "context", "refused"])
def test_without_graphs_decoding_goes_on(device: Device, bundle: Path, failure: str) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    if failure == "capture":
        device.cuda.fail("cuStreamEndCapture", CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    elif failure == "instantiate":
        device.cuda.fail("cuGraphInstantiate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    elif failure == "context":
        device.trt.failures["create_execution_context"] = "too many contexts"
    elif failure == "refused":
        device.trt.capturable = False
    elif failure == "enqueue":
        fail_while_capturing(device)

    def decode(*sequences: int) -> None:
        for past in range(3):
            batch = batch_of(*[(12 * index, past, 1) for index in sequences])
            np.testing.assert_array_equal(gpu.run(batch), cpu.run(batch))

    with pytest.warns(RuntimeWarning, match="goes on without CUDA graphs") as noted:
        decode(0, 1, 2)
    assert len(noted) == 1
    decode(3)  # a warning would be an error
    assert not device.cuda.executables
    cpu.close()


def fail_while_capturing(device: Device) -> None:
    """The first run is the step itself, the second one is what is captured."""
    begin = FakeCuda._cuStreamBeginCapture

    class Failing(FakeCuda):
        def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
            device.trt.failures["execute_async_v3"] = "not while a stream is captured"
            return begin(self, stream, mode)

    device.cuda.__class__ = Failing
