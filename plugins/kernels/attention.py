# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The attention kernel: tiles of query rows over a paged cache, with an online softmax.

Rows are reduced as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), decode in parts of the keys side
by side as in Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    prepared_query,
    key_cache,
    value_cache,
    key_scale_cache,
    value_scale_cache,
    cumulative_sequence_length,
    past_seqlens,
    block_table,
    ancestor_mask,
    head_sink,
    output,
    partial_output,
    partial_max,
    partial_sum,
    tokens,
    sequences,
    table_width,
    mask_words,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CACHE: tl.constexpr,
    TREE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per tile of rows, KV head, and part of the keys, of a grid in this order.

    A tile's rows are tokens times the query heads of the KV head. Tiles of keys that all rows see are reduced
    without a mask; those at the edges of the window and of what is causal come last, with one.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    s = _sequence_of_tile(tile, cumulative_sequence_length, sequences, TOKENS)
    begin = tl.load(cumulative_sequence_length + s)
    rows = tl.load(cumulative_sequence_length + s + 1) - begin
    first = (tile - begin // TOKENS - s) * TOKENS
    if first >= rows:
        return
    past = tl.load(past_seqlens + s)
    table = block_table + s.to(tl.int64) * table_width

    # Keys from the first that any row may see to the last, in tiles; those from full_begin all rows see.
    after = first + tl.minimum(TOKENS, rows - first)  # the row behind the tile
    end = past + after
    if past == 0 and tl.load(table) < 0:
        end = 0  # a sequence without blocks: padding of the batch
    lowest_row = 0 if TREE else first  # a tree's row may have no ancestors, whatever its index
    key_begin = 0
    full_begin = 0
    if WINDOW > 0:
        key_begin = tl.maximum(past + lowest_row + 1 - WINDOW, 0) // BLOCK_N
        full_begin = tl.cdiv(tl.maximum(past + after - WINDOW, 0), BLOCK_N)
    key_end = tl.cdiv(end, BLOCK_N)
    full_end = (past if TREE else past + first + 1) // BLOCK_N
    part_tiles = tl.cdiv(tl.maximum(key_end - key_begin, 0), tl.num_programs(2))
    key_begin += tl.program_id(2) * part_tiles
    key_end = tl.maximum(tl.minimum(key_begin + part_tiles, key_end), key_begin)
    full_begin = tl.minimum(tl.maximum(full_begin, key_begin), key_end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), key_end)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    index = first + m // GROUP
    valid = (m < TOKENS * GROUP) & (index < rows)
    token = begin + index
    head = kv_head * GROUP + m % GROUP
    cells = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(prepared_query + cells, mask=inside, other=0.0)
    mask_row = ancestor_mask + token.to(tl.int64) * mask_words
    seen = index  # rows of the step that a row sees beside itself
    if TREE and WINDOW > 0:
        seen = _ancestors_before(mask_row, valid, index, mask_words)

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for t in tl.range(full_begin, full_end):
        key_row, exists = _locate(t, table, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, False)
        scores = _scores(
            query, key_cache, key_scale_cache, key_row, exists, HEAD_DIM, SCALE, SOFTCAP, CACHE, False
        )
        visible = exists[None, :]
        attended, peak, total = _reduce(
            scores,
            visible,
            attended,
            peak,
            total,
            value_cache,
            value_scale_cache,
            key_row,
            exists,
            query,
            HEAD_DIM,
            CACHE,
            False,
        )
    low = full_begin - key_begin
    for i in tl.range(0, low + key_end - full_end, num_stages=1):
        t = tl.where(i < low, key_begin + i, full_end + i - low)
        key_row, exists = _locate(t, table, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, True)
        scores = _scores(
            query, key_cache, key_scale_cache, key_row, exists, HEAD_DIM, SCALE, SOFTCAP, CACHE, True
        )
        visible = _visible(
            t * BLOCK_N - past, index, seen, mask_row, valid, mask_words, BLOCK_N, WINDOW, TREE
        )
        visible = visible & exists[None, :]
        attended, peak, total = _reduce(
            scores,
            visible,
            attended,
            peak,
            total,
            value_cache,
            value_scale_cache,
            key_row,
            exists,
            query,
            HEAD_DIM,
            CACHE,
            True,
        )

    if CACHE == "int8":
        attended *= 1.0 / 64  # what _reduce gave the weights
    if SPLIT:
        row = (tl.program_id(2) * tokens + token).to(tl.int64) * HEADS + head
        tl.store(partial_max + row, peak, mask=valid)
        tl.store(partial_sum + row, total, mask=valid)
        saw = inside & (total != 0)[:, None]
        tl.store(partial_output + row[:, None] * HEAD_DIM + d[None, :], attended, mask=saw)
    else:
        if SINKS:
            sink = tl.load(head_sink + head) * 1.4426950408889634
            new_peak = tl.maximum(peak, sink)
            factor = tl.exp2(peak - new_peak)
            attended *= factor[:, None]
            total = total * factor + tl.exp2(sink - new_peak)
        inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
        attended *= inverse[:, None]
        tl.store(output + cells, attended.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _sequence_of_tile(tile, cumulative_sequence_length, sequences, TOKENS: tl.constexpr):
    """The last sequence whose first tile, ``begin // TOKENS + s``, is not behind this one."""
    found = -1
    for start in range(0, sequences, 32):
        s = start + tl.arange(0, 32)
        begins = tl.load(cumulative_sequence_length + s, mask=s < sequences, other=0)
        found += tl.sum(((begins // TOKENS + s <= tile) & (s < sequences)).to(tl.int32), axis=0)
    return found


@triton.jit
def _locate(
    t,
    table,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of a tile of keys: rows ``slot * KV_HEADS + head`` of the cache, and what is there.

    Rows are valid everywhere: what is not mapped has one of block 0, which always exists.
    """
    position = t * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = position < end
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
        blocks = tl.full([BLOCK_N], tl.load(table + t * BLOCK_N // BLOCK_SIZE), tl.int32)
    elif MASKED:
        blocks = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
    else:
        blocks = tl.load(table + position // BLOCK_SIZE)
    exists = exists & (blocks >= 0)
    slot = tl.maximum(blocks, 0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    return slot * KV_HEADS + kv_head, exists


@triton.jit
def _load_codes(cache, rows, exists, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """``[BLOCK_N, BLOCK_D]`` as the cache holds it, 0 beyond the head and where nothing is."""
    d = tl.arange(0, BLOCK_D)
    pointers = cache + rows[:, None] * HEAD_DIM + d[None, :]
    if MASKED:
        return tl.load(pointers, mask=exists[:, None] & (d < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0)


@triton.jit
def _load_scales(scales, rows, exists, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(scales + rows, mask=exists, other=0.0)
    else:
        return tl.load(scales + rows)


@triton.jit
def decode_e4m3(codes):
    """float16 of 1/256 of the values of E4M3FN codes other than NaN, exactly.

    The bits of exponent and mantissa, put where float16 has its own, mean the same but for the exponent's
    bias, 15 instead of 7; subnormals too.
    """
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _scores(
    query,
    cache,
    scales,
    rows,
    exists,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scores ``[BLOCK_M, BLOCK_N]`` times log2(e), so that weights are powers of 2.

    A key's scale multiplies its column of scores, which costs less than its elements would.
    """
    codes = _load_codes(cache, rows, exists, HEAD_DIM, query.shape[1], MASKED)
    keys = (decode_e4m3(codes) if CACHE == "fp8" else codes).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys))
    factor: tl.constexpr = SCALE * (256.0 if CACHE == "fp8" else 1.0)
    LOG2_E: tl.constexpr = 1.4426950408889634
    unit: tl.constexpr = factor * LOG2_E if SOFTCAP == 0 else factor * 2 * LOG2_E / SOFTCAP
    if CACHE == "f16":
        scores *= unit
    else:
        scores *= (_load_scales(scales, rows, exists, MASKED) * unit)[None, :]
    if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2x))
        scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def _reduce(
    scores,
    visible,
    attended,
    peak,
    total,
    cache,
    scales,
    rows,
    exists,
    query,
    HEAD_DIM: tl.constexpr,
    CACHE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile's keys into the running output, largest score and sum of weights of each row.

    A value's scale multiplies its column of weights. They stay within float16: scales are at most 65504 / 127
    and times 64 here, or 65504 / 448 and times 256, which turns 1/256 of FP8 values into whole ones.
    """
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # a row that saw nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    attended *= shrink[:, None]
    sums = weights
    if CACHE != "f16":
        factor: tl.constexpr = 256.0 if CACHE == "fp8" else 64.0
        weights *= (_load_scales(scales, rows, exists, MASKED) * factor)[None, :]
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
    values = _load_codes(cache, rows, exists, HEAD_DIM, query.shape[1], MASKED)
    if CACHE == "fp8":
        values = decode_e4m3(values)
    elif CACHE == "f16" and MASKED:
        # A value that one row sees may not reach another as 0 × NaN: what is not finite leaves the product,
        # and makes the sum of weights of the rows that see it NaN.
        broken = (values.to(tl.int16, bitcast=True) & 0x7C00) == 0x7C00
        values = tl.where(broken, 0.0, values)
        broken_key = tl.max(broken.to(tl.int32), axis=1) > 0
        sums = tl.where(visible & broken_key[None, :], float("nan"), sums)
    total = total * shrink + tl.sum(sums, axis=1)
    attended = tl.dot(weights.to(query.dtype), values.to(query.dtype), attended)
    return attended, new_peak, total


@triton.jit
def _visible(
    begin,
    index,
    seen,
    mask_row,
    valid,
    mask_words,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):
    """Which rows see which keys of a tile, ``[BLOCK_M, BLOCK_N]``.

    Args:
        begin: of the tile, as a row of the step: negative in the past.
        index: of the rows in their sequence.
        seen: how many rows of the step a row sees beside itself.
    """
    j = begin + tl.arange(0, BLOCK_N)
    column = j[None, :]
    row = index[:, None]
    visible = column <= row
    if TREE:
        bits = tl.zeros(visible.shape, tl.int32)
        for w in range(tl.maximum(begin, 0) // 32, tl.minimum(tl.cdiv(begin + BLOCK_N, 32), mask_words)):
            word = tl.load(mask_row + w, mask=valid, other=0)[:, None]
            bit = column - 32 * w
            bits |= tl.where((bit >= 0) & (bit < 32), word >> tl.minimum(tl.maximum(bit, 0), 31), 0)
        visible = (column < 0) | (column == row) | ((column < row) & ((bits & 1) != 0))
        if WINDOW > 0:  # it counts what a row sees: the past, then its ancestors, then itself
            before = tl.zeros(visible.shape, tl.int32)
            for w in range(mask_words):
                word = tl.load(mask_row + w, mask=valid, other=0).to(tl.uint32, bitcast=True)
                before += _ones(word[:, None] & _ones_below(j - 32 * w)[None, :])
            rank = tl.where(column < 0, column, tl.where(column == row, seen[:, None], before))
            visible = visible & (rank > seen[:, None] - WINDOW)
    elif WINDOW > 0:
        visible = visible & (column > row - WINDOW)
    return visible


@triton.jit
def _ancestors_before(mask_row, valid, index, mask_words):
    """How many of the rows before it each row sees, by its mask."""
    count = tl.zeros(index.shape, tl.int32)
    for w in range(mask_words):
        word = tl.load(mask_row + w, mask=valid, other=0).to(tl.uint32, bitcast=True)
        count += _ones(word & _ones_below(index - 32 * w))
    return count


@triton.jit
def _ones_below(n):
    """uint32 with the lowest n bits set; n may be anything."""
    one = tl.full(n.shape, 1, tl.uint32)
    some = (one << tl.minimum(tl.maximum(n, 0), 31).to(tl.uint32)) - 1
    return tl.where(n >= 32, 0xFFFFFFFF, some)


@triton.jit
def _ones(x):
    """How many bits of a uint32 are set: sums of neighbours, twice as wide each time."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)
