"""Golden prompts: short texts whose numbers, on every device, show that a bundle computes what it should."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.part import Part
from pagelet.models.certificate import (
    OUTPUTS_NAME,
    GoldenPrompt,
    TopLogits,
    logits_digest,
    point_names,
    point_values,
)
from pagelet.models.errors import BundleError
from pagelet.plugins.whole_graph import CacheArrays, WholeGraph

Float32 = NDArray[np.float32]

_POSITIONS = 16  # that are recorded at a prompt's end
_ROWS = 8  # of all prompts together, whose layer outputs are stored
# The original's rotation tables are written for each layer anew: of a context of millions, only so much.
_MAX_POSITION = 131_072


@dataclass(frozen=True)
class Prompt:
    """A text and where its tokens stand."""

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]

    @property
    def recorded(self) -> range:
        """Rows whose logits are recorded."""
        return range(max(len(self.token_ids) - _POSITIONS, 0), len(self.token_ids))


def place(texts: Sequence[Sequence[int]], max_context: int) -> list[Prompt]:
    """The prompts; the first one's tokens stand all over the context, for the rotation's sake."""
    cut = [tuple(map(int, text[:max_context])) for text in texts]
    return [
        Prompt(ids, spread(len(ids), min(max_context, _MAX_POSITION)) if i == 0 else tuple(range(len(ids))))
        for i, ids in enumerate(cut)
    ]


def spread(length: int, context: int) -> tuple[int, ...]:
    """Positions from 0 to context - 1 whose gaps grow with the third power."""
    free, last = context - length, max(length - 1, 1)
    return tuple(row + int(free * (row / last) ** 3) for row in range(length))


def stored_rows(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Of each prompt, the rows whose layer outputs are stored: evenly spread, the last one among them."""
    count = max(_ROWS // len(prompts), 1)
    return [
        sorted({-(-len(prompt.token_ids) * part // count) - 1 for part in range(1, count + 1)} - {-1})
        for prompt in prompts
    ]


def replay_here(
    prompts: Sequence[Prompt],
    reference: Sequence[Float32],
    bundle: Part,
    cache: CacheFormat,
    graph: Path,
    threads: int,
) -> tuple[tuple[GoldenPrompt, ...], tuple[int, ...]]:
    """Run the bundle's own graph; the golden prompts, and their stored rows, whose outputs are written.

    `reference`: the original's logits [recorded, vocab] of each prompt.
    """
    spec = bundle.spec
    shape = CacheArrays(
        cache.type,
        cache.block_size,
        {i: (spec.layers[i].num_kv_heads, spec.layers[i].head_dim) for i in spec.cache_owners},
        len(spec.window_groups),
    )
    model = WholeGraph(graph, shape, point_values(spec.num_layers), threads=threads)
    golden, outputs, rows, start = [], [], [], 0
    for prompt, theirs, chosen in zip(prompts, reference, stored_rows(prompts), strict=True):
        logits, taps = model.run(prompt.token_ids, prompt.position_ids, prompt.recorded)
        _check_finite(taps, logits, spec.num_layers)
        outputs.append(np.stack([tap[chosen] for tap in taps]))
        rows += [start + row for row in chosen]
        start += len(prompt.token_ids)
        golden.append(_golden(prompt, theirs, logits))
    np.concatenate(outputs, axis=1).astype("<f4").tofile(graph.parent / OUTPUTS_NAME)
    return tuple(golden), tuple(rows)


def _golden(prompt: Prompt, reference: Float32, logits: Float32) -> GoldenPrompt:
    reference_top = tuple(map(TopLogits.of, reference))
    return GoldenPrompt(
        prompt.token_ids,
        prompt.position_ids,
        len(prompt.recorded),
        tuple(top.ids[0] for top in reference_top),
        reference_top,
        tuple(map(TopLogits.of, logits)),
        logits_digest(logits),
    )


def _check_finite(taps: Sequence[Float32], logits: Float32, num_layers: int) -> None:
    for name, values in zip((*point_names(num_layers), "head"), (*taps, logits), strict=True):
        if not np.isfinite(values).all():
            raise BundleError(
                f"the bundle's {name} gives NaN or infinity on a golden prompt; export with other weights or "
                "another cache type."
            )
