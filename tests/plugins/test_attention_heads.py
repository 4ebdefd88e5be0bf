"""Norms of heads, and sinks. Comparisons without a tolerance are ``==``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagelet.plugins import reference

# As in test_attention_reference.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CACHE_TYPES = ("f32", "f16", "int8", "fp8")
NORMS = ("q_norm_weight", "k_norm_weight")
SPANS = [(0, 250, 270), (1, 600, 601), (2, 0, 30)]


def case_of(make: Any, layer: Any) -> tuple[Any, dict[str, Any], Any]:
    world = make(layer, [end for _, _, end in SPANS])
    return world, world.step(SPANS), world.with_past([begin for _, begin, _ in SPANS])


def heads(rows: Any, head_size: int) -> Any:
    return rows.reshape(len(rows), -1, head_size)


@pytest.mark.parametrize("head_size", [8, 40, 64, 512])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.5])
def test_the_norm_of_the_reference(head_size: int, epsilon: float) -> None:
    rng = np.random.default_rng(head_size)
    x = rng.standard_normal((50, 3, head_size)).astype(np.float32)
    weight = rng.uniform(-2, 2, head_size).astype(np.float32)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + epsilon)
    # Up to 64 roundings of a lane's sum, and a handful behind it.
    np.testing.assert_allclose(reference.normalize(x, weight, epsilon), x / root * weight, rtol=1e-5)
    np.testing.assert_allclose(reference.normalize(x, None, epsilon), x / root, rtol=1e-5)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("names", [("q_norm_weight",), ("k_norm_weight",), NORMS])
def test_heads_that_come_normed(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str, after: bool, names: tuple[str, ...]
) -> None:
    """Norms inside the op have the bits of the same norms before it."""
    size, epsilon = 40, 0.01
    plain = make_layer(head_size=size, packed=False, rotary=False, cache_type=cache_type)
    layer = replace(plain, rotary=True, head_weights=names, norm_epsilon=epsilon, norm_after_rotation=after)
    layer = replace(layer, norm_values=True)
    world, step, caches = case_of(make_world, layer)
    expected_caches = caches.copy()
    output = attention(layer, 2).run(step, caches)

    given = {n: step[n] for n in ("cumulative_sequence_length", "past_seqlens", "block_table")}
    given["value"] = reference.normalize(heads(step["value"], size), None, epsilon).reshape(-1, 2 * size)
    cos, sin = (table[step["position_ids"]] for table in (world.cos, world.sin))
    for name in ("query", "key"):
        x, weight = heads(step[name], size), world.head_weights.get(f"{name[0]}_norm_weight")
        if weight is not None and not after:
            x = reference.normalize(x, weight, epsilon)
        x = reference.rotate(x, cos, sin, size, False)
        if weight is not None and after:
            x = reference.normalize(x, weight, epsilon)
        given[name] = x.reshape(len(x), -1)
    np.testing.assert_array_equal(attention(plain).run(given, expected_caches), output)
    for name, cache in expected_caches.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("window", [-1, 1, 20])
@pytest.mark.parametrize("sink", [-np.inf, -1000.0])
def test_a_sink_without_weight_changes_no_bit(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str, window: int, sink: float
) -> None:
    layer = make_layer(cache_type=cache_type, local_window_size=window, head_weights=("head_sink",))
    _, step, caches = case_of(make_world, layer)
    step["head_sink"] = np.full(4, sink, np.float32)
    output = attention(layer).run(step, caches.copy())
    del step["head_sink"]
    np.testing.assert_array_equal(output, attention(replace(layer, head_weights=())).run(step, caches))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_sink_may_take_everything(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(cache_type=cache_type, head_weights=("head_sink",))
    _, step, caches = case_of(make_world, layer)
    step["head_sink"] = np.array([1, 1e4, 2, 1e30], np.float32)
    output = heads(attention(layer).run(step, caches), layer.head_size)
    assert (output[:, [1, 3]] == 0).all()
    assert (output[:, [0, 2]] != 0).any(axis=-1).all()


def test_a_row_that_sees_only_itself_and_the_sink(attention: Any, make_layer: Any, make_world: Any) -> None:
    """With one key the softmax is the logistic function of score − sink."""
    layer = make_layer(packed=False, rotary=False, local_window_size=1, head_weights=("head_sink",))
    world, step, caches = case_of(make_world, layer)
    output = attention(layer).run(step, caches)
    query, key, value = (heads(step[name], 32).astype(np.float64) for name in ("query", "key", "value"))
    key, value = np.repeat(key, 2, axis=1), np.repeat(value, 2, axis=1)
    score = (query * key).sum(axis=-1) / np.sqrt(32)
    weight = 1 / (1 + np.exp(world.head_weights["head_sink"] - score))
    np.testing.assert_allclose(heads(output, 32), weight[..., None] * value, **TOLERANCE)


def test_sinks_are_neither_scaled_nor_capped(attention: Any, make_layer: Any, make_world: Any) -> None:
    """Where all scores are 0, n keys have the weight 1 / (n + e^sink) each."""
    layer = make_layer(rotary=False, scale=0.05, softcap=2.0, local_window_size=300)
    layer = replace(layer, packed=False, head_weights=("head_sink",))
    world, step, caches = case_of(make_world, layer)
    step["query"] = np.zeros_like(step["query"])
    step["head_sink"] = sink = np.array([-1, 0, 4, 6], np.float32)
    output = heads(attention(layer).run(step, caches), 32)
    row = 0
    for s, begin, end in SPANS:
        for position in range(begin, end):
            seen = np.arange(max(0, position - 299), position + 1)
            slots = reference.block_slots(world.block_table[s], seen, layer.block_size)
            total = reference.read(caches.value, None, slots).sum(axis=0).repeat(2, axis=0)
            expected = total / (len(seen) + np.exp(sink.astype(np.float64)))[:, None]
            np.testing.assert_allclose(output[row], expected, **TOLERANCE)
            row += 1


def test_nan_is_not_hidden_by_a_sink(attention: Any, make_layer: Any, make_world: Any) -> None:
    layer = make_layer(rotary=False, head_weights=("head_sink",))
    _, step, caches = case_of(make_world, layer)
    clean = attention(layer).run(step, caches.copy())
    step["query"][5, 4 * 32 : 5 * 32] = np.nan  # the first KV head's key of sequence 0's token 255
    dirty = attention(layer).run(step, caches)
    np.testing.assert_array_equal(dirty[:5], clean[:5])
    np.testing.assert_array_equal(dirty[:, 64:], clean[:, 64:])
    assert np.isnan(dirty[5:20, :64]).all()
    np.testing.assert_array_equal(dirty[20:], clean[20:])
