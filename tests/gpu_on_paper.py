"""A GPU of paper whose kernels are the NumPy reference, right or wrong in one way that a test names."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import CUresult, FakeCuda

from pagelet.plugins import reference
from pagelet.plugins.cuda_driver import CudaError, Driver
from pagelet.plugins.kernels.launch_plan import Shapes
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools import gpu_check
from pagelet.tools.gpu.device import Gpu
from pagelet.tools.gpu.steps import CACHE_DTYPES, SCALES, Arrays, as_activation, as_float, reference_step

_EXTRA = 256  # bytes that the checks add behind an array


class PaperLibrary:
    """Stands for a `KernelLibrary`: computes with what lies behind the pointers when the stream comes there.

    Args:
        wrong: "" for nothing; else one of
            "window", "scale", "norm", "heads", "nan": what is put out: without a window, with scores or a
                norm's epsilon of another size, with two heads exchanged, not a number at its end;
            "cache scale", "slot", "lost": what lies in the cache: scales 1% larger, a token in another's
                place too, the last token missing;
            "overrun": a byte behind the output is written;
            "frozen": lengths are read when a step is launched, not when it runs;
            "waits": the host waits for the stream;
            "crash": nodes with sinks make the device fail;
            "hang": they never end.
    """

    def __init__(self, cuda: FakeCuda, wrong: str = "") -> None:
        self._cuda, self._wrong = cuda, wrong

    def run(
        self,
        variant: AttentionVariant,
        shapes: Shapes,
        tensors: Mapping[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        pointers = dict(tensors)
        if self._wrong == "waits":
            code, *_ = self._cuda.cuStreamSynchronize(stream)
            if code:
                raise CudaError("cuStreamSynchronize failed.", int(code), code.name)
        if variant.sinks and self._wrong == "crash":
            self._cuda.fail("cuStreamSynchronize", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        if variant.sinks and self._wrong == "hang":
            time.sleep(60)
        known = self._inputs(variant, shapes, pointers) if self._wrong == "frozen" else None
        self._cuda.enqueue(stream, lambda: self._compute(variant, shapes, pointers, known))

    def _compute(
        self, variant: AttentionVariant, shapes: Shapes, pointers: dict[str, int], known: Arrays | None
    ) -> None:
        inputs, pool = known or self._inputs(variant, shapes, pointers), self._pool(variant, pointers)
        table = inputs["block_table"]
        kept = (inputs["past_seqlens"] > 0) | (table >= 0).any(axis=1)
        counts = np.diff(inputs["cumulative_sequence_length"])
        slots = reference.new_slots(
            np.cumsum([0, *counts[kept]]), inputs["past_seqlens"][kept], table[kept], variant.block_size
        )
        before = {name: array.copy() for name, array in pool.items()}
        output = reference_step(self._mistaken(variant), inputs, pool)
        if variant.writes:
            self._spoil_cache(pool, before, slots)
        if self._wrong == "heads":
            size = variant.head_dim
            output[:, : 2 * size] = np.roll(output[:, : 2 * size], size, axis=1)
        if self._wrong == "nan":
            output[-1, -1] = np.nan
        dtype = np.float16 if variant.activation == "f16" else np.uint16
        self._cuda.array(pointers["output"], output.shape, dtype)[:] = as_activation(
            output, variant.activation
        )
        if self._wrong == "overrun":
            end = pointers["output"] + 2 * output.size
            self._cuda.array(end, (1,), np.uint8)[:] = 0

    def _mistaken(self, variant: AttentionVariant) -> AttentionVariant:
        if self._wrong == "window":
            return replace(variant, local_window_size=-1)
        if self._wrong == "scale":
            return replace(variant, scale=1.01 * (variant.scale or variant.head_dim**-0.5))
        if self._wrong == "norm" and variant.q_norm:
            return replace(variant, norm_epsilon=0.1)
        return variant

    def _spoil_cache(self, pool: Arrays, before: Arrays, slots: Any) -> None:
        if self._wrong == "cache scale":
            for name in set(SCALES) & pool.keys():
                pool[name].reshape(-1, pool[name].shape[2])[slots] *= np.float32(1.01)
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in pool.items()}
        if self._wrong == "slot" and len(slots):
            for name in ("key_cache", "value_cache"):
                flat[name][slots[0] + 1] = flat[name][slots[0]]
        if self._wrong == "lost":
            for name, array in flat.items():
                array[slots[-1]] = before[name].reshape(array.shape)[slots[-1]]

    def _inputs(self, variant: AttentionVariant, shapes: Shapes, pointers: dict[str, int]) -> Arrays:
        heads, kv_heads, size = variant.num_heads, variant.kv_num_heads, variant.head_dim
        packed = variant.writes and variant.packed
        tokens, sequences = shapes.tokens, shapes.sequences
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {
            "query": ((tokens, (heads + 2 * kv_heads if packed else heads) * size), None),
            "key": ((tokens, kv_heads * size), None),
            "value": ((tokens, kv_heads * size), None),
            "cumulative_sequence_length": ((sequences + 1,), np.int32),
            "past_seqlens": ((sequences,), np.int32),
            "block_table": ((sequences, shapes.table_width), np.int32),
            "position_ids": ((tokens,), np.int64),
            "ancestor_mask": ((shapes.mask_rows, shapes.mask_words), np.int32),
            "q_norm_weight": ((size,), np.float32),
            "k_norm_weight": ((size,), np.float32),
            "head_sink": ((heads,), np.float32),
        }
        found: Arrays = {}
        for name, (shape, dtype) in kinds.items():
            if name in pointers:
                bits = np.float16 if variant.activation == "f16" else np.uint16
                array = self._cuda.array(pointers[name], shape, dtype or bits)
                found[name] = array.copy() if dtype else as_float(array, variant.activation)
        for name in ("cos_cache", "sin_cache"):
            if name in pointers:
                half = variant.rotary_dim // 2
                rows = self._size(pointers[name]) // (4 * half)
                found[name] = self._cuda.array(pointers[name], (rows, half), np.float32)
        return found

    def _pool(self, variant: AttentionVariant, pointers: dict[str, int]) -> Arrays:
        row = variant.block_size, variant.kv_num_heads
        heads = (*row, variant.head_dim), CACHE_DTYPES[variant.cache]
        kinds: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(("key_cache", "value_cache"), heads)
        if variant.scaled:
            kinds |= dict.fromkeys(SCALES, (row, np.float32))
        return {
            name: self._cuda.array(
                pointers[name],
                (self._size(pointers[name]) // (prod(shape) * np.dtype(dtype).itemsize), *shape),
                dtype,
            )
            for name, (shape, dtype) in kinds.items()
        }

    def _size(self, pointer: int) -> int:
        """Bytes of the allocation that begins there, without what the checks add."""
        return ctypes.sizeof(self._cuda.memory[pointer]) - _EXTRA


def open_paper(fake: FakeCuda, kernels: Path | None, wrong: str = "") -> Gpu:
    return Gpu(Driver.open(bindings=fake), kernels, lambda folder, driver: PaperLibrary(fake, wrong))


@contextmanager
def paper_gpu(wrong: str = "", kernels: Path | None = Path("kernels"), **cuda: Any) -> Iterator[Gpu]:
    """A device on which no memory and no graph may be left at the end."""
    fake = FakeCuda(**cuda)
    yield open_paper(fake, kernels, wrong)
    assert not fake.memory, "memory was not given back"
    assert not fake.executables, "a graph was not destroyed"


def main(wrong: str, *arguments: str) -> int:
    """As a program: `gpu_check` with arguments, over a device of paper. "no device": there is none."""
    fake = FakeCuda(devices=wrong != "no device")
    gpu_check.Driver = SimpleNamespace(open=lambda: Driver.open(bindings=fake))  # type: ignore[assignment,misc]
    gpu_check.Gpu = lambda driver, kernels: Gpu(  # type: ignore[assignment,misc]
        driver, kernels, lambda folder, driver: PaperLibrary(fake, wrong)
    )
    return gpu_check.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
