"""What a set of attention kernels is compiled for: the attributes of a node, and the tiles that suit them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

ACTIVATIONS = {"f16": "fp16", "bf16": "bf16"}  # our name: Triton's
# FP8 travels as its bits: GPUs before SM 89 cannot convert it, and integer arithmetic costs as little.
CACHES = {"f16": "fp16", "int8": "i8", "fp8": "u8"}
LARGEST_GROUP = 16  # query heads per KV head
HEAD_DIM_STEP, LARGEST_HEAD_DIM = 16, 512
HEADS_PER_PROGRAM = 8  # of prepare
MAX_SPLITS = 32  # parts of a sequence's keys that decode reduces side by side

_MODULES = {"prepare": "prepare", "attend": "attention", "merge": "merge"}
Constant = int | float | bool | str


# Counts changes of what the kernels' arguments mean: bundles keep kernels of the revision that made them, and
# a launch plan of another one finds none of them instead of giving them the wrong numbers.
REVISION = 1


@dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel.

    Attributes:
        function: a ``@triton.jit`` function: ``prepare``, ``attend`` or ``merge``.
        role: what a step uses it for: ``prepare``, ``prefill``, ``prefill_tree``, ``decode``,
            ``decode_tree`` or ``merge``.
        arguments: names and Triton types (``*fp16``, ``i32``) in the function's order.
        constants: the function's constexprs by name.
        warps: of 32 threads, per program.
        stages: of the software pipeline that loads keys and values.
    """

    function: str
    role: str
    arguments: tuple[tuple[str, str], ...]
    constants: Mapping[str, Constant]
    warps: int
    stages: int

    @property
    def module(self) -> str:
        """Where the function is."""
        return f"pagelet.plugins.kernels.{_MODULES[self.function]}"

    @cached_property
    def key(self) -> str:
        """A name that two kernels share exactly if everything about them is equal."""
        constants = dict(self.constants)
        content = [REVISION, self.function, self.role, self.arguments, constants, self.warps, self.stages]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{self.role}_{digest[:16]}"


