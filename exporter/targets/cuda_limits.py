"""What ONNX Runtime's CUDA PagedAttention cannot do, of what our own attention can.

By its sources, as `targets.cuda` names them: paged_attention_helper.h (CheckInputs, CheckKVCache) and, for
CheckRotaryCaches, group_query_attention_helper.h beside it; paged_attention.cc for what each kernel serves.
"""

from pagelet.exporter.graph_attention import CacheFormat
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec

# Heads beyond this have no FlashAttention, and the kernels that remain know no sinks in a prefill.
_FLASH_HEAD_DIM = 256


def cuda_obstacles(spec: ModelSpec, cache: CacheFormat) -> list[str]:
    """What ONNX Runtime's CUDA ops cannot do of a model and its cache; nothing where all is well."""
    attention, found = spec.attention, []
    if any(layer.experts for layer in spec.layers):
        found.append("it has mixtures of experts, which GPU targets do not compute yet")
    if attention.norm_after_rotation:
        found.append("its queries and keys are normed after they are rotated; the op norms them before")
    if cache.type == "f32":
        found.append("its cache would hold float32; the op takes f16, int8 and fp8")
    for head_dim, rotary_dim in sorted(_rotated_heads(spec)):
        if head_dim % 16 or rotary_dim % 16:
            found.append(
                f"{rotary_dim} of {head_dim} elements of its heads are rotated; the op wants multiples of 16"
            )
    largest = max(layer.head_dim for layer in spec.layers)
    if attention.sinks and largest > _FLASH_HEAD_DIM:
        found.append(
            f"its heads have sinks and {largest} elements; with sinks the op takes up to {_FLASH_HEAD_DIM}"
        )
    smallest = min(layer.head_dim for layer in spec.layers)
    least = _least_block(smallest) if cache.type == "f16" else 16
    if cache.block_size < least or cache.block_size & (cache.block_size - 1):
        found.append(
            f"its cache has blocks of {cache.block_size} tokens; with heads of {smallest} elements in "
            f"{cache.type} the op wants a power of two, {least} at least"
        )
    return found


def refuse_obstacles(spec: ModelSpec, cache: CacheFormat) -> None:
    """Before any work is done.

    Raises:
        UnsupportedError: names all that stands in the way.
    """
    if found := cuda_obstacles(spec, cache):
        raise UnsupportedError(
            f"{spec.architecture} cannot be exported for the target cuda: {'; '.join(found)}. The target cpu "
            "serves it."
        )


def _rotated_heads(spec: ModelSpec) -> set[tuple[int, int]]:
    return {(layer.head_dim, spec.ropes[layer.rope].rotary_dim) for layer in spec.layers if layer.rope >= 0}


def _least_block(head_dim: int) -> int:
    """Tokens that FlashAttention reads at once; without it each prefill would copy its whole context."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
