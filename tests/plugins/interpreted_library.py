"""From a node's tensors to its output through all that a runtime calls. Run by test_kernel_library.py.

`KernelLibrary` and `Driver` are the real ones, over a CUDA driver of paper, whose kernels are the Triton
functions, interpreted on the very values that arrive at `cuLaunchKernel`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_cuda import FakeCuda
from interpreted_kernels import TOLERANCE, TORCH_TYPES, compare_caches, rounded, variant_of
from test_attention_trees import tree_step, world_of

from pagelet.plugins.cuda_driver import Driver
from pagelet.plugins.kernels.launch_plan import Shapes, workspace_bytes
from pagelet.plugins.kernels.library import KernelLibrary
from pagelet.plugins.kernels.records import CubinRecord, KernelRecord, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant, KernelSpec

SM = 89
HALF = ("query", "key", "value")  # what the tests have as float32


def interpreted(spec: KernelSpec, fake: FakeCuda) -> Callable[..., None]:
    """A kernel of the driver of paper."""
    function = getattr(importlib.import_module(spec.module), spec.function)

    def argument(kind: str, value: int) -> Any:
        if not kind.startswith("*"):
            return ctypes.c_int32(value).value
        dtype = TORCH_TYPES[kind]
        for start, memory in fake.memory.items():
            if start <= value < start + ctypes.sizeof(memory):
                return torch.frombuffer(memory, dtype=torch.uint8)[value - start :].view(dtype)
        assert value == 0, f"{value:#x} is no memory of the device"
        return torch.empty(0, dtype=dtype)

    def kernel(grid: tuple[int, int, int], threads: int, shared: int, values: Any) -> None:
        *declared, scratch, profile = values.tolist()
        assert (threads, shared, scratch, profile) == (32 * spec.warps, 1024, 0, 0)
        kinds = [kind for _, kind in spec.arguments]
        arguments = [argument(kind, value) for kind, value in zip(kinds, declared, strict=True)]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # as in interpreted_kernels.run
            function[grid](*arguments, **spec.constants)

    return kernel


def write_kernels(folder: Path, variant: AttentionVariant, fake: FakeCuda) -> None:
    """A table whose cubins are names of the fake's functions."""
    records = {}
    image = b"\x7fELF"
    cubin = CubinRecord(len(image), hashlib.sha256(image).hexdigest(), 1, 0, 1024)
    (folder / f"sm_{SM}").mkdir()
    for spec in variant.kernels():
        fake.functions[spec.key] = (len(spec.arguments) + 2, interpreted(spec, fake))
        record = KernelRecord(spec.key, spec.role, spec.key, spec.warps, spec.arguments, {SM: cubin})
        (folder / record.file(SM)).write_bytes(image)
        records[spec.key] = record
    KernelTable({SM: "paper"}, records).write(folder)


def run(folder: Path, variant: AttentionVariant, arrays: dict[str, Any]) -> Any:
    """One step on the device of paper; caches among the arrays are updated. float32 ``[T, heads * D]``."""
    fake = FakeCuda(sm=SM, functions={})
    write_kernels(folder, variant, fake)
    driver = Driver.open(bindings=fake)
    library = KernelLibrary(folder, driver)
    tokens, (sequences, width) = len(arrays["query"]), arrays["block_table"].shape
    mask = arrays.get("ancestor_mask", np.empty((0, 0), np.int32))
    pointers, views = {}, {}

    def place(name: str, array: Any) -> None:
        pointers[name] = driver.malloc(max(array.nbytes, 1))
        views[name] = fake.array(pointers[name], array.shape, array.dtype)
        views[name][...] = array

    for name, array in arrays.items():
        place(name, array.astype(np.float16) if name in HALF else array)
    place("output", np.full((tokens, variant.num_heads * variant.head_dim), np.nan, np.float16))
    workspace = driver.malloc(workspace_bytes(variant, tokens, sequences, width))
    stream = driver.create_stream()
    library.run(variant, Shapes(tokens, sequences, width, *mask.shape), pointers, workspace, stream)
    driver.synchronize(stream)
    for name, array in arrays.items():
        if "cache" in name:
            array[...] = views[name]
    output = views["output"].astype(np.float32)
    views.clear()
    library.close()
    driver.destroy_stream(stream)
    for pointer in (*pointers.values(), workspace):
        driver.free(pointer)
    driver.close()
    fake.assert_nothing_is_left()
    return output


def compare(folder: Path, world: Any, step: Any, caches: Any) -> None:
    expected_caches = caches.copy()
    expected = world.reference(step, expected_caches)
    output = run(folder, variant_of(world.layer), {**step, **caches.arrays()})
    np.testing.assert_allclose(output, expected, **TOLERANCE["f16"])
    for name, cache in expected_caches.arrays().items():
        compare_caches(caches.arrays()[name], cache, name, exactly=True)


@pytest.mark.parametrize(
    ("spans", "cache_type", "packed"),
    [
        ([(0, 20, 29), (1, 0, 3)], "f16", True),
        ([(0, 70, 71), (1, 37, 40)], "int8", False),
        ([(0, 70, 71), (1, 37, 40)], "fp8", True),
    ],
)
def test_a_step(
    make_layer: Any, make_world: Any, tmp_path: Path, spans: list[Any], cache_type: str, packed: bool
) -> None:
    layer = make_layer(head_size=32, num_heads=4, kv_num_heads=2, cache_type=cache_type, packed=packed)
    world = make_world(layer, [end for _, _, end in spans], 0)
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    compare(tmp_path, world, world.step(spans), world.with_past([begin for _, begin, _ in spans]))


def test_a_tree(make_layer: Any, make_world: Any, tmp_path: Path) -> None:
    layer = make_layer(head_size=32, num_heads=4, kv_num_heads=2, cache_type="int8", trees=True)
    forest, pasts = [[-1, 0, 0, 1, 1], [-1, 0]], [33, 5]
    world = world_of(make_world, layer, pasts, forest, seed=3)
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    compare(tmp_path, world, tree_step(world, pasts, forest), world.with_past(pasts))