@dataclass(frozen=True)
class AttentionVariant:
    """The attributes of a ``PagedAttention`` node, and which of the optional inputs it has.

    Attributes:
        num_heads, kv_num_heads: at most 16 query heads share a KV head.
        head_dim: elements of a head, a multiple of 16, at most 512.
        block_size: tokens in a block of the cache. Any: powers of two from 16 load whole tiles of keys
            through one entry of the block table where a tile fits into a block, others an entry per key.
        activation: ``f16`` or ``bf16``: queries, keys, values and the output.
        cache: ``f16``, ``int8`` or ``fp8``.
        scale: of the scores; 0 means ``1 / sqrt(head_dim)``.
        softcap: 0 means none.
        local_window_size: keys that a row sees, itself included; -1 or 0 means all.
        rotary_dim: leading elements that are rotated; 0 means none.
        writes: whether the node writes the cache, or reads what another layer wrote.
        packed: whether ``query`` holds keys and values too; False if they are inputs of their own.
        q_norm, k_norm, sinks: whether there are the inputs ``q_norm_weight``, ``k_norm_weight``,
            ``head_sink``.

    Raises:
        ValueError: there is no kernel for it.
    """

    num_heads: int
    kv_num_heads: int
    head_dim: int
    block_size: int
    activation: str = "f16"
    cache: str = "f16"
    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    norm_epsilon: float = 1e-6
    norm_after_rotation: bool = False
    norm_values: bool = False
    writes: bool = True
    packed: bool = True
    q_norm: bool = False
    k_norm: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("cache", self.cache, CACHES),
        ):
            if value not in known:
                raise ValueError(f"attention {name} {value!r} has no kernel; known: {', '.join(known)}.")
        if self.kv_num_heads < 1 or self.num_heads % self.kv_num_heads or self.num_heads < 1:
            raise ValueError(
                f"attention has {self.num_heads} heads and {self.kv_num_heads} KV heads, expected a multiple."
            )
        if self.group > LARGEST_GROUP:
            raise ValueError(f"{self.group} query heads share a KV head, expected at most {LARGEST_GROUP}.")
        if self.head_dim % HEAD_DIM_STEP or not 0 < self.head_dim <= LARGEST_HEAD_DIM:
            raise ValueError(
                f"attention heads have {self.head_dim} elements, expected a multiple of {HEAD_DIM_STEP}"
                f" and at most {LARGEST_HEAD_DIM}."
            )
        if self.block_size < 1:
            raise ValueError(f"blocks have {self.block_size} tokens, expected at least 1.")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"{self.rotary_dim} elements are rotated, expected an even number, at most {self.head_dim}."
            )

    @classmethod
    def of_node(cls, attributes: Mapping[str, int | float | str]) -> AttentionVariant:
        """From the attributes of a node, among them ``inputs``: the names of its inputs."""
        inputs = str(attributes["inputs"]).split()
        return cls(
            num_heads=int(attributes["num_heads"]),
            kv_num_heads=int(attributes["kv_num_heads"]),
            head_dim=int(attributes["head_dim"]),
            block_size=int(attributes["block_size"]),
            activation=str(attributes["activation"]),
            cache=str(attributes["cache"]),
            scale=float(attributes["scale"]),
            softcap=float(attributes["softcap"]),
            local_window_size=int(attributes["local_window_size"]),
            rotary_dim=int(attributes["rotary_dim"]),
            rotary_interleaved=bool(attributes["rotary_interleaved"]),
            norm_epsilon=float(attributes["norm_epsilon"]),
            norm_after_rotation=bool(attributes["norm_after_rotation"]),
            norm_values=bool(attributes["norm_values"]),
            writes=bool(attributes["writes"]),
            packed="key" not in inputs,
            q_norm="q_norm_weight" in inputs,
            k_norm="k_norm_weight" in inputs,
            sinks="head_sink" in inputs,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.kv_num_heads

    @property
    def scaled(self) -> bool:
        """Whether the cache has a scale per token and KV head."""
        return self.cache != "f16"

    def kernel(self, role: str) -> KernelSpec:
        """The kernel of a role."""
        return _kernels(self)[role]

    def kernels(self) -> tuple[KernelSpec, ...]:
        """All kernels that a step of this node may launch."""
        return tuple(_kernels(self).values())


@dataclass(frozen=True)
class Tile:
    """Rows (query tokens times the group's heads) and keys that a program of ``attend`` holds at once."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the padded head size: bounded by registers (255 for each thread, none spilled) and by 99 KiB of shared
# memory, what SM 86, 89 and 120 give a program. A fifth stage lets keys and values be copied one tile ahead:
# two go to the block table's entry that they wait for.
_SMALL = {size: Tile(64, 32, 4, 5) for size in (16, 32, 64)}
_PREFILL = _SMALL | {128: Tile(64, 32, 4, 5), 256: Tile(64, 16, 8, 5), 512: Tile(32, 16, 8, 3)}
_PREFILL_TREE = _SMALL | {128: Tile(32, 32, 4, 5), 256: Tile(32, 16, 4, 5), 512: Tile(32, 16, 8, 3)}
_DECODE = {size: Tile(32, 64, 4, 5) for size in (16, 32, 64)}
_DECODE |= {128: Tile(32, 32, 4, 5), 256: Tile(32, 16, 4, 5), 512: Tile(32, 16, 8, 3)}
_TILES = {"prefill": _PREFILL, "prefill_tree": _PREFILL_TREE, "decode": _DECODE, "decode_tree": _DECODE}


def tile_of(variant: AttentionVariant, role: str) -> Tile:
    """The tile of a node's kernel ``prefill``, ``prefill_tree``, ``decode`` or ``decode_tree``."""
    tile = _TILES[role][padded(variant.head_dim)]
    # Decode holds at least 5 tokens in 16 rows for small groups, 4 in 32 for the usual 4 to 8: so the rows
    # of a verification read the keys once or twice.
    rows = 16 if role.startswith("decode") and variant.group <= 3 else tile.rows
    # In half a tile that fits into a block, one entry of the block table serves all keys.
    fits = variant.block_size % tile.keys == 0 or variant.block_size % 32
    return replace(tile, rows=rows, keys=tile.keys if fits else min(tile.keys, 32))


def padded(size: int) -> int:
    """The next power of two, which Triton's tiles need."""
    return 1 << (size - 1).bit_length()


@lru_cache(maxsize=512)
def _kernels(variant: AttentionVariant) -> dict[str, KernelSpec]:
    specs = [_prepare(variant)]
    specs += [_attend(variant, role) for role in ("prefill", "prefill_tree", "decode", "decode_tree")]
    return {spec.role: spec for spec in [*specs, _merge(variant)]}


def _prepare(variant: AttentionVariant) -> KernelSpec:
    activation, cache = f"*{ACTIVATIONS[variant.activation]}", f"*{CACHES[variant.cache]}"
    heads, kv_heads = variant.num_heads, variant.kv_num_heads
    fused = heads + 2 * kv_heads if variant.writes and variant.packed else 0
    return KernelSpec(
        "prepare",
        "prepare",
        (
            ("query", activation),
            ("key", activation),
            ("value", activation),
            ("key_cache", cache),
            ("value_cache", cache),
            ("key_scale_cache", "*fp32"),
            ("value_scale_cache", "*fp32"),
            ("cumulative_sequence_length", "*i32"),
            ("past_seqlens", "*i32"),
            ("block_table", "*i32"),
            ("position_ids", "*i64"),
            ("cos_cache", "*fp32"),
            ("sin_cache", "*fp32"),
            ("q_norm_weight", "*fp32"),
            ("k_norm_weight", "*fp32"),
            ("prepared_query", activation),
            ("sequences", "i32"),
            ("table_width", "i32"),
        ),
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": variant.head_dim,
            "BLOCK_D": padded(variant.head_dim),
            "BLOCK_H": HEADS_PER_PROGRAM,
            "BLOCK_SIZE": variant.block_size,
            "QUERY_STRIDE": (fused or heads) * variant.head_dim,
            "KEY_STRIDE": (fused or kv_heads) * variant.head_dim,
            "ROTARY_DIM": variant.rotary_dim,
            "INTERLEAVED": variant.rotary_interleaved,
            "Q_NORM": variant.q_norm,
            "K_NORM": variant.k_norm,
            "EPSILON": _float32(variant.norm_epsilon),
            "NORM_AFTER_ROTATION": variant.norm_after_rotation,
            "NORM_VALUES": variant.norm_values,
            "CACHE": variant.cache,
        },
        warps=max(1, padded(variant.head_dim) // 64),  # 16 elements for each thread
        stages=1,
    )


def _attend(variant: AttentionVariant, role: str) -> KernelSpec:
    activation, cache = f"*{ACTIVATIONS[variant.activation]}", f"*{CACHES[variant.cache]}"
    tile, decode = tile_of(variant, role), role.startswith("decode")
    return KernelSpec(
        "attend",
        role,
        (
            ("prepared_query", activation),
            ("key_cache", cache),
            ("value_cache", cache),
            ("key_scale_cache", "*fp32"),
            ("value_scale_cache", "*fp32"),
            ("cumulative_sequence_length", "*i32"),
            ("past_seqlens", "*i32"),
            ("block_table", "*i32"),
            ("ancestor_mask", "*i32"),
            ("head_sink", "*fp32"),
            ("output", activation),
            ("partial_output", "*fp32"),
            ("partial_max", "*fp32"),
            ("partial_sum", "*fp32"),
            ("tokens", "i32"),
            ("sequences", "i32"),
            ("table_width", "i32"),
            ("mask_words", "i32"),
        ),
        {
            "HEADS": variant.num_heads,
            "KV_HEADS": variant.kv_num_heads,
            "HEAD_DIM": variant.head_dim,
            "BLOCK_D": padded(variant.head_dim),
            "BLOCK_SIZE": variant.block_size,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "SCALE": _float32(variant.scale or variant.head_dim**-0.5),
            "SOFTCAP": _float32(variant.softcap),
            "WINDOW": max(variant.local_window_size, 0),
            "SINKS": variant.sinks and not decode,  # merge adds a split row's
            "CACHE": variant.cache,
            "TREE": role.endswith("_tree"),
            "SPLIT": decode,
        },
        tile.warps,
        tile.stages,
    )


def _merge(variant: AttentionVariant) -> KernelSpec:
    return KernelSpec(
        "merge",
        "merge",
        (
            ("partial_output", "*fp32"),
            ("partial_max", "*fp32"),
            ("partial_sum", "*fp32"),
            ("head_sink", "*fp32"),
            ("output", f"*{ACTIVATIONS[variant.activation]}"),
            ("tokens", "i32"),
            ("splits", "i32"),
        ),
        {
            "HEADS": variant.num_heads,
            "HEAD_DIM": variant.head_dim,
            "BLOCK_D": padded(variant.head_dim),
            "MAX_SPLITS": MAX_SPLITS,
            "SINKS": variant.sinks,
        },
        warps=4,
        stages=1,
    )


def _float32(value: float) -> float:
    """As a node's attribute holds it, so that an exporter's and a runtime's kernels have the same key."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
