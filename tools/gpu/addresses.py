"""Whether an engine's attention sees the cache itself: the addresses that were bound, and no copy of it.

TensorRT may put a copy between a binding and a plugin, of the whole pool and in every step. It would cost
more than the step; and with a copy that is not written back, tokens would be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pagelet.models.manifest import Manifest, load_manifest
from pagelet.plugins.cuda_driver import Driver
from pagelet.plugins.kernels.launch_plan import Shapes
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.backends.select import cache_shape
from pagelet.runtime.backends.tensorrt import TensorRTBackend
from pagelet.runtime.backends.tensorrt_engine import LoadAttention
from pagelet.tools.gpu.device import Library
from pagelet.tools.gpu.report import Row

PROMPT = 40  # tokens
DECODED = 3  # the first as launched, the others as a CUDA graph
_POOL = ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache")

Pointers = tuple[int, ...]  # of keys and values, and of their scales if there are any


@dataclass
class WatchedLibrary:
    """Launches nothing else than the library does, and keeps the pointers of each call."""

    library: Library
    seen: list[Pointers] = field(default_factory=list)

    def run(
        self,
        variant: AttentionVariant,
        shapes: Shapes,
        tensors: Mapping[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        self.seen.append(tuple(tensors[name] for name in _POOL if name in tensors))
        self.library.run(variant, shapes, tensors, workspace, stream)

    def load(self, variant: AttentionVariant) -> None:
        cast(Any, self.library).load(variant)

    def close(self) -> None:
        cast(Any, self.library).close()


class WatchedAttention:
    """What a backend's `load_attention` gives: plugins whose launches are watched."""

    def __init__(self, trt: Any, kernels: Path, driver: Driver) -> None:
        from pagelet.plugins.kernels.library import KernelLibrary
        from pagelet.plugins.tensorrt.host import PluginHost
        from pagelet.plugins.tensorrt.plugin import attention_plugins

        self._plugins = attention_plugins(trt)
        self.library = WatchedLibrary(KernelLibrary(kernels, driver))
        self._host = PluginHost(self.library)

    def hosting(self) -> AbstractContextManager[None]:
        return self._plugins.hosting(self._host)

    def check(self) -> None:
        self._host.check()

    def close(self) -> None:
        self.library.close()


def check_addresses(bundle: Path) -> Row:
    """Prefill and decoding of one sequence through a bundle's engine."""
    name, manifest = f"addresses/{bundle.name}", load_manifest(bundle)
    if manifest.gpu is None or not manifest.gpu.kernels:
        return Row(name, "skipped", f"the target {manifest.target} has no attention plugin")
    watched: list[WatchedLibrary] = []

    def load(trt: Any, kernels: Path, driver: Driver) -> WatchedAttention:
        attention = WatchedAttention(trt, kernels, driver)
        watched.append(attention.library)
        return attention

    backend = open_backend(bundle, manifest, load)
    try:
        problems, calls = watch(backend, manifest, lambda: watched[0].seen)
    finally:
        backend.close()
    detail = f"{calls} calls of {manifest.spec.num_layers} layers saw the bound cache, which changed in place"
    return Row(name, "failed" if problems else "ok", "; ".join(problems) or detail, figures={"calls": calls})


def open_backend(bundle: Path, manifest: Manifest, load: LoadAttention, **stand_ins: Any) -> TensorRTBackend:
    """With a cache that is larger than the sequence needs, so that not all of it may change."""
    shape = cache_shape(manifest, PROMPT)
    tokens = PROMPT + DECODED + 2 * manifest.block_size
    layout = shape.layout(shape.sequence_bytes(tokens), tokens)
    return TensorRTBackend(bundle, manifest, layout, max_rows=1, load_attention=load, **stand_ins)


