"""NumPy reference of the `Experts` op: the oracle of what the op computes, with no speed.

Inputs of the node, by position: `input` f32 [T, K], `router_logits` f32 [T, E], `gate_up` and `down` uint8
(the packed weights of all experts, one after another: of each a gated `Linear` of 2 · intermediate outputs,
and a `Linear` back to K), and the optional `gate_up_bias` f32 [E, 2 · intermediate], `down_bias` f32 [E, K],
`norm_weight` f32 [K] (RMSNorm of the input) and `residual` f32 [T, K]. Attributes: `num_experts`, `top_k`,
`routing`, `normalize` (0), `in_features`, `intermediate`, `weight_type`, `group_size` and `asymmetric` with
the prefixes `gate_up_` and `down_`, `activation` (silu) and its parameters, `epsilon` (1e-5), `output_scale`
(1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagelet.plugins.activations import Activation

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Layer = Callable[[Float32], npt.NDArray[Any]]

ROUTINGS = ("softmax_topk", "topk_softmax")
MAX_EXPERTS = 1024


def routing_weights(
    router_logits: npt.NDArray[Any], top_k: int, routing: str, normalize: bool = False
) -> Float64:
    """The weight of every expert for every row, [T, E], 0 of those that a row does not go to.

    A row goes to its `top_k` largest logits, of equal ones the first. `softmax_topk` takes the weights from a
    softmax over all experts, which `normalize` divides by their sum (Mixtral, Qwen3-MoE with norm_topk_prob);
    `topk_softmax` from a softmax over the chosen ones (GPT-OSS). A NaN makes all of its row NaN.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing is {routing!r}, expected one of {', '.join(ROUTINGS)}")
    logits = router_logits.astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    over_all = routing == "softmax_topk" and not normalize
    total = np.where(chosen | over_all, exponentials, 0).sum(axis=1, keepdims=True)
    weights: Float64 = np.where(chosen, exponentials / total, 0)
    weights[np.isnan(exponentials).any(axis=1)] = np.nan
    return weights


def experts_reference(
    x: Float32,
    weights: Float64,
    gate_up: Sequence[Layer],
    down: Sequence[Layer],
    activation: Activation,
    output_scale: float = 1.0,
    residual: Float32 | None = None,
) -> Float64:
    """output_scale · Σ weights · expert(x) + residual, [T, K].

    Args:
        x: [T, K], already normed where the layer norms.
        weights: [T, E] of `routing_weights`.
        gate_up: of each expert, rows [n, K] to [n, 2 · intermediate], the gates first, bias included.
        down: of each expert, rows [n, intermediate] to [n, K].
        activation: of the gates.
    """
    total = np.zeros(x.shape)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        rows = np.flatnonzero(weights[:, expert] != 0)
        gate, up = np.split(first(x[rows]), 2, axis=1)
        hidden = activation.gate(gate, up).astype(np.float32)
        total[rows] += weights[rows, expert, None] * second(hidden)
    return output_scale * total + (0 if residual is None else residual)
