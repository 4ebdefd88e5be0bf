"""How fast attention is beside what the GPU can do: bytes read in decoding, multiplications in prefill.

Steps are recorded as one CUDA graph, so that what is timed is the GPU and not Python's launches. Each step of
a recording reads other blocks of a pool that no cache of a GPU holds, as the layers of a model do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from pagelet.plugins.kernels.launch_plan import Shapes, workspace_bytes
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools.gpu.device import DeviceArrays, Gpu
from pagelet.tools.gpu.kernels import block_bytes
from pagelet.tools.gpu.report import Figure, Row
from pagelet.tools.gpu.steps import Array, Arrays, as_activation, empty_pool, tables_of, write_random

COPY_BYTES = 1 << 29
POOL_BYTES = 1 << 28  # at least: caches of GPUs have up to 128 MiB
MATRIX = 8192
_PART_BLOCKS = 64  # whose content is repeated in the pool
_TRIES = 7
_MOST_STEPS = 32  # in one recording
_TRY_SECONDS = 0.02  # that one try should take at least

LLAMA_1B = AttentionVariant(32, 8, 64, 32, rotary_dim=64)
LLAMA_1B_INT8 = AttentionVariant(32, 8, 64, 32, rotary_dim=64, cache="int8")
QWEN3_8B = AttentionVariant(32, 8, 128, 32, rotary_dim=128, q_norm=True, k_norm=True)
QWEN3_8B_INT8 = AttentionVariant(32, 8, 128, 32, rotary_dim=128, q_norm=True, k_norm=True, cache="int8")
_NAMES = {
    LLAMA_1B: "Llama-3.2-1B f16",
    LLAMA_1B_INT8: "Llama-3.2-1B int8",
    QWEN3_8B: "Qwen3-8B f16",
    QWEN3_8B_INT8: "Qwen3-8B int8",
}


@dataclass(frozen=True)
class Load:
    """What is timed: `sequences` with `rows` new tokens each behind `past` ones."""

    variant: AttentionVariant
    sequences: int
    rows: int
    past: int

    @property
    def name(self) -> str:
        behind = f"{self.rows} rows behind {self.past}"
        step = f"{self.sequences} × {self.past + 1}" if self.is_decode else behind
        return f"{_NAMES[self.variant]}/{step}"

    @property
    def is_decode(self) -> bool:
        return self.rows == 1

    @property
    def shapes(self) -> Shapes:
        """Tables have the width that the backend gives them: the next power of two."""
        blocks = -(-(self.past + self.rows) // self.variant.block_size)
        return Shapes(self.sequences * self.rows, self.sequences, 1 << (blocks - 1).bit_length())

    @property
    def blocks(self) -> int:
        """That all sequences have together."""
        return self.sequences * -(-(self.past + self.rows) // self.variant.block_size)

    @property
    def read_bytes(self) -> int:
        """Of the cache, read once."""
        tokens = self.sequences * (self.past + self.rows)
        return tokens * block_bytes(self.variant) // self.variant.block_size

    @property
    def flops(self) -> int:
        """Query × key and weight × value of all that a row sees, two for each multiply-add."""
        seen = self.sequences * sum(range(self.past + 1, self.past + self.rows + 1))
        return 4 * seen * self.variant.num_heads * self.variant.head_dim


LOADS = (
    *(
        Load(variant, sequences, 1, past - 1)
        for variant in _NAMES
        for sequences in (1, 16)
        for past in (1024, 8192, 32768)
    ),
    *(Load(variant, 1, rows, past) for variant in _NAMES for rows in (512, 2048) for past in (0, 8192)),
)


def check_copy(gpu: Gpu, num_bytes: int = COPY_BYTES) -> Row:
    """Bytes per second, read and written, of a copy within the device."""
    num_bytes = min(num_bytes, gpu.driver.free_memory() // 8)
    with gpu.memory() as memory:
        source, target = memory.allocate(num_bytes), memory.allocate(num_bytes)
        seconds = _time(gpu, lambda: gpu.driver.on_device(target, source, num_bytes, gpu.stream))
    rate = 2 * num_bytes / seconds
    detail = f"{rate / 1e9:.0f} GB/s, read and written, in a copy of {num_bytes >> 20} MiB"
    return Row("timing/copy", "ok", detail, figures={"bytes_per_second": rate})


def check_matrix(size: int = MATRIX) -> Row:
    """FLOP/s of cuBLAS in float16, through torch."""
    try:
        import torch
    except ImportError:
        return Row("timing/matrix", "skipped", "torch is not installed")
    if not torch.cuda.is_available():
        return Row("timing/matrix", "skipped", "the installed torch has no CUDA, or finds no device")
    a = torch.randn(size, size, device="cuda", dtype=torch.float16)
    times = []
    for _ in range(_TRIES + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            a @ a
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 4)
    rate = 2 * size**3 / statistics.median(times[1:])
    return Row(
        "timing/matrix",
        "ok",
        f"{rate / 1e12:.0f} TFLOP/s, float16 of {size} by cuBLAS",
        figures={"flops_per_second": rate},
    )


def check_load(gpu: Gpu, load: Load) -> Row:
    """Time one load."""
    name = f"timing/{load.name}"
    steps = max(2, min(_MOST_STEPS, POOL_BYTES // load.read_bytes))
    needed = steps * load.blocks * block_bytes(load.variant)
    if needed > (free := gpu.driver.free_memory()) * 3 // 4:
        return Row(name, "skipped", f"its pool has {needed >> 20} MiB, and {free >> 20} MiB are free")
    library = gpu.library
    with gpu.memory() as memory:
        tensors, tables, workspace = _place(memory, load, steps)

        def run() -> None:
            for table in tables:
                library.run(
                    load.variant, load.shapes, tensors | {"block_table": table}, workspace, gpu.stream
                )

        run()
        gpu.wait()
        began = time.perf_counter()
        run()
        host = (time.perf_counter() - began) / steps
        gpu.wait()
        with _recorded(gpu, run) as launch:
            seconds = _time(gpu, launch) / steps
    figures: dict[str, Figure] = {
        "seconds": seconds,
        "host_seconds": host,
        "cache_bytes_per_second": load.read_bytes / seconds,
        "flops_per_second": load.flops / seconds,
    }
    rate = (
        f"{load.read_bytes / seconds / 1e9:.0f} GB/s"
        if load.is_decode
        else f"{load.flops / seconds / 1e12:.1f} TFLOP/s"
    )
    detail = f"{seconds * 1e6:.1f} µs, {rate}; {host * 1e6:.0f} µs to launch from Python"
    return Row(name, "ok", detail, figures=figures)


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """Rows of loads say how near they are to the copy, or to the matrix product, that was measured too."""
    figures = {row.name: row.figures for row in rows}
    limits = {
        "GB/s": (
            "cache_bytes_per_second",
            figures.get("timing/copy", {}).get("bytes_per_second"),
            "the copy",
        ),
        "FLOP/s": (
            "flops_per_second",
            figures.get("timing/matrix", {}).get("flops_per_second"),
            "the matrix",
        ),
    }
    found = []
    for row in rows:
        for unit, (name, limit, what) in limits.items():
            rate = row.figures.get(name)
            if unit in row.detail and isinstance(rate, float) and isinstance(limit, float):
                share = rate / limit
                row = replace(
                    row,
                    detail=f"{row.detail}; {share:.0%} of {what}",
                    figures={**row.figures, f"share_of_{what.removeprefix('the ')}": share},
                )
        found.append(row)
    return found


def _place(memory: DeviceArrays, load: Load, steps: int) -> tuple[dict[str, int], list[int], int]:
    """Tensors, a block table for each step, and the workspace."""
    rng, variant, shapes = np.random.default_rng(0), load.variant, load.shapes
    pool_blocks = steps * load.blocks
    columns = (variant.num_heads + 2 * variant.kv_num_heads) * variant.head_dim
    offsets = np.arange(load.sequences + 1, dtype=np.int32) * load.rows
    positions = np.tile(np.arange(load.past, load.past + load.rows, dtype=np.int64), load.sequences)
    query = rng.standard_normal((shapes.tokens, columns), dtype=np.float32)
    inputs: Arrays = {
        "query": as_activation(query, variant.activation),
        "cumulative_sequence_length": offsets,
        "past_seqlens": np.full(load.sequences, load.past, np.int32),
        "position_ids": positions,
        **tables_of(variant, load.past + load.rows),
    }
    for name, there in (("q_norm_weight", variant.q_norm), ("k_norm_weight", variant.k_norm)):
        if there:
            inputs[name] = np.ones(variant.head_dim, np.float32)
    tensors = {name: memory.upload(array) for name, array in inputs.items()}
    # Random numbers, since a GPU multiplies constant ones faster: they take less power.
    part = empty_pool(variant, _PART_BLOCKS)
    write_random(part, np.arange(_PART_BLOCKS * variant.block_size), rng)
    for name, array in part.items():
        tensors[name] = memory.fill(pool_blocks * array[0].nbytes, array)
    tensors["output"] = memory.allocate(2 * shapes.tokens * variant.num_heads * variant.head_dim)
    workspace = memory.allocate(workspace_bytes(variant, shapes.tokens, shapes.sequences, shapes.table_width))
    return tensors, [memory.upload(table) for table in _tables(load, steps, rng)], workspace


def _tables(load: Load, steps: int, rng: np.random.Generator) -> Iterator[Array]:
    """Blocks in a random order, of which each step has its own."""
    order = rng.permutation(steps * load.blocks).astype(np.int32)
    for mine in order.reshape(steps, load.sequences, -1):
        table = np.full((load.sequences, load.shapes.table_width), -1, np.int32)
        table[:, : mine.shape[1]] = mine
        yield table


@contextmanager
def _recorded(gpu: Gpu, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """A call that launches what `run` puts into the stream, as a graph."""
    driver, stream = gpu.driver, gpu.stream
    driver.begin_capture(stream)
    try:
        run()
    except BaseException:
        driver.abandon_capture(stream)
        raise
    graph = driver.end_capture(stream)
    try:
        yield lambda: driver.launch_graph(graph, stream)
    finally:
        gpu.wait()
        driver.destroy_graph(graph)


def _time(gpu: Gpu, launch: Callable[[], None]) -> float:
    """Median seconds of one launch, of several tries of as many launches as take a while."""

    def seconds(count: int) -> float:
        gpu.wait()
        began = time.perf_counter()
        for _ in range(count):
            launch()
        gpu.wait()
        return (time.perf_counter() - began) / count

    seconds(1)  # what is done once is done now
    count = max(1, min(200, int(_TRY_SECONDS / max(seconds(1), 1e-6))))
    return statistics.median(seconds(count) for _ in range(_TRIES))
