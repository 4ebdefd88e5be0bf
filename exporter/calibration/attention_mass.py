"""How much each token is looked at: what weights its share in the moments of q, k and v.

A wrong key or value of a token spoils every row that attends to it, by as much as the row attends. In most
models one token, often the first, is attended to by all others: in a plain mean over tokens it counts as one
in hundreds, and GPTQ would move its errors right there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.stream import Float32
from pagelet.models.spec import ModelSpec
from pagelet.plugins.reference import rotate

Float64 = NDArray[np.float64]


def attention_mass(spec: ModelSpec, layer: int, qkv: Float32, lengths: Sequence[int]) -> Float64:
    """Float64 [tokens], mean 1: the squares of what each token's later rows attend to it with, summed.

    qkv is [tokens, (num_heads + 2 num_kv_heads) * head_dim] of texts of `lengths`, before rotation. The error
    of a row's output is the attention's probability times the error of a value: hence its square.
    """
    if spec.layers[layer].shares_cache:  # no key or value is made here
        return np.ones(len(qkv))
    texts = np.split(qkv, np.cumsum(lengths)[:-1])
    mass = np.concatenate([_text_mass(spec, layer, text) for text in texts])
    relative: Float64 = mass / mass.mean()
    return relative


def _text_mass(spec: ModelSpec, layer: int, qkv: Float32) -> Float64:
    kind = spec.layers[layer]
    length, group = len(qkv), spec.num_heads // kind.num_kv_heads
    heads = qkv.reshape(length, -1, kind.head_dim)[:, : spec.num_heads + kind.num_kv_heads]
    if kind.rope >= 0:
        rope = spec.ropes[kind.rope]
        heads = rotate(heads, *rope.tables(length, 0), rope.rotary_dim, spec.attention.rotary_interleaved)
    queries, keys = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
    visible = np.tri(length, dtype=bool)
    if window := kind.window:
        visible &= ~np.tri(length, k=-window, dtype=bool)
    mass = np.zeros(length)
    for head in range(spec.num_heads):
        scores = (queries[:, head] @ keys[:, head // group].T) * np.float32(spec.attention.scale)
        scores[~visible] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mass += np.square(weights).sum(axis=0, dtype=np.float64)
    return mass
