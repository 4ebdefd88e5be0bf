"""Decoding as a CUDA graph: it can be recorded, and what it computes follows the arrays on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagelet.plugins import reference
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools.gpu.cases import Case, Span, StepKind
from pagelet.tools.gpu.device import DeviceArrays, Gpu
from pagelet.tools.gpu.kernels import Placed, compare, device_inputs, place
from pagelet.tools.gpu.report import Figure, Row
from pagelet.tools.gpu.steps import Array, Step, build, reference_step, rounded, write_random

REPLAYS = 100
SEQUENCES = 4
LONGEST = 300  # tokens
VARIANT = AttentionVariant(8, 2, 64, 32, cache="int8", rotary_dim=64)
# The longest sequences that there are: so the pool has blocks for all, and the tables their width.
CASE = Case("graph", VARIANT, StepKind((Span(LONGEST - 1, 1),) * SEQUENCES))


def check_graph(gpu: Gpu, replays: int = REPLAYS) -> Row:
    """Record one decoding step, launch it for steps of other lengths, blocks and tokens."""
    library, driver, stream = gpu.library, gpu.driver, gpu.stream
    rng = np.random.default_rng(1)
    step = build(CASE)
    worst, apart = 0.0, 0
    with gpu.memory() as memory:
        placed = place(memory, step)

        def run() -> None:
            library.run(VARIANT, step.shapes, placed.tensors, placed.workspace, stream)

        run()  # loads the kernels, which must not be recorded
        gpu.wait()
        driver.begin_capture(stream)
        try:
            run()
        except BaseException:
            driver.abandon_capture(stream)
            raise
        graph = driver.end_capture(stream)
        try:
            for index in range(replays):
                step = _other(step, rng)
                _send(memory, placed, step)
                driver.launch_graph(graph, stream)
                gpu.wait()
                expected_pool = {name: array.copy() for name, array in step.pool.items()}
                expected = reference_step(VARIANT, step.inputs, expected_pool)
                found = compare(step, placed.output(memory), placed.pool(memory), expected, expected_pool)
                if found.problems:
                    return Row("graph", "failed", f"replay {index}: {'; '.join(found.problems)}")
                worst, apart = max(worst, found.error_units), apart + found.codes_apart
        finally:
            driver.destroy_graph(graph)
    figures: dict[str, Figure] = {"replays": replays, "error_of_allowed": worst, "codes_apart": apart}
    detail = f"{replays} replays with other lengths, at most {worst:.0%} of what is allowed"
    return Row("graph", "ok", detail, figures=figures)


def _other(step: Step, rng: np.random.Generator) -> Step:
    """Sequences of other lengths in other blocks of the same pool, some of them padding; shapes stay."""
    inputs, size = dict(step.inputs), VARIANT.block_size
    past = rng.integers(0, LONGEST, SEQUENCES).astype(np.int32)
    width = step.shapes.table_width
    table = np.full((SEQUENCES, width), -1, np.int32)
    free = rng.permutation(len(step.pool["key_cache"]))
    padding = rng.random(SEQUENCES) < 0.2
    past[padding] = 0
    pool = {name: np.full_like(array, np.nan if array.dtype == np.float32 else 77)
            for name, array in step.pool.items()}  # fmt: skip
    for s in np.flatnonzero(~padding):
        count = int(past[s]) // size + 1
        table[s, :count], free = free[:count], free[count:]
        write_random(pool, reference.block_slots(table[s], np.arange(past[s]), size), rng)
    inputs |= {"past_seqlens": past, "block_table": table, "position_ids": past.astype(np.int64)}
    query: Array = rng.standard_normal(inputs["query"].shape, dtype=np.float32)
    inputs["query"] = rounded(query, VARIANT.activation)
    kept = ~padding
    new = reference.new_slots(np.arange(kept.sum() + 1), past[kept], table[kept], size)
    return replace(step, inputs=inputs, pool=pool, new_slots=new)


def _send(memory: DeviceArrays, placed: Placed, step: Step) -> None:
    """New contents into the arrays that the graph knows."""
    for name, array in device_inputs(VARIANT, step.inputs).items():
        memory.write(placed.tensors[name], array)
    for name, (pointer, _, _) in placed.places.items():
        memory.write(pointer, step.pool[name])
