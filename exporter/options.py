"""What the user asks of an export: one frozen value, checked at the edge."""

from dataclasses import dataclass

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.errors import InputError

WEIGHTS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")
EMBEDDINGS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
GROUPED = {"int4": 32, "int8": 32, "fp8": 0}
"""Weight types with scales, and how many inputs share one by default; 0: all inputs of an output."""
TARGETS = ("cpu",)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `pagelet export`.

    Attributes:
        weights: storage of the linear weights; "fp8" is E4M3.
        group_size: inputs that share a scale (int4, int8, fp8); None: the type's own default (GROUPED), or
            an FP8 checkpoint's own.
        symmetric: no minimum per group (int4): smaller, and further from the original.
        embedding: storage of the embedding table and the head beside int4 weights. They lose most by
            rounding, so they have 8 bits by default; beside fp8 weights they have 16.
        cache_type: storage of keys and values in the KV cache: "f32", "f16", "int8" or "fp8" (E4M3), the
            last two with a scale per token and KV head.
        max_context: tokens; None keeps the checkpoint's own.
        layers: only the first so many, with an early exit's norm and head where the checkpoint has them: a
            draft of the model for itself.
        block_size: tokens per block of the KV cache.
        force: replace an existing bundle.

    Raises:
        InputError: a value that this version cannot serve.
    """

    weights: str = "int4"
    group_size: int | None = None
    symmetric: bool = False
    embedding: str = "int8"
    target: str = "cpu"
    cache_type: str = "f16"
    max_context: int | None = None
    layers: int | None = None
    block_size: int = 32
    force: bool = False

    def __post_init__(self) -> None:
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("embedding", self.embedding, EMBEDDINGS)
        if self.group_size is not None:
            if self.weights not in GROUPED:
                raise InputError(
                    f"a group size belongs to {', '.join(GROUPED)} weights, not to {self.weights}: "
                    "leave it out."
                )
            _one_of("group size", self.group_size, GROUP_SIZES)
        _one_of("target", self.target, TARGETS)
        _one_of("cache type", self.cache_type, tuple(CACHE_TYPES))
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max context is {self.max_context}; expected at least 1 token.")
        if self.layers is not None and self.layers < 1:
            raise InputError(f"layers is {self.layers}; expected at least 1.")
        if not 1 <= self.block_size <= 4096:
            raise InputError(f"block size is {self.block_size}; expected 1 to 4096 tokens.")

    @property
    def inputs_per_scale(self) -> int:
        """`group_size`, or the default of the weight type; 0: all inputs of an output share one, or none."""
        return GROUPED.get(self.weights, 0) if self.group_size is None else self.group_size


def _one_of(what: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise InputError(f"{what} is {value!r}; this version serves {', '.join(map(str, known))}.")
