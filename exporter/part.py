"""Weights as they were written, and how a graph over them is spelled: what is run, certified and compiled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pagelet.exporter.graph_builder import GraphBuilder
from pagelet.exporter.weights import StoredWeights
from pagelet.models.spec import ModelSpec

MakeBuilder = Callable[[ModelSpec, StoredWeights, Path], GraphBuilder]


@dataclass(frozen=True)
class Part:
    """A model, or some of it, as the weights file of `folder` holds it.

    Attributes:
        builder: makes what collects the nodes of one graph; those of the CPU's ops by default.
        stand_in: the same for a graph that the CPU can run in the place of the device's, with the device's
            roundings; None: it can run the graph itself.
    """

    spec: ModelSpec
    weights: StoredWeights
    folder: Path
    builder: MakeBuilder = GraphBuilder
    stand_in: MakeBuilder | None = None

    @property
    def runnable(self) -> "Part":
        """As the CPU can run it."""
        return self if self.stand_in is None else replace(self, builder=self.stand_in, stand_in=None)

    def build(self) -> GraphBuilder:
        """An empty graph."""
        return self.builder(self.spec, self.weights, self.folder)
