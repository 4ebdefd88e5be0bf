"""What each layer attends to, and how its positions are encoded, as config.json says it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagelet.models.architectures import Architecture
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope import RopeSpec
from pagelet.models.rope_config import rope_from_section, rope_section
from pagelet.models.strict import reject_unknown, require

_WHERE = "config.json"
_KINDS = ("sliding_attention", "full_attention")
# Keys of rotations that one family has; Hunyuan's with an alpha change nothing.
_EXTRA = {
    "ministral3": ("llama_4_scaling_beta",),
    "hunyuan": ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
# Granite's hybrids say so of layers without recurrence.
_FULL_NAMES = {"attention": "full_attention"}


def layer_kinds(config: Mapping[str, Any], row: Architecture, count: int) -> Sequence[str]:
    """What each layer attends to: a name of `_KINDS`.

    Raises:
        UnsupportedError: a kind of layer that is not known.
        CheckpointError: a value makes no sense.
    """
    key = "layers_block_type" if "layers_block_type" in config else "layer_types"
    given = config.get(key) if "layer_types" in row.reads else None
    if given is None:
        return _kinds_by_rule(config, row, count)
    if not isinstance(given, list) or len(given) != count:
        raise CheckpointError(f"{_WHERE}: {key!r} is {given!r:.80}; expected a list of {count} kinds.")
    kinds = [_FULL_NAMES.get(str(kind), str(kind)) for kind in given]
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise UnsupportedError(
            f"{_WHERE}: layer type {unknown[0]!r:.80} is not known; known: {', '.join(_KINDS)}. "
            "Recurrent and convolutional layers are not served yet."
        )
    return kinds


def _kinds_by_rule(config: Mapping[str, Any], row: Architecture, count: int) -> Sequence[str]:
    if row.window_rule and not (config.get("use_sliding_window") and config.get("sliding_window")):
        return ["full_attention"] * count
    if row.window_rule == "behind":
        first = config.get("max_window_layers", 0)
        return [_KINDS[layer < first] for layer in range(count)]
    if row.window_rule == "unrotated":
        return [_KINDS[rotated] for rotated in _rope_layers(config, count)]
    every = 0 if row.window_rule == "all" else _pattern(config, row)
    return [_KINDS[every > 0 and (layer + 1) % every == 0] for layer in range(count)]


def layer_windows(config: Mapping[str, Any], row: Architecture, kinds: Sequence[str]) -> tuple[int, ...]:
    """Tokens that each layer attends to, itself included; 0: all.

    Raises:
        CheckpointError: a value makes no sense.
    """
    window = config.get("sliding_window") if "sliding_window" in row.reads else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise CheckpointError(f"{_WHERE}: 'sliding_window' is {window!r}; expected a number of tokens.")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


def _pattern(config: Mapping[str, Any], row: Architecture) -> int:
    """Of so many layers the last attends to everything; 0: none does, where there is a window."""
    value = config.get("sliding_window_pattern", row.full_every)
    if isinstance(value, str) and value and set(value[:-1]) == {"L"} and value[-1] == "G":
        return len(value)  # EXAONE's "LLLG"
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1024:
        raise CheckpointError(
            f"{_WHERE}: 'sliding_window_pattern' is {value!r:.80}; expected a number of layers."
        )
    return value


def layer_heads(
    config: Mapping[str, Any], windows: Sequence[int], kv_heads: int, head_dim: int
) -> list[tuple[int, int]]:
    """(KV heads, head size) of each layer; in some families those of full attention have their own.

    Raises:
        UnsupportedError: something else differs from layer to layer.
        CheckpointError: a value makes no sense.
    """
    own = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if "per_layer_config" not in config:
        wide = {**own, "head_dim": config.get("global_head_dim", head_dim)}
        layers = [own if window else wide for window in windows]
    else:
        table = require(dict(config), "per_layer_config", dict, _WHERE, CheckpointError)
        if not all(key.isdecimal() and isinstance(value, dict) for key, value in table.items()):
            raise CheckpointError(f"{_WHERE}: 'per_layer_config' is not an object of layers' objects.")
        changed = {int(key): value for key, value in table.items()}  # "05" in a model of ten layers
        layers = [{**own, **changed.get(layer, {})} for layer in range(len(windows))]
    for layer in layers:
        reject_unknown(layer, own, f"{_WHERE}: per_layer_config", UnsupportedError)
    return [
        (
            require(layer, "num_key_value_heads", int, _WHERE, CheckpointError),
            require(layer, "head_dim", int, _WHERE, CheckpointError),
        )
        for layer in layers
    ]


def cache_owners(windows: Sequence[int], shared: int) -> list[int]:
    """Whose keys and values each layer reads; -1: its own.

    The last `shared` layers read those of the last layer before them with the same kind of attention.

    Raises:
        CheckpointError: there is none, or `shared` makes no sense.
    """
    if shared < 0:
        raise CheckpointError(f"{_WHERE}: 'num_kv_shared_layers' is {shared}; expected none or more.")
    first = len(windows) - shared
    owners = [-1] * len(windows)
    for layer in range(max(first, 0), len(windows)):
        alike = [other for other in range(first) if windows[other] == windows[layer]]
        if not alike:
            raise CheckpointError(f"{_WHERE}: layer {layer} has no layer before {first} to share keys with.")
        owners[layer] = alike[-1]
    return owners


def layer_rotations(
    config: Mapping[str, Any], row: Architecture, head_dims: Sequence[int], kinds: Sequence[str]
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """The distinct rotations, and each layer's among them; -1: none.

    Raises:
        UnsupportedError: a rope type, or a value of one, is not known.
        CheckpointError: a value makes no sense.
    """
    nope = "position_embedding_type" in row.reads and config.get("position_embedding_type") != "rope"
    if row.model.get("position_table") or nope:
        return (), (-1,) * len(kinds)
    positions = config["max_position_embeddings"]
    extra = _EXTRA.get(row.name, ()) + tuple(key for key in row.reads if key == "partial_rotary_factor")
    section = rope_section(config)
    sizes = dict(zip(kinds, head_dims, strict=True))  # layers of a kind have heads of one size
    by_kind = {
        kind: replace(rope_from_section(part, sizes[kind], positions, extra), **row.rope)
        for kind, part in _sections(config, row, section).items()
        if kind in sizes
    }
    ropes = tuple(dict.fromkeys(by_kind[kind] for kind in _KINDS if kind in kinds))
    rotated = _rotated(config, row, kinds)
    return ropes, tuple(
        ropes.index(by_kind[kind]) if here else -1 for kind, here in zip(kinds, rotated, strict=True)
    )


def _sections(
    config: Mapping[str, Any], row: Architecture, section: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Those of layers with a window, and of the others."""
    if row.rope_kinds and all(isinstance(section.get(kind), dict) for kind in _KINDS):
        return {kind: section[kind] for kind in _KINDS}
    if "per_layer_config" in row.reads:
        raise UnsupportedError(f"{_WHERE}: 'rope_parameters' must tell of {' and '.join(_KINDS)}.")
    sliding = section
    if "rope_local_base_freq" in row.reads:  # older Gemma 3: only full attention is scaled
        sliding = {"rope_theta": config["rope_local_base_freq"]}
    if row.name == "olmo3":
        sliding = {"rope_theta": section.get("rope_theta", 10000.0)}
    return {"sliding_attention": sliding, "full_attention": section}


def _rotated(config: Mapping[str, Any], row: Architecture, kinds: Sequence[str]) -> list[bool]:
    if row.rope_on and not (row.rope_on == "windows_if_any" and config.get("sliding_window") is None):
        return [kind == "sliding_attention" for kind in kinds]
    return _rope_layers(config, len(kinds)) if "no_rope_layers" in row.reads else [True] * len(kinds)


def _rope_layers(config: Mapping[str, Any], count: int) -> list[bool]:
    """Whether a layer is rotated, as SmolLM3's config says it."""
    given, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval")
    if given is None and isinstance(every, int) and every > 0:
        return [(layer + 1) % every != 0 for layer in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise CheckpointError(f"{_WHERE}: 'no_rope_layers' is {given!r:.80}; expected one number per layer.")
    return [bool(here) for here in given]
