"""Decoding steps as CUDA graphs: a step of one row per sequence is recorded once and launched as a whole.

A graph has fixed shapes, so sequences are padded to 1, 2, 4, … of them, and block tables to a power of two of
blocks that holds the longest sequence: a wider table costs time in every layer. Each graph has an execution
context of its own, which nothing touches afterwards (TensorRT, "CUDA graphs": a captured context must stay as
it is); they share the engine's workspace.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagelet.models.errors import BackendError
from pagelet.plugins.cuda_driver import CudaError
from pagelet.runtime.backends.base import StepBatch
from pagelet.runtime.backends.device_memory import DeviceMemory
from pagelet.runtime.backends.staging import StagedInputs
from pagelet.runtime.backends.tensorrt_engine import Engine

_LEAST_WIDTH = 32  # blocks of the narrowest table: 1,024 tokens with blocks of 32


def is_decode(batch: StepBatch) -> bool:
    """Whether each sequence has one row, and wants its logits."""
    sequences = len(batch.past_seqlens)
    return batch.ancestor_mask is None and len(batch.input_ids) == sequences == len(batch.logits_indices)


def bucket(count: int, most: int) -> int:
    """The next power of two, but at most `most`, which is at least `count`."""
    return min(1 << (count - 1).bit_length(), most)


def table_width(batch: StepBatch, block_size: int, most: int) -> int:
    """Blocks of a table that all sequences of a batch fit into: few widths, at most `most`.

    Raises:
        BackendError: a sequence is longer than that.
    """
    tokens = int((batch.past_seqlens + np.diff(batch.cumulative_sequence_length)).max())
    needed = -(-tokens // block_size)
    if needed > most:
        raise BackendError(
            f"a step has a sequence of {tokens} tokens; the engine takes at most {most * block_size}. "
            "The engine was opened for shorter ones: this is a bug in pagelet."
        )
    return bucket(max(needed, min(_LEAST_WIDTH, most)), most)


@dataclass
class Step:
    """A step of certain shapes.

    Attributes:
        context: with the shapes and addresses set.
        inputs: where it reads them.
        graph: what it was captured as; 0: it was not.
    """

    context: Any
    inputs: StagedInputs
    graph: int = 0


class DecodeGraphs:
    """The steps that were met, each captured after its first run.

    Attributes:
        failure: why no graphs are made any more; None while they are.
    """

    def __init__(self, engine: Engine, memory: DeviceMemory, create: Callable[[int, int], Step]) -> None:
        """`create` makes the step for (sequences, table width)."""
        self._engine, self._driver, self._stream = engine, memory.driver, memory.stream
        self._create = create
        self._steps: dict[tuple[int, int], Step] = {}
        self.failure: str | None = None

    def step(self, sequences: int, width: int) -> Step | None:
        """The step for these shapes, made when it is first asked for; None where none is to be had."""
        key = sequences, width
        if key not in self._steps and self.failure is None:
            try:
                self._steps[key] = self._create(sequences, width)
            except BackendError as error:  # what runs already goes on
                self._fail(str(error))
        return self._steps.get(key)

    def launch(self, step: Step) -> None:
        """Put a step into the stream."""
        if step.graph:
            self._driver.launch_graph(step.graph, self._stream)
        else:
            self._engine.enqueue(step.context)

    def capture(self, step: Step) -> None:
        """Record a step that has run, if it was not; where that fails it is launched as before.

        The run before it lets TensorRT do what it does once for new shapes, which must not be recorded.
        """
        if step.graph or self.failure is not None:
            return
        if not self._engine.can_be_captured(step.context):
            self._fail("TensorRT says that this engine's steps cannot be captured")
            return
        try:
            self._driver.begin_capture(self._stream)
            try:
                self._engine.enqueue(step.context)
            except BaseException:
                self._driver.abandon_capture(self._stream)
                raise
            step.graph = self._driver.end_capture(self._stream)
        except (BackendError, CudaError) as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self.failure = reason
        warnings.warn(f"decoding goes on without CUDA graphs, slower: {reason}", RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Destroy graphs and contexts. Closing twice is fine."""
        for step in self._steps.values():
            if step.graph:
                with suppress(CudaError):
                    self._driver.destroy_graph(step.graph)
        self._steps.clear()