def watch(backend: TensorRTBackend, manifest: Manifest, seen: Any) -> tuple[list[str], int]:
    """What is wrong, and how many calls were looked at.

    Args:
        seen: gives the list of pointers that grows with each call.
    """
    bound = _bound(backend, manifest)
    problems: list[str] = []
    calls = 0
    for step in range(1 + DECODED):
        past, rows = (0, PROMPT) if step == 0 else (PROMPT + step - 1, 1)
        before, known = _pool(backend), len(seen())
        backend.run(_batch(backend, manifest, past, rows))
        new = seen()[known:]
        calls += len(new)
        what = "prefill" if step == 0 else f"decoding step {step}"
        problems += [f"{what}: {problem}" for problem in compare_pointers(new, bound)]
        if step <= 1 and not new:  # a graph calls nobody any more
            problems.append(f"{what}: no layer's attention was called")
        problems += [
            f"{what}: {problem}" for problem in compare_slots(backend, before, _pool(backend), past, rows)
        ]
    return problems, calls


def compare_pointers(seen: Sequence[Pointers], bound: Counter[Pointers]) -> list[str]:
    """Each layer's pointers are those of its owner, as often as it runs; a step may run more than once."""
    counts = Counter(seen)
    strange = [pointers for pointers in counts if pointers not in bound]
    problems = []
    if strange:
        addresses = ", ".join(f"{pointer:#x}" for pointer in strange[0])
        problems.append(
            f"{len(strange)} of {len(counts)} layers' attention sees other memory than the cache that was "
            f"bound ({addresses})"
        )
    times = {counts[pointers] / expected for pointers, expected in bound.items()} if seen else {1.0}
    if not strange and len(times) > 1:
        problems.append("some layers' attention sees the cache of another layer")
    return problems


def compare_slots(
    backend: TensorRTBackend, before: list[NDArray[Any]], after: list[NDArray[Any]], past: int, rows: int
) -> list[str]:
    """The slots of new tokens have changed, in every array, and no others."""
    problems = []
    for array, old, new in zip(backend._cache.arrays, before, after, strict=True):
        changed = (old != new).any(axis=1)
        expected = np.zeros(len(changed), bool)
        expected[past : past + rows] = True
        if (changed & ~expected).any():
            problems.append(f"{array.name}: {(changed & ~expected).sum()} other slots changed")
        if (expected & ~changed).any():
            problems.append(f"{array.name}: {(expected & ~changed).sum()} of {rows} new tokens are not there")
    return problems


def _bound(backend: TensorRTBackend, manifest: Manifest) -> Counter[Pointers]:
    """The pointers of each owner of a cache, and how many layers read it."""
    cache, spec = backend._cache, manifest.spec
    addresses = {array.name: cache.address(array) for array in cache.arrays}
    found: Counter[Pointers] = Counter()
    for layer in range(spec.num_layers):
        kind = spec.layers[layer]
        owner = kind.cache_of if kind.shares_cache else layer
        names = (f"{name}.{owner}" for name in _POOL)
        found[tuple(addresses[name] for name in names if name in addresses)] += 1
    return found


def _pool(backend: TensorRTBackend) -> list[NDArray[Any]]:
    """Bytes [slots, bytes of a token] of each array, in logical order: the sequence has the first blocks."""
    layout, found = backend.layout, []
    data = [
        backend.read_blocks(group, range(layout.groups[group].num_blocks))
        for group in range(len(layout.groups))
    ]
    for array in backend._cache.arrays:
        part = data[array.group][:, array.columns]
        found.append(part.reshape(-1, array.slot_bytes).copy())
    return found


def _batch(backend: TensorRTBackend, manifest: Manifest, past: int, rows: int) -> StepBatch:
    blocks = np.arange(-(-(past + rows) // manifest.block_size), dtype=np.int32)[None]
    positions = np.arange(past, past + rows)
    return StepBatch(
        input_ids=(7 * positions + 3) % manifest.spec.vocab_size,
        position_ids=positions,
        cumulative_sequence_length=np.array([0, rows], np.int32),
        past_seqlens=np.array([past], np.int32),
        block_tables=(blocks,) * len(backend.layout.groups),
        logits_indices=np.array([rows - 1]),
    )
