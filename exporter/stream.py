"""What a model's layers hand on, of all tokens of some texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.models.spec import ModelSpec

Float32 = NDArray[np.float32]
Array = NDArray[Any]


@dataclass(frozen=True)
class Stream:
    """State before a layer, a row for each token.

    Attributes:
        residual: the residual stream, float32 [tokens, hidden].
        carried: what later layers read beside it, [tokens, …] by the name of their graph's input: their own
            inputs ("layer_input.3"), and keys and values of a layer that they share ("key_cache.2").
    """

    residual: Float32
    carried: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.residual)

    def take(self, rows: slice | Array) -> "Stream":
        return Stream(self.residual[rows], {name: array[rows] for name, array in self.carried.items()})

    @classmethod
    def joined(cls, streams: Sequence["Stream"]) -> "Stream":
        """One behind the other; all have the same carried arrays."""
        names = streams[0].carried
        return cls(
            np.concatenate([stream.residual for stream in streams]),
            {name: np.concatenate([stream.carried[name] for stream in streams]) for name in names},
        )

    def split(self, count: int) -> list["Stream"]:
        """Into `count` streams of the same length."""
        length = len(self) // count
        return [self.take(slice(at, at + length)) for at in range(0, len(self), length)]

    @classmethod
    def noise(cls, spec: ModelSpec, count: int) -> "Stream":
        """Before the first layer, of `count` tokens: for those who time a layer."""
        draw = np.random.default_rng(0).standard_normal
        residual = draw((count, spec.hidden_size), np.float32)
        if not spec.layer_inputs:
            return cls(residual)
        return cls(residual, {"layer_input.0": draw((count, spec.layer_inputs), np.float32)})
