"""Steps of attention that together meet everything that the kernels can do.

Each setup is a kind of node; each of its steps is one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagelet.plugins.kernels.variant import AttentionVariant


@dataclass(frozen=True)
class Span:
    """One sequence of a step: tokens in the cache, and new rows; of padding, one row and no blocks."""

    past: int
    rows: int
    padding: bool = False


PAD = Span(0, 1, padding=True)


@dataclass(frozen=True)
class StepKind:
    """A batch.

    Attributes:
        tree: rows have random ancestors.
        before: elements of the device's pool before the first that is used.
    """

    spans: tuple[Span, ...]
    tree: bool = False
    before: int = 0


def _of(*sequences: tuple[int, int] | Span) -> tuple[Span, ...]:
    return tuple(each if isinstance(each, Span) else Span(*each) for each in sequences)


STEPS = {
    # Ragged chunks of several tiles of rows, some with a past.
    "prefill": StepKind(_of((33, 70), PAD, (0, 37), (200, 9))),
    "decode": StepKind(_of((299, 1), (0, 1), PAD, (47, 1), (130, 1))),
    # Few rows per sequence: what verifies a chain of guesses. Split over keys as decoding is.
    "verify": StepKind(_of((100, 5), (33, 8), (0, 3))),
    # As many parts of the keys as there can be.
    "splits": StepKind(_of((8200, 1), (3000, 1))),
    # More sequences than the 32 that a kernel looks at together.
    "many": StepKind(_of(*((7 * i, 1) for i in range(38)), PAD, PAD)),
    "tree": StepKind(_of((90, 9), PAD, (40, 6)), tree=True),
    "wide tree": StepKind(_of((60, 40), (5, 64)), tree=True),
    # 32 bits do not hold the place of an element.
    "far": StepKind(_of((299, 1), (47, 1)), before=1 << 31),
}


@dataclass(frozen=True)
class Case:
    """A step of a node.

    Attributes:
        name: "SETUP/STEP".
    """

    name: str
    variant: AttentionVariant
    kind: StepKind

    @property
    def first_block(self) -> int:
        """The block of the device's pool that is the first of the arrays' pool."""
        variant = self.variant
        per_block = variant.block_size * variant.kv_num_heads * variant.head_dim
        return -(-self.kind.before // per_block)


def _node(heads: int, kv_heads: int, head_dim: int, block_size: int = 32, **changes: Any) -> AttentionVariant:
    return AttentionVariant(heads, kv_heads, head_dim, block_size, **({"rotary_dim": head_dim} | changes))


# Heads are those of the models' layers, divided: their ratio and their size choose a kernel.
_SETUPS: dict[str, tuple[AttentionVariant, str]] = {
    "llama f16": (_node(8, 2, 64), "prefill decode verify splits many"),
    "llama int8": (_node(8, 2, 64, cache="int8"), "prefill decode splits tree far"),
    "llama fp8": (_node(8, 2, 64, cache="fp8"), "prefill decode splits wide_tree"),
    "llama bf16": (_node(8, 2, 64, activation="bf16"), "prefill decode tree"),
    # Qwen3: norms of queries and keys.
    "qwen3 int8": (_node(8, 2, 128, cache="int8", q_norm=True, k_norm=True), "prefill decode"),
    "qwen2 7 heads": (_node(14, 2, 128, activation="bf16"), "prefill decode verify"),
    "glm 16 heads": (
        _node(16, 1, 128, activation="bf16", cache="fp8", rotary_dim=64, rotary_interleaved=True),
        "prefill decode tree wide_tree",
    ),
    "phi 80 unpacked": (_node(4, 4, 80, rotary_dim=32, packed=False), "prefill decode"),
    "phi3 96": (_node(4, 4, 96, activation="bf16", cache="int8", local_window_size=90), "prefill decode"),
    "gemma2": (_node(4, 2, 256, scale=0.0625, softcap=50.0, local_window_size=64), "prefill decode"),
    "gemma3": (
        _node(4, 2, 256, activation="bf16", local_window_size=100, q_norm=True, k_norm=True),
        "prefill decode wide_tree",
    ),
    "gemma3n int8": (
        _node(4, 2, 256, cache="int8", scale=0.1, q_norm=True, k_norm=True, norm_values=True),
        "prefill decode tree",
    ),
    "gpt-oss": (
        _node(16, 2, 64, activation="bf16", cache="fp8", sinks=True, local_window_size=48),
        "prefill decode many",
    ),
    "sinks f16": (_node(8, 2, 64, sinks=True), "prefill decode"),
    "hunyuan": (_node(8, 2, 128, q_norm=True, k_norm=True, norm_after_rotation=True), "prefill decode"),
    "reader": (_node(8, 2, 128, writes=False, local_window_size=70), "prefill decode"),
    "reader int8": (_node(8, 2, 64, cache="int8", writes=False), "prefill tree"),
    "window trees": (_node(16, 1, 64, local_window_size=50), "tree wide_tree"),
    "heads of 512": (_node(4, 1, 512, rotary_dim=128), "prefill decode"),
    "no rotation": (_node(8, 2, 128, rotary_dim=0, softcap=30.0), "prefill decode"),
    "blocks of 16": (_node(8, 2, 128, 16), "prefill decode"),
    "blocks of 48": (_node(8, 2, 96, 48, cache="int8"), "prefill decode"),
}

CASES = tuple(
    Case(f"{setup}/{step}", variant, STEPS[step])
    for setup, (variant, steps) in _SETUPS.items()
    for step in (name.replace("_", " ") for name in steps.split())
)
