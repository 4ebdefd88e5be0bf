"""What each matrix's rounding costs the model: KL divergence of the output, everything else intact.

All variants run at once: behind the layer that tells them apart they are further texts of one batch, so each
layer is read once, and one layer's weights are in memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagelet.exporter.calibration.moments import LayerMoments
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.part import Part
from pagelet.exporter.stream import Float32, Stream
from pagelet.models.distance import kl_divergence, log_softmax

OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Variant:
    """A layer's weights of which something differs from the original's."""

    name: str
    part: Part


@dataclass
class Streams:
    """Those of the original and of all variants so far."""

    names: list[str]
    values: list[Stream]

    def add(self, name: str, value: Stream) -> None:
        self.names.append(name)
        self.values.append(value)


class Sensitivity:
    """Runs a model's layers over a few texts, with variants that branch off."""

    def __init__(self, texts: Sequence[Sequence[int]], cache: CacheFormat) -> None:
        self._texts = [list(text) for text in texts]
        self._cache = cache
        self._layerwise = Layerwise(Texts.of(self._texts), cache)
        self._streams = Streams([], [])

    def embed(self, original: Part, variants: Iterable[Variant] = ()) -> None:
        self._streams.add("", self._layerwise.embed(original))
        for variant in variants:
            self._streams.add(variant.name, self._layerwise.embed(variant.part))

    @property
    def output(self) -> Float32:
        """The original's residual stream as far as it was run."""
        return self._streams.values[0].residual

    def moments(self, original: Part, layer: int, moments: LayerMoments) -> None:
        """What the original's layer reads in these texts."""
        self._layerwise.layer(original, layer, self._streams.values[0], moments.add)

    def branch(self, layer: int, variants: Iterable[Variant]) -> list[tuple[str, Stream]]:
        """The streams behind a layer of variants of it, to be handed to `advance`."""
        before = self._streams.values[0]
        return [(each.name, self._layerwise.layer(each.part, layer, before)) for each in variants]

    def advance(self, original: Part, layer: int, branches: Iterable[tuple[str, Stream]] = ()) -> None:
        """Run the original's layer on all streams; the branches join behind it."""
        streams = self._streams
        everything = Layerwise(Texts.of(self._texts * len(streams.values)), self._cache)
        after = everything.layer(original, layer, Stream.joined(streams.values))
        streams.values = after.split(len(streams.values))
        for name, value in branches:
            streams.add(name, value)

    def divergences(self, head: Part, heads: Mapping[str, Part]) -> dict[str, float]:
        """Mean KL divergence in nats from the original to each variant.

        `heads`: variants of the head, by the name of the stream that they read; of new names, the original's.
        """
        streams = dict(zip(self._streams.names, self._streams.values, strict=True))
        original = streams.pop("")
        runs = {name: (stream, heads.get(name, head)) for name, stream in streams.items()}
        runs |= {name: (original, part) for name, part in heads.items() if name not in streams}
        return {name: self._divergence(original, head, *run) for name, run in runs.items()}

    def _divergence(self, original: Stream, head: Part, stream: Stream, stream_head: Part) -> float:
        pairs = zip(
            self._layerwise.logits(head, original), self._layerwise.logits(stream_head, stream), strict=True
        )
        divergences = (
            kl_divergence(log_softmax(theirs), log_softmax(ours)) for (_, theirs), (_, ours) in pairs
        )
        total = sum(float(some.sum()) for some in divergences)
        return total / len(original)
