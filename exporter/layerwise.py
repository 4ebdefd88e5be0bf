"""Running a model one layer at a time: the graph's own nodes, and no more than one layer's weights in memory.

Calibration, sensitivity and the certificate all run so. A `Stream` is carried from layer to layer: the
residual stream of all texts, and what few families have beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pagelet.exporter.graph import (
    TAPS,
    CacheFormat,
    build_embedding_graph,
    build_head_graph,
    build_layer_graph,
)
from pagelet.exporter.part import Part
from pagelet.exporter.stream import Float32, Stream
from pagelet.models.spec import ModelSpec
from pagelet.plugins.session import open_session

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Taps = Mapping[str, Float32]
OnTaps = Callable[[Taps, Sequence[int]], None]

# Rows of one run: enough to keep the kernels busy; the widest activation of them is what memory holds.
BATCH_TOKENS = 2048
# Rows of logits at once: a vocabulary of 262,144 takes 128 MB.
LOGITS_ROWS = 128
_CACHE_DTYPES = {"f32": (np.float32, 1), "f16": (np.float16, 10), "int8": (np.int8, 3), "fp8": (np.uint8, 17)}


@dataclass(frozen=True)
class Texts:
    """Token ids of several texts, each of which is read from an empty context.

    Attributes:
        token_ids: int64 [tokens], one text after another.
        lengths: of each text, in tokens.
    """

    token_ids: NDArray[np.int64]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Texts":
        return cls(np.concatenate([np.asarray(text, np.int64) for text in texts]), tuple(map(len, texts)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Of each token in its text."""
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])

    def batches(self) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """(rows, lengths of the texts there) of each run: whole texts, about BATCH_TOKENS rows."""
        start = 0
        lengths: list[int] = []
        for length in self.lengths:
            if lengths and sum(lengths) + length > BATCH_TOKENS:
                yield slice(start, start + sum(lengths)), tuple(lengths)
                start, lengths = start + sum(lengths), []
            lengths.append(length)
        yield slice(start, start + sum(lengths)), tuple(lengths)


