"""What the user asks of an export: one frozen value, checked at the edge."""

from dataclasses import dataclass

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.errors import InputError

WEIGHTS = ("int4", "fp32")
EMBEDDINGS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
TARGETS = ("cpu",)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `pagelet export`.

    Attributes:
        weights: storage of the linear weights.
        group_size: inputs that share a scale (int4).
        symmetric: no minimum per group (int4): smaller, and further from the original.
        embedding: storage of the embedding table and the head beside int4 weights. They lose most by
            rounding, so they have 8 bits by default.
        cache_type: storage of keys and values in the KV cache: "f32", "f16", "int8" or "fp8" (E4M3), the
            last two with a scale per token and KV head.
        max_context: tokens; None keeps the checkpoint's own.
        block_size: tokens per block of the KV cache.
        force: replace an existing bundle.

    Raises:
        InputError: a value that this version cannot serve.
    """

    weights: str = "int4"
    group_size: int = 32
    symmetric: bool = False
    embedding: str = "int8"
    target: str = "cpu"
    cache_type: str = "f16"
    max_context: int | None = None
    block_size: int = 32
    force: bool = False

    def __post_init__(self) -> None:
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("embedding", self.embedding, EMBEDDINGS)
        _one_of("group size", self.group_size, GROUP_SIZES)
        _one_of("target", self.target, TARGETS)
        _one_of("cache type", self.cache_type, tuple(CACHE_TYPES))
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max context is {self.max_context}; expected at least 1 token.")
        if not 1 <= self.block_size <= 4096:
            raise InputError(f"block size is {self.block_size}; expected 1 to 4096 tokens.")


def _one_of(what: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise InputError(f"{what} is {value!r}; this version serves {', '.join(map(str, known))}.")
