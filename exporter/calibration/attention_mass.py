"""How much each token is looked at: what weights its share in the moments of q, k and v.

A wrong key or value of a token spoils every row that attends to it, by as much as the row attends. In most
models one token, often the first, is attended to by all others: in a plain mean over tokens it counts as one
in hundreds, and GPTQ would move its errors right there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.stream import Float32
from pagelet.models.spec import ModelSpec
from pagelet.plugins.reference import normalize, rotate

Float64 = NDArray[np.float64]


def attention_mass(
    spec: ModelSpec, layer: int, qkv: Float32, lengths: Sequence[int], weights: Mapping[str, Float32]
) -> Float64:
    """Float64 [tokens], mean 1: the squares of what each token's later rows attend to it with, summed.

    qkv is [tokens, (num_heads + 2 num_kv_heads) * head_dim] of texts of `lengths`, before norms and rotation;
    `weights`: of the norms of queries and keys, and sinks, by role. The error of a row's output is the
    attention's probability times the error of a value: hence its square.
    """
    if spec.layers[layer].shares_cache:  # no key or value is made here
        return np.ones(len(qkv))
    texts = np.split(qkv, np.cumsum(lengths)[:-1])
    mass = np.concatenate([_text_mass(spec, layer, text, weights) for text in texts])
    relative: Float64 = mass / mass.mean()
    return relative


def _text_mass(spec: ModelSpec, layer: int, qkv: Float32, weights: Mapping[str, Float32]) -> Float64:
    kind, attention, at = spec.layers[layer], spec.attention, f"layers.{layer}.attention."
    length, group = len(qkv), spec.num_heads // kind.num_kv_heads
    ends = spec.query_size(layer), spec.query_size(layer) + spec.kv_size(layer)
    queries = _placed(spec, layer, qkv[:, : ends[0]], weights.get(at + "q_norm"))
    keys = _placed(spec, layer, qkv[:, ends[0] : ends[1]], weights.get(at + "k_norm"))
    sinks = weights.get(at + "sinks", np.full(spec.num_heads, -np.inf, np.float32))
    visible = np.tri(length, dtype=bool)
    if window := kind.window:
        visible &= ~np.tri(length, k=-window, dtype=bool)
    mass = np.zeros(length)
    for head in range(spec.num_heads):
        scores = (queries[:, head] @ keys[:, head // group].T) * np.float32(attention.scale)
        if attention.softcap:
            scores = np.tanh(scores / np.float32(attention.softcap)) * np.float32(attention.softcap)
        scores[~visible] = -np.inf
        highest = np.maximum(scores.max(axis=1, keepdims=True), sinks[head])
        shares = np.exp(scores - highest)
        shares /= shares.sum(axis=1, keepdims=True) + np.exp(sinks[head] - highest)
        mass += np.square(shares).sum(axis=0, dtype=np.float64)
    return mass


def _placed(spec: ModelSpec, layer: int, rows: Float32, weight: Float32 | None) -> Float32:
    """Queries or keys [tokens, heads, head_dim] as they are multiplied: normed and rotated."""
    kind, attention, epsilon = spec.layers[layer], spec.attention, spec.norm.epsilon
    if attention.norm == "row":
        rows = normalize(rows, weight, epsilon)
    heads = rows.reshape(len(rows), -1, kind.head_dim)
    if attention.norm == "head" and not attention.norm_after_rotation:
        heads = normalize(heads, weight, epsilon)
    if kind.rope >= 0:
        rope = spec.ropes[kind.rope]
        heads = rotate(heads, *rope.tables(len(rows), 0), rope.rotary_dim, attention.rotary_interleaved)
    if attention.norm == "head" and attention.norm_after_rotation:
        heads = normalize(heads, weight, epsilon)
    return heads
