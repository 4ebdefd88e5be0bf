"""What a token costs in the KV cache: a row per cache type, and the one formula that everything uses."""

from dataclasses import dataclass

from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec


@dataclass(frozen=True)
class CacheType:
    """Storage of keys and values.

    Attributes:
        bytes_per_value: of one element.
        bytes_per_scale: of the scale that one token and head has beside its elements; 0 for none.
    """

    name: str
    bytes_per_value: int
    bytes_per_scale: int = 0


CACHE_TYPES = {
    row.name: row
    for row in (
        CacheType("f32", 4),
        CacheType("f16", 2),
        CacheType("int8", 1, 4),
        CacheType("fp8", 1, 4),
    )
}


def cache_type(name: str) -> CacheType:
    """The row of a cache type.

    Raises:
        UnsupportedError: lists the known ones.
    """
    if name not in CACHE_TYPES:
        raise UnsupportedError(f"cache type {name!r} is not known; known: {', '.join(CACHE_TYPES)}.")
    return CACHE_TYPES[name]


def cache_bytes_per_token(spec: ModelSpec, type_name: str) -> int:
    """Bytes of one token's keys and values in all layers.

    2 × layers × KV heads × (head size × bytes per value + bytes per scale): Kwon et al. 2023, section 3.
    """
    return sum(group_bytes_per_token(spec, type_name))


def group_bytes_per_token(spec: ModelSpec, type_name: str) -> tuple[int, ...]:
    """`cache_bytes_per_token` of the layers of each group in `spec.window_groups`."""
    sizes = [0] * len(spec.window_groups)
    for layer in spec.cache_owners:
        sizes[spec.group_of(layer)] += layer_bytes_per_token(spec, layer, type_name)
    return tuple(sizes)


def layer_bytes_per_token(spec: ModelSpec, layer: int, type_name: str) -> int:
    """Bytes of one token's keys and values as a layer reads them, its own or another's."""
    row, kind = cache_type(type_name), spec.layers[layer]
    return 2 * kind.num_kv_heads * (kind.head_dim * row.bytes_per_value + row.bytes_per_scale)