class Layerwise:
    """Runs parts of a model over texts. Sessions are opened for one part and closed behind it."""

    def __init__(self, texts: Texts, cache: CacheFormat, *, threads: int = 0) -> None:
        self.texts = texts
        self._cache = cache
        self._threads = threads

    def embed(self, part: Part) -> Stream:
        """The stream before the first layer."""
        session = self._open(build_embedding_graph(part), part)
        names = [value.name for value in session.get_outputs()]
        known = [each.name for each in session.get_inputs()]
        pieces = []
        for rows, _ in self.texts.batches():
            feeds = {"input_ids": self.texts.token_ids[rows], "position_ids": self.texts.positions[rows]}
            values = session.run(names, {name: feeds[name] for name in known})
            found = dict(zip(names, values, strict=True))
            pieces.append(Stream(found.pop("residual"), found))
        return Stream.joined(pieces)

    def layer(self, part: Part, layer: int, stream: Stream, on_taps: OnTaps | None = None) -> Stream:
        """The stream behind a layer, given the one before it.

        `on_taps` is told of each run's TAPS (`graph_layer`), and its texts' lengths.
        """
        session = self._open(build_layer_graph(part, layer, self._cache), part)
        computed = {value.name for value in session.get_outputs()}
        names = ["residual", *(name for name in TAPS if on_taps and name in computed)]
        pieces = []
        for rows, lengths in self.texts.batches():
            before = stream.take(rows)
            feeds = self._step(part.spec, layer, lengths, self.texts.positions[rows])
            caches = self._caches(part.spec, layer, lengths, before)
            found = self._run(session, feeds | _own(before, layer), caches, names)
            values = dict(zip(names, found, strict=True))
            after = Stream(values.pop("residual"), self._handed_on(part.spec, layer, lengths, before, caches))
            pieces.append(after)
            if on_taps:  # what is no output is the layer's input
                on_taps({**dict.fromkeys(TAPS, before.residual), **values}, lengths)
        return Stream.joined(pieces)

    def logits(self, part: Part, stream: Stream) -> Iterator[tuple[slice, Float32]]:
        """(rows, logits [rows, vocab]) for all rows of a stream behind the last layer."""
        session = self._open(build_head_graph(part), part)
        for start in range(0, len(stream), LOGITS_ROWS):
            rows = slice(start, min(start + LOGITS_ROWS, len(stream)))
            yield rows, session.run(["logits"], {"residual_in": stream.residual[rows]})[0]

    def _open(self, model: ir.Model, part: Part) -> "InferenceSession":
        graph = ir.to_proto(model).SerializeToString()
        return open_session(graph, threads=self._threads, folder=part.folder)

    def _step(
        self, spec: ModelSpec, layer: int, lengths: Sequence[int], positions: NDArray[np.int64]
    ) -> dict[str, Any]:
        """The inputs of a ragged step in which each sequence begins with an empty context."""
        blocks = self._blocks(lengths)
        table = np.full((len(lengths), max(blocks)), -1, np.int32)
        for row, (first, count) in enumerate(zip(np.cumsum([0, *blocks]), blocks, strict=False)):
            table[row, :count] = np.arange(first, first + count)
        return {
            "position_ids": positions,
            "cumulative_sequence_length": np.cumsum([0, *lengths], dtype=np.int32),
            "past_seqlens": np.zeros(len(lengths), np.int32),
            "ancestor_mask": np.empty((0, 0), np.int32),
            **{f"block_table_{group}": table for group in range(len(spec.window_groups))},
        }

    def _blocks(self, lengths: Sequence[int]) -> list[int]:
        return [-(-length // self._cache.block_size) for length in lengths]

    def _slots(self, lengths: Sequence[int]) -> NDArray[np.intp]:
        """Of each token in the caches."""
        firsts = np.cumsum([0, *self._blocks(lengths)]) * self._cache.block_size
        return np.concatenate(
            [first + np.arange(length) for first, length in zip(firsts, lengths, strict=False)]
        )

    def _caches(
        self, spec: ModelSpec, layer: int, lengths: Sequence[int], before: Stream
    ) -> dict[str, tuple[NDArray[Any], int]]:
        """(array, ONNX's element type) of those that the layer writes, or of those that it reads."""
        dtype, element = _CACHE_DTYPES[self._cache.type]
        kind = spec.layers[layer]
        owner = kind.cache_of if kind.shares_cache else layer
        shape = (sum(self._blocks(lengths)), self._cache.block_size, kind.num_kv_heads)
        caches: dict[str, tuple[NDArray[Any], int]] = {}
        for name in ("key", "value"):
            caches[f"{name}_cache.{owner}"] = np.zeros((*shape, kind.head_dim), dtype), element
            if self._cache.type in ("int8", "fp8"):
                caches[f"{name}_scale_cache.{owner}"] = np.zeros(shape, np.float32), 1
        if kind.shares_cache:
            for name, (array, _) in caches.items():
                array.reshape(-1, *array.shape[2:])[self._slots(lengths)] = before.carried[name]
        return caches

    def _handed_on(
        self,
        spec: ModelSpec,
        layer: int,
        lengths: Sequence[int],
        before: Stream,
        caches: Mapping[str, tuple[NDArray[Any], int]],
    ) -> dict[str, NDArray[Any]]:
        """What later layers read beside the residual stream."""
        own = {name: value for name, value in before.carried.items() if name != f"layer_input.{layer}"}
        if any(later.cache_of == layer for later in spec.layers):
            slots = self._slots(lengths)
            own |= {name: array.reshape(-1, *array.shape[2:])[slots] for name, (array, _) in caches.items()}
        return own

    def _run(
        self,
        session: "InferenceSession",
        feeds: Mapping[str, Any],
        caches: Mapping[str, tuple[NDArray[Any], int]],
        names: Sequence[str],
    ) -> list[Any]:
        """Run with the caches bound as input and, where they are written, output of the same memory."""
        from onnxruntime import OrtValue

        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        written = {value.name for value in session.get_outputs()}
        for name, value in caches.items():
            cache = OrtValue.ortvalue_from_numpy_with_onnx_type(*value)
            out_name = name.replace(".", "_out.", 1)
            binding.bind_ortvalue_input(name, cache)
            if out_name in written:
                binding.bind_ortvalue_output(out_name, cache)
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[-len(names) :]]


def _own(before: Stream, layer: int) -> dict[str, NDArray[Any]]:
    """The layer's inputs of float32 [tokens, …]."""
    name = f"layer_input.{layer}"
    own = {name: before.carried[name]} if name in before.carried else {}
    return {"residual_in": before.residual, **own}
