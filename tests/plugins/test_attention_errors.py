"""Every wrong input is an exception that says what is wrong, and the session works afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

LENGTHS = [(30, 4), (0, 9)]
BLOCK = 16


@pytest.fixture(scope="module")
def case(make_layer: Any, make_world: Any) -> tuple[Any, Any]:
    world = make_world(make_layer(block_size=BLOCK), [past + new for past, new in LENGTHS])
    return world, world.with_past([past for past, _ in LENGTHS])


def step_of(world: Any) -> dict[str, Any]:
    step: dict[str, Any] = world.step([(s, past, past + new) for s, (past, new) in enumerate(LENGTHS)])
    return {name: array.copy() for name, array in step.items()}


def fails(session: Any, step: dict[str, Any], caches: Any, message: str) -> None:
    """The run raises `message`, leaves the caches alone, and a good run follows."""
    before = caches.copy()
    with pytest.raises(Exception, match=message):
        session.run(step, caches)
    for name, cache in before.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("cumulative_sequence_length", 0, 1, r"cumulative_sequence_length\[0\] is 1, expected 0"),
        ("cumulative_sequence_length", 1, -1, r"cumulative_sequence_length\[1\] is -1, expected at least"),
        ("cumulative_sequence_length", 1, 14, r"cumulative_sequence_length\[2\] is 13, expected .* 14"),
        (
            "cumulative_sequence_length",
            2,
            12,
            r"cumulative_sequence_length\[2\] is 12, expected .* tokens, 13",
        ),
        ("past_seqlens", 0, -1, r"past_seqlens\[0\] is -1, expected at least 0"),
        ("past_seqlens", 1, 2**31 - 1, r"past_seqlens\[1\] is 2147483647, .* at most 64"),
        ("past_seqlens", 1, 60, r"past_seqlens\[1\] is 60, expected with its 9 new tokens at most 64"),
        ("block_table", (0, 0), -1, r"block_table\[0\] is -1, .*sequence 0 needs its block 0"),
        ("block_table", (0, 2), 1000, r"block_table\[2\] is 1000, expected at least 0 and less than"),
        ("block_table", (1, 0), -(2**31), r"block_table\[4\] is -2147483648"),
        ("position_ids", 3, -1, r"position_ids\[3\] is -1"),
        ("position_ids", 12, 2**40, r"position_ids\[12\] is 1099511627776, .* less than 1200 .rows"),
    ],
)
def test_wrong_index(attention: Any, case: Any, name: str, index: Any, value: int, message: str) -> None:
    world, caches = case
    session, step = attention(world.layer), step_of(world)
    step[name][index] = value
    fails(session, step, caches.copy(), message)
    good = session.run(step_of(world), caches.copy())
    np.testing.assert_allclose(good, world.reference(step_of(world), caches.copy()), atol=1e-5)  # as float32


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (13, 100), r"query has shape \[13, 100\], expected \[any, 256\] \(or queries alone"),
        ("past_seqlens", (3,), r"cumulative_sequence_length has shape \[3\], expected \[4\]"),
        ("block_table", (1, 4), r"block_table has shape \[1, 4\], expected \[2, any\]"),
        ("cos_cache", (1200, 7), r"cos_cache has shape \[1200, 7\], expected \[any, 16\]"),
        ("sin_cache", (10, 16), r"sin_cache has shape \[10, 16\], expected \[1200, 16\]"),
        ("position_ids", (12,), r"position_ids has shape \[12\], expected \[13\]"),
    ],
)
def test_wrong_shape(attention: Any, case: Any, name: str, shape: tuple[int, ...], message: str) -> None:
    world, caches = case
    step = step_of(world)
    step[name] = np.zeros(shape, step[name].dtype)
    fails(attention(world.layer), step, caches.copy(), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.key[:, :, :1], r"key_cache has shape .* expected \[any, any, 2, any\]"),
        (lambda c: c.key[..., :12], "head size .* is 12, expected a multiple of 8 up to 512"),
        (lambda c: np.zeros((2, 16, 2, 520), np.float32), "head size .* is 520"),
        (lambda c: c.key[:, :0], "blocks of 0 tokens"),
    ],
)
def test_wrong_key_cache(attention: Any, case: Any, change: Any, message: str) -> None:
    world, caches = case
    changed = caches.copy()
    changed.key = np.ascontiguousarray(change(changed))
    changed.value = changed.key.copy()
    fails(attention(world.layer), step_of(world), changed, message)


def test_value_cache_unlike_key_cache(attention: Any, case: Any) -> None:
    world, caches = case
    changed = caches.copy()
    changed.value = np.ascontiguousarray(changed.value[1:])
    fails(attention(world.layer), step_of(world), changed, "value_cache has shape")


def test_caches_not_bound_in_place(attention: Any, case: Any) -> None:
    world, caches = case
    feeds = step_of(world) | {"key_cache": caches.key.copy(), "value_cache": caches.value.copy()}
    with pytest.raises(Exception, match="bind the same OrtValue as cache input and cache output"):
        attention(world.layer).session.run(None, feeds)


SCALE_CACHES = ("key_scale_cache", "value_scale_cache")


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize("name", SCALE_CACHES)
def test_scales_with_a_float_cache(
    attention: Any, make_layer: Any, make_world: Any, name: str, cache_type: str
) -> None:
    world = make_world(make_layer(cache_type=cache_type, scale_inputs=(name,)), [3])
    caches = world.caches()
    scales = np.ones(caches.key.shape[:3], np.float32)
    setattr(caches, name.removesuffix("_cache"), scales)
    fails(attention(world.layer), world.step([(0, 0, 3)]), caches, "belong to int8 and float8e4m3fn caches")


@pytest.mark.parametrize("cache_type", ["int8", "fp8"])
@pytest.mark.parametrize("names", [(), *((name,) for name in SCALE_CACHES)])
def test_missing_scales(
    attention: Any, make_layer: Any, make_world: Any, names: tuple[str, ...], cache_type: str
) -> None:
    world = make_world(make_layer(cache_type=cache_type, scale_inputs=names), [3])
    caches = world.caches()
    for name in set(SCALE_CACHES) - set(names):
        setattr(caches, name.removesuffix("_cache"), None)
    session, step = attention(world.layer), world.step([(0, 0, 3)])
    fails(session, step, caches, "caches need key_scale_cache and value_scale_cache")


@pytest.mark.parametrize("cache_type", ["int8", "fp8"])
@pytest.mark.parametrize("name", SCALE_CACHES)
def test_scales_of_another_shape(
    attention: Any, make_layer: Any, make_world: Any, name: str, cache_type: str
) -> None:
    world = make_world(make_layer(cache_type=cache_type), [3])
    caches = world.caches()
    setattr(caches, name.removesuffix("_cache"), np.ones((4, 16, 1), np.float32))
    message = rf"{name} has shape \[4, 16, 1\], expected \[4, 16, 2\]"
    fails(attention(world.layer), world.step([(0, 0, 3)]), caches, message)


@pytest.mark.parametrize("cache_type", ["f16", "int8", "fp8"])
def test_any_cache_not_bound_in_place(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    """Each cache in turn, a scale cache too, gets an output of its own."""
    world = make_world(make_layer(cache_type=cache_type), [3])
    for name in world.layer.caches:
        with pytest.raises(Exception, match="bind the same OrtValue as cache input and cache output"):
            attention(world.layer).run(world.step([(0, 0, 3)]), world.caches(), apart=name)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3 and kv_num_heads is 2"),
        ({"kv_num_heads": 0}, "kv_num_heads is 0"),
        ({"num_heads": 2**60 + 2}, f"num_heads is {2**60 + 2}"),  # times the head size it would wrap
        ({"local_window_size": 2**62}, f"local_window_size is {2**62}"),
        ({"rotary_dim": 2**62}, f"rotary_dim is {2**62}"),
        ({"local_window_size": -2}, "local_window_size is -2"),
        ({"rotary_dim": 3}, "rotary_dim is 3"),
        ({"scale": -1.0}, "scale is not finite and positive"),
        ({"softcap": float("nan")}, "softcap is not finite and positive"),
        ({"norm_epsilon": -1e-6}, "norm_epsilon is -0.000001, expected a number from 0 to 1"),
        ({"norm_epsilon": 1.5}, "norm_epsilon is 1.5"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon is -?nan"),
        ({"norm_after_rotation": 2}, "norm_after_rotation is 2, expected 0 or 1"),
        ({"norm_values": -1}, "norm_values is -1, expected 0 or 1"),
    ],
)
def test_wrong_attribute(attention: Any, make_layer: Any, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        attention(make_layer(**attributes))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q_norm_weight", (31,), r"q_norm_weight has shape \[31\], expected \[32\]"),
        ("k_norm_weight", (33,), r"k_norm_weight has shape \[33\], expected \[32\]"),
        ("head_sink", (2,), r"head_sink has shape \[2\], expected \[4\]"),
        ("head_sink", (0,), r"head_sink has shape \[0\], expected \[4\]"),
    ],
)
def test_head_weights_of_a_wrong_shape(
    attention: Any, make_layer: Any, make_world: Any, name: str, shape: tuple[int, ...], message: str
) -> None:
    layer = make_layer(head_weights=(name,))
    world = make_world(layer, [3])
    step = world.step([(0, 0, 3)]) | {name: np.zeros(shape, np.float32)}
    fails(attention(layer), step, world.caches(), message)


@pytest.mark.parametrize("attributes", [{"head_weights": ("k_norm_weight",)}, {"norm_values": True}])
def test_norms_of_what_is_not_written(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any]
) -> None:
    world = make_world(make_layer(reads_only=True, **attributes), [3])
    message = "k_norm_weight and norm_values belong to a node that writes"
    fails(attention(world.layer), world.step([(0, 0, 3)]), world.with_past([3]), message)


def test_cache_outputs_and_queries_alone(attention: Any, case: Any) -> None:
    world, caches = case
    step = step_of(world)
    step["query"] = np.ascontiguousarray(step["query"][:, : 4 * 32])
    fails(attention(world.layer), step, caches.copy(), "nothing is written: leave the cache outputs out")


def test_keys_and_no_cache_outputs(attention: Any, make_layer: Any, case: Any) -> None:
    world, caches = case
    reader = attention(make_layer(block_size=BLOCK, reads_only=True))
    fails(reader, step_of(world), caches.copy(), "a cache that is written must be an output too")


def test_rotary_dim_larger_than_the_head(attention: Any, make_layer: Any, make_world: Any) -> None:
    world = make_world(make_layer(rotary_dim=64), [3])
    fails(
        attention(world.layer), world.step([(0, 0, 3)]), world.caches(), "rotary_dim is 64, .* head size 32"
    )


def test_wrong_element_type_is_refused_by_the_host(attention: Any, case: Any) -> None:
    world, caches = case
    step = step_of(world)
    step["past_seqlens"] = step["past_seqlens"].astype(np.int64)
    feeds = step | {"key_cache": caches.key, "value_cache": caches.value}
    with pytest.raises(Exception, match="Unexpected input data type"):
        attention(world.layer).session.run(None, feeds)
