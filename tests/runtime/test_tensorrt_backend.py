"""The TensorRT backend's steps on a device of paper: the very numbers of the CPU, and in how many calls."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from fake_cuda import CUresult, FakeCuda
from fake_device import BLOCK_SIZE, Device, batch_of, open_cpu, open_device, open_memory
from hypothesis import given
from hypothesis import strategies as st

from pagelet.exporter import export
from pagelet.runtime.backends.cuda_graphs import bucket, table_width
from pagelet.runtime.backends.staging import InputStaging, staged_bytes, step_shapes


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


def test_shapes_are_told_when_they_change(device: Device, bundle: Path) -> None:
    gpu, cpu = device.open(bundle), open_cpu(bundle)
    contexts = [context() for context in device.trt.contexts]
    changes = []
    for past, count in ((0, 50), (50, 3), (53, 3), (56, 90), (146, 3), (149, 4), (153, 3)):
        batch = batch_of((0, past, count), width=32)
        np.testing.assert_array_equal(gpu.run(batch), cpu.run(batch))
        changes.append([context.changes for context in contexts])
    decode, prefill = (np.diff(column) > 0 for column in zip(*changes, strict=True))
    assert decode.tolist() == [True, False, False, False, True, True]
    assert prefill.tolist() == [False, False, True, False, False, False]
    del contexts
    cpu.close()


def test_only_contexts_of_graphs_wait_for_their_kernels(device: Device, bundle: Path) -> None:
    """TensorRT-RTX compiles for the shapes it meets; a graph recorded before would stay slow for ever."""
    gpu = device.open(bundle)
    gpu.run(batch_of((0, 0, 1)))
    contexts = [context() for context in device.trt.contexts]
    kinds = [context.config.dynamic_shapes_kernel_specialization_strategy for context in contexts]
    assert kinds == ["lazy", "lazy", "eager"]
    assert [context.captured for context in contexts] == [False, False, True]
    # What one has compiled is there for all.
    assert len({id(context.config) for context in contexts}) == 3
    assert len({context.config.cache for context in contexts}) == 1
    assert contexts[0].config.cache is not None
    del contexts


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


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    pasts=st.lists(st.integers(0, 300), min_size=6, max_size=6),
    spare=st.integers(0, 3),
    most=st.integers(43, 100),
)
def test_padding_adds_sequences_that_have_nothing(
    counts: list[int], pasts: list[int], spare: int, most: int
) -> None:
    """Whatever the batch: what it says is at the beginning, and the rest maps no block and has no past."""
    sequences = [
        (100 * index, past, count) for index, (past, count) in enumerate(zip(pasts, counts, strict=False))
    ]
    batch = batch_of(*sequences, groups=2, width=43)
    tokens, total = sum(counts), len(counts) + spare
    width = table_width(batch, BLOCK_SIZE, most)
    shapes = step_shapes(tokens=tokens + spare, sequences=total, logits=total, table_width=width, groups=2)
    with open_memory() as memory:
        staged = InputStaging(memory, staged_bytes(shapes)).place(shapes)
        views = staged.views
        for view in views.values():
            view.fill(7)  # of the step before
        staged.fill(batch)
        for name in ("input_ids", "position_ids"):
            assert views[name].tolist() == [*getattr(batch, name), *[0] * spare]
        assert np.diff(views["cumulative_sequence_length"]).tolist() == [*counts, *[1] * spare]
        assert views["past_seqlens"].tolist() == [*batch.past_seqlens, *[0] * spare]
        assert views["logits_indices"].tolist() == [*batch.logits_indices, *range(tokens, tokens + spare)]
        needed = [-(-(past + count) // BLOCK_SIZE) for _, past, count in sequences]
        assert max(needed) <= width <= most
        for group in range(2):
            table = views[f"block_table_{group}"]
            assert [(row >= 0).sum() for row in table] == [*needed, *[0] * spare]
            for row, blocks, count in zip(table, batch.block_tables[group], needed, strict=False):
                assert row[:count].tolist() == blocks[:count].tolist()
        assert all(address % 256 == 0 for address in staged.addresses.values())


@given(st.integers(1, 200), st.integers(1, 200))
def test_buckets_are_few_and_large_enough(count: int, most: int) -> None:
    count = min(count, most)
    assert count <= bucket(count, most) <= most
    assert bucket(count, most) < 2 * count or bucket(count, most) == 1
    assert len({bucket(each, most) for each in range(1, most + 1)}) <= most.bit_length() + 1
