"""Fields of `PagedAttention` nodes in TensorRT graphs."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table position_ids "
    "ancestor_mask",
    "num_heads": 4,
    "kv_num_heads": 2,
    "head_dim": 32,
    "block_size": 16,
    "activation": "f16",
    "cache": "f16",
    "scale": 0.25,
    "softcap": 0.0,
    "local_window_size": -1,
    "rotary_dim": 0,
    "rotary_interleaved": 0,
    "norm_epsilon": 1e-6,
    "norm_after_rotation": 0,
    "norm_values": 0,
    "writes": 1,
}
ROTATED = PLAIN | {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table cos_cache "
    "sin_cache position_ids ancestor_mask",
    "rotary_dim": 32,
}
EVERYTHING = PLAIN | {
    "inputs": "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table "
    "cos_cache sin_cache key_scale_cache value_scale_cache position_ids ancestor_mask q_norm_weight "
    "k_norm_weight head_sink",
    "activation": "bf16",
    "cache": "int8",
    "rotary_dim": 16,
    "local_window_size": 100,
}
FP8 = PLAIN | {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table "
    "key_scale_cache value_scale_cache position_ids ancestor_mask",
    "cache": "fp8",
}
