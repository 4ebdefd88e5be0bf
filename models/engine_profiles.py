"""The shapes that an engine is built for: a profile for decoding and verification, one for prefill chunks."""

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.spec import ModelSpec
from pagelet.models.targets import GpuSettings

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Of each input: the smallest, the usual and the largest shape."""

_MOST_ELEMENTS = 2**31 - 1  # of one tensor
_USUAL_BLOCKS = 64  # of one sequence


def engine_profiles(
    spec: ModelSpec, cache_type: str, block_size: int, gpu: GpuSettings
) -> tuple[Profile, Profile]:
    """(decode, prefill), for the inputs that `exporter.graph.build_graph` describes."""
    sequences, rows = gpu.max_sequences, min(gpu.logits_rows, gpu.decode_tokens)
    return (
        _profile(spec, cache_type, block_size, sequences, (1, 1, gpu.decode_tokens), (1, 1, rows)),
        _profile(
            spec, cache_type, block_size, sequences, (1, gpu.step_tokens, gpu.step_tokens),
            (1, 1, gpu.logits_rows),
        ),
    )  # fmt: skip


def _profile(
    spec: ModelSpec, cache_type: str, block_size: int, sequences: int, tokens: Shape, rows: Shape
) -> Profile:
    width = -(-spec.max_context // block_size)
    usual = min(width, _USUAL_BLOCKS)

    def each(sizes: Shape) -> tuple[Shape, Shape, Shape]:
        least, common, most = sizes
        return (least,), (common,), (most,)

    found = {
        "input_ids": each(tokens),
        "position_ids": each(tokens),
        "cumulative_sequence_length": each((2, 2, sequences + 1)),
        "past_seqlens": each((1, 1, sequences)),
        # A bit for each row of the longest sequence: prompts may be read beside a tree.
        "ancestor_mask": ((0, 0), (0, 0), (tokens[2], -(-tokens[2] // 32))),
        "logits_indices": each(rows),
    }
    for group in range(len(spec.window_groups)):
        found[f"block_table_{group}"] = (1, 1), (1, usual), (sequences, width)
    for layer in spec.cache_owners:
        heads, size = spec.layers[layer].num_kv_heads, spec.layers[layer].head_dim
        most = _MOST_ELEMENTS // (block_size * heads * size)
        for kind in ("key", "value"):
            found[f"{kind}_cache.{layer}"] = _blocks((block_size, heads, size), usual, most)
            if CACHE_TYPES[cache_type].bytes_per_scale:
                found[f"{kind}_scale_cache.{layer}"] = _blocks((block_size, heads), usual, most)
    return found


def _blocks(shape: Shape, usual: int, most: int) -> tuple[Shape, Shape, Shape]:
    return (1, *shape), (min(usual, most), *shape), (most, *shape)
