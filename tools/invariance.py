"""Steps through the backend by hand, to compare one sequence's logits in different company."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pagelet.models.manifest import load_manifest
from pagelet.models.text import Tokenizer
from pagelet.runtime.backends.base import StepBatch
from pagelet.runtime.backends.cpu import CpuBackend, cache_shape
from pagelet.runtime.cache_layout import CacheLayout, GroupLayout

Logits = NDArray[np.float32]


class Stepper:
    """Runs steps of any make-up over a bundle; each call begins with an empty cache in shuffled blocks."""

    def __init__(self, bundle: Path, *, num_blocks: int, max_rows: int, threads: int = 2) -> None:
        manifest = load_manifest(bundle)
        groups = cache_shape(manifest, max_rows).groups
        layout = CacheLayout(
            manifest.block_size,
            tuple(GroupLayout(window, num_blocks, size) for window, size in groups),
            max_step_tokens=max_rows,
        )
        self.tokenizer = Tokenizer.open(bundle, manifest.text)
        self._block_size = manifest.block_size
        self._num_groups = len(groups)
        self._backend = CpuBackend(
            bundle / manifest.graph, manifest, layout, threads=threads, max_rows=max_rows
        )
        self._blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)

    def __enter__(self) -> "Stepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.close()

    def logits_of(self, prompts: Sequence[Sequence[int]]) -> list[Logits]:
        """All prompts in one step: logits [length, vocab] of each."""
        tables = self._tables([len(prompt) for prompt in prompts])
        logits = self._step(prompts, [0] * len(prompts), tables)
        ends = np.cumsum([len(prompt) for prompt in prompts])
        return [part.copy() for part in np.split(logits, ends[:-1])]

    def logits_in_pieces(self, prompt: Sequence[int], cuts: Sequence[int]) -> Logits:
        """One prompt alone, in as many steps as `cuts` make pieces: logits [length, vocab]."""
        tables = self._tables([len(prompt)])
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(prompt)}), len(prompt)]
        pieces = [self._step([prompt[a:b]], [a], tables).copy() for a, b in itertools.pairwise(edges)]
        return np.concatenate(pieces)

    def _tables(self, lengths: Sequence[int]) -> NDArray[np.int32]:
        counts = [-(-length // self._block_size) for length in lengths]
        tables = np.full((len(lengths), max(counts)), -1, np.int32)
        free: Iterator[np.int32] = iter(self._blocks)
        for table, count in zip(tables, counts, strict=True):
            table[:count] = [next(free) for _ in range(count)]
        return tables

    def _step(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[int], tables: NDArray[np.int32]
    ) -> Logits:
        lengths = [len(prompt) for prompt in prompts]
        positions = [np.arange(past, past + n) for past, n in zip(pasts, lengths, strict=True)]
        return self._backend.run(
            StepBatch(
                input_ids=np.concatenate(prompts).astype(np.int64),
                position_ids=np.concatenate(positions).astype(np.int64),
                cumulative_sequence_length=np.cumsum([0, *lengths]).astype(np.int32),
                past_seqlens=np.asarray(pasts, np.int32),
                block_tables=(tables,) * self._num_groups,
                logits_indices=np.arange(sum(lengths), dtype=np.int64),
            )
        )
