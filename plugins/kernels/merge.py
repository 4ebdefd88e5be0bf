# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The kernel after split attention: one result from the parts of a row's keys."""

import triton
import triton.language as tl


@triton.jit
def merge(
    partial_output,
    partial_max,
    partial_sum,
    head_sink,
    output,
    tokens,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per token and head, of a grid ``[T, HEADS]``.

    Reads what `attend` leaves per part: unnormalized outputs ``[splits, T, HEADS, HEAD_DIM]``, the largest
    score in base 2 and the sum of weights ``[splits, T, HEADS]``. A part with the sum 0 saw nothing, and left
    no output. A row that saw nothing at all becomes 0.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, BLOCK_D)
    rows = (part * tokens + token).to(tl.int64) * HEADS + head
    sums = tl.load(partial_sum + rows, mask=part < splits, other=0.0)
    saw = sums != 0
    peaks = tl.load(partial_max + rows, mask=saw, other=-float("inf"))
    peak = tl.max(peaks, axis=0)
    if SINKS:
        sink = tl.load(head_sink + head) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.where(saw, tl.exp2(peaks - base), 0.0)
    total = tl.sum(sums * weights, axis=0)
    if SINKS:
        total += tl.exp2(sink - base)
    outputs = tl.load(
        partial_output + rows[:, None] * HEAD_DIM + d[None, :],
        mask=saw[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(outputs * weights[:, None], axis=0)
    merged = tl.where(total == 0, 0.0, merged / tl.where(total == 0, 1.0, total))
    target = output + (token.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    tl.store(target, merged.to(output.dtype.element_ty), mask=d < HEAD_DIM)
