"""Which tokens stay candidates: top-k, top-p and min-p, with the definitions of transformers' warpers."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Indices = NDArray[np.intp]
Filter = Callable[[FloatArray], Indices]


def top_k(scores: FloatArray, k: int) -> Indices:
    """Indices, ascending, of the k highest scores and of all that equal the lowest of them; never of -inf."""
    least = scores.size - min(k, scores.size)
    threshold = np.partition(scores, least)[least]
    return np.flatnonzero(scores >= max(threshold, np.finfo(np.float32).min))


def top_p(scores: FloatArray, p: float) -> Indices:
    """Indices, ascending, of the likeliest tokens: each whose likelier ones have less than `p` together.

    At least one stays. Of equal scores the lower ids count as likelier, as in greedy decoding (transformers
    leaves their order to an unstable sort).
    """
    highest = scores.max()
    weights = np.exp(scores - highest)
    total = float(weights.sum(dtype=np.float64))
    # Tokens under this weight have less than 1 - p together, so the sorted rest is sure to reach p.
    head = np.sort(scores[weights >= (1.0 - p) * total / scores.size])[::-1]
    mass = np.cumsum(np.exp(head.astype(np.float64) - float(highest)))
    kept = min(1 + int(np.searchsorted(mass, p * total)), head.size)
    last = head[kept - 1]
    above = np.flatnonzero(scores > last)
    equal = np.flatnonzero(scores == last)
    return np.sort(np.concatenate([above, equal[: kept - above.size]]))


def min_p(scores: FloatArray, fraction: float) -> Indices:
    """Indices, ascending, of tokens at least `fraction` (above 0) as likely as the likeliest."""
    return np.flatnonzero(scores >= scores.max() + np.float32(math.log(fraction)))


def active_filters(k: int, p: float, fraction: float) -> tuple[Filter, ...]:
    """The filters that are on (k above 0, p below 1, fraction above 0), in transformers' order."""
    filters: list[Filter] = []
    if k:
        filters.append(partial(top_k, k=k))
    if p < 1.0:
        filters.append(partial(top_p, p=p))
    if fraction > 0.0:
        filters.append(partial(min_p, fraction=fraction))
    return tuple(filters)


def surviving(scores: FloatArray, filters: Sequence[Filter]) -> Indices:
    """Indices, ascending, that pass all filters (there is one), each seeing what the one before it left."""
    first, *rest = filters
    ids = first(scores)
    for keep in rest:
        ids = ids[keep(scores[ids])]
    return ids
