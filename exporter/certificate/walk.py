"""Original and bundle through their layers in lock-step, one layer of each in memory at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.certificate.golden import Prompt
from pagelet.exporter.certificate.held_out import sample
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.stream import Float32, Stream
from pagelet.models.certificate import LayerError, Quality
from pagelet.models.distance import LogitsDistance, relative_error
from pagelet.models.errors import BundleError, CheckpointError, PageletError


@dataclass(frozen=True)
class PlacedTexts(Texts):
    """Texts that do not all begin at position 0 and go on one by one."""

    places: tuple[int, ...]

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        return np.asarray(self.places, np.int64)


class Walk:
    """One pass over the held-out windows and, for the original, the golden prompts behind them."""

    def __init__(
        self, pieces: Sequence[Sequence[int]], prompts: Sequence[Prompt], cache: CacheFormat, threads: int
    ) -> None:
        texts = Texts.of(pieces)
        golden = Texts.of([prompt.token_ids for prompt in prompts])
        places = tuple(place for prompt in prompts for place in prompt.position_ids)
        self._texts = texts
        self._prompts = prompts
        self._sample = np.concatenate([np.arange(rows.start, rows.stop) for rows in sample(pieces)])
        together = PlacedTexts(
            np.concatenate([texts.token_ids, golden.token_ids]),
            texts.lengths + golden.lengths,
            (*texts.positions.tolist(), *places),
        )
        few = [texts.token_ids[rows].tolist() for rows in sample(pieces)]
        plain = CacheFormat(cache.block_size, "f32")
        self._run_original = Layerwise(together, plain, threads=threads)
        self._run_bundle = Layerwise(texts, cache, threads=threads)
        self._run_sample = Layerwise(Texts.of(few), cache, threads=threads)
        # What layers share of keys is the original's there, stored as the original stores it.
        self._run_sharing = Layerwise(Texts.of(few), plain, threads=threads)

    def layers(
        self, original: Original, bundle: Part, on_layer: Callable[[int], None]
    ) -> tuple[list[LayerError], Stream, Stream]:
        """Errors of all layers, and the streams behind the last: the original's, the bundle's."""
        theirs = self._run_original.embed(original.embedding())
        ours = self._run_bundle.embed(bundle)
        errors = []
        for layer in range(bundle.spec.num_layers):
            on_layer(layer)
            before = theirs.take(self._sample)
            theirs = self._run_original.layer(original.layer(layer), layer, theirs)
            _check_finite(theirs.residual, layer, CheckpointError, "the original's")
            ours = self._run_bundle.layer(bundle, layer, ours)
            _check_finite(ours.residual, layer, BundleError, "the bundle's")
            run = self._run_sharing if bundle.spec.layers[layer].shares_cache else self._run_sample
            alone = run.layer(bundle, layer, before).residual
            after = theirs.residual[self._sample]
            error = relative_error(alone, after, scale=after - before.residual)
            so_far = relative_error(ours.residual, theirs.residual[: len(ours)])
            errors.append(LayerError(layer, error, so_far))
        return errors, theirs, ours

    def head(
        self, original: Original, bundle: Part, theirs: Stream, ours: Stream
    ) -> tuple[Quality, list[Float32]]:
        """How far the logits are apart, and the original's [recorded, vocab] of each golden prompt."""
        part = original.head()
        scored = np.ones(len(ours), bool)
        scored[np.cumsum(self._texts.lengths) - 1] = False  # nothing follows a text's last token
        rows = np.flatnonzero(scored)
        distance = LogitsDistance()
        references = self._run_original.logits(part, theirs.take(rows))
        for (at, logits), (_, reference) in zip(
            self._run_bundle.logits(bundle, ours.take(rows)), references, strict=True
        ):
            _check_finite(reference, "head", CheckpointError, "the original's")
            _check_finite(logits, "head", BundleError, "the bundle's")
            distance.add(logits, reference, self._texts.token_ids[rows[at] + 1])
        return distance.quality(), self._golden_logits(part, theirs.take(slice(len(ours), None)))

    def _golden_logits(self, part: Part, stream: Stream) -> list[Float32]:
        starts = np.cumsum([0, *(len(prompt.token_ids) for prompt in self._prompts)])
        rows = [
            start + np.asarray(prompt.recorded) for start, prompt in zip(starts, self._prompts, strict=False)
        ]
        chosen = stream.take(np.concatenate(rows))
        pieces = [logits for _, logits in self._run_original.logits(part, chosen)]
        logits = np.concatenate(pieces)
        _check_finite(logits, "head", CheckpointError, "the original's")
        return np.split(logits, np.cumsum([len(some) for some in rows])[:-1])


def _check_finite(values: Float32, where: int | str, kind: type[PageletError], whose: str) -> None:
    if not np.isfinite(values).all():
        name = where if isinstance(where, str) else f"layer {where}"
        advice = "its weights are damaged" if kind is CheckpointError else "export with other weights"
        raise kind(f"{whose} {name} gives NaN or infinity on the held-out text: {advice}.")
