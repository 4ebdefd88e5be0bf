"""Each case on the GPU, beside the NumPy reference: its output, and what lies in the cache afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.plugins.kernels.launch_plan import workspace_bytes
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools.gpu.cases import Case
from pagelet.tools.gpu.device import DeviceArrays, Gpu
from pagelet.tools.gpu.report import Figure, Row
from pagelet.tools.gpu.steps import POOL, SCALES, Arrays, Step, as_activation, as_float, build, reference_step

Array = NDArray[Any]

# Unit roundoff. Rotated queries, the softmax's weights and outputs are rounded to the activations' type; with
# bf16 what an f16 cache holds is too. Each moves an element by about a unit of the terms that are summed, and
# so of its head's root mean square: what is allowed is relative to that, however many keys there are. Of it
# Triton's interpreter, which rounds as GPUs do, uses up 0.6 over these cases.
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8}
OF_ELEMENT, OF_HEAD = 3, 8  # units
# A norm sums in another order, and a rotation's product and sum may be fused: that moves what is written by
# an ulp or two of float32, and a code by one step if it lay next to a tie. The odds are the error over the
# step, 2^-22 / 2^-11 for f16 and fewer for others, more for what cancelled; ten times that is allowed.
CODES_APART = 0.005
SCALE_ERROR = 1e-6
_CANCELLED = 2.0**-21  # of a head's largest element: error of one that is nearly 0, whose own step is finer
_ACTIVATIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Comparison:
    """Of one step.

    Attributes:
        problems: what is wrong, a sentence each; none if nothing is.
        max_error: of the output, absolute.
        error_units: the largest error over what is allowed: below 1 it is right.
        codes, codes_apart: elements that were written into the caches, and those one step from the reference.
    """

    problems: tuple[str, ...]
    max_error: float
    error_units: float
    codes: int
    codes_apart: int


def check_case(gpu: Gpu, case: Case) -> Row:
    """Run a case and compare it."""
    step = build(case)
    needed = case.first_block * block_bytes(case.variant)
    if needed > (free := gpu.driver.free_memory()) // 2:
        detail = f"its pool begins behind {needed >> 20} MiB, and {free >> 20} MiB are free"
        return Row(f"kernels/{case.name}", "skipped", detail)
    library = gpu.library
    expected_pool = {name: array.copy() for name, array in step.pool.items()}
    expected = reference_step(step.variant, step.inputs, expected_pool)
    with gpu.memory() as memory:
        placed = place(memory, step, case.first_block)
        library.run(step.variant, step.shapes, placed.tensors, placed.workspace, gpu.stream)
        gpu.wait()
        output = placed.output(memory)
        pool = placed.pool(memory)
        overrun = memory.overrun()
    found = compare(step, output, pool, expected, expected_pool)
    problems = found.problems
    if overrun:
        problems = (*problems, f"{overrun} arrays were written beyond their end")
    figures: dict[str, Figure] = {
        "max_error": found.max_error,
        "error_of_allowed": found.error_units,
        "codes": found.codes,
        "codes_apart": found.codes_apart,
    }
    detail = f"{found.error_units:.0%} of the allowed error"
    if found.codes:
        detail += f"; {found.codes_apart} of {found.codes} codes a step apart"
    return Row(
        f"kernels/{case.name}",
        "failed" if problems else "ok",
        "; ".join(problems) or detail,
        figures=figures,
    )


@dataclass(frozen=True)
class Placed:
    """A step on the device.

    Attributes:
        tensors: pointers by name, "output" among them.
        places: of each array of the pool: pointer, shape, type.
    """

    step: Step
    tensors: Mapping[str, int]
    workspace: int
    places: Mapping[str, tuple[int, tuple[int, ...], Any]]

    def output(self, memory: DeviceArrays) -> Array:
        """float32 [T, Hq · D]."""
        variant, activation = self.step.variant, self.step.variant.activation
        shape = self.step.shapes.tokens, variant.num_heads * variant.head_dim
        dtype = np.float16 if activation == "f16" else np.uint16
        return as_float(memory.read(self.tensors["output"], shape, dtype), activation)

    def pool(self, memory: DeviceArrays) -> Arrays:
        return {name: memory.read(*place) for name, place in self.places.items()}


def place(memory: DeviceArrays, step: Step, first_block: int = 0) -> Placed:
    """Arrays on the device; the pool's blocks behind `first_block` others."""
    variant, shapes = step.variant, step.shapes
    tensors, places = {}, {}
    for name, array in device_inputs(variant, step.inputs, first_block).items():
        tensors[name] = memory.upload(array)
    for name, array in step.pool.items():
        before = first_block * (array.nbytes // len(array))
        tensors[name] = memory.allocate(before + array.nbytes, None)
        memory.write(tensors[name] + before, array)
        places[name] = tensors[name] + before, array.shape, array.dtype
    tensors["output"] = memory.allocate(2 * shapes.tokens * variant.num_heads * variant.head_dim)
    size = workspace_bytes(variant, shapes.tokens, shapes.sequences, shapes.table_width)
    return Placed(step, tensors, memory.allocate(size), places)


def device_inputs(variant: AttentionVariant, inputs: Arrays, first_block: int = 0) -> Arrays:
    """As the device has them: activations in their type, blocks counted from the pool's begin."""
    found = dict(inputs)
    for name in _ACTIVATIONS:
        if name in found:
            found[name] = as_activation(found[name], variant.activation)
    table = found["block_table"]
    found["block_table"] = np.where(table >= 0, table + first_block, -1).astype(np.int32)
    return found


def block_bytes(variant: AttentionVariant) -> int:
    """Of one block of the pool."""
    element = 2 if variant.cache == "f16" else 1
    per_head = 2 * (variant.head_dim * element + (4 if variant.scaled else 0))
    return variant.block_size * variant.kv_num_heads * per_head


def compare(step: Step, output: Array, pool: Arrays, expected: Array, expected_pool: Arrays) -> Comparison:
    """A step's output and pool with the reference's."""
    problems, error, units = compare_output(step.variant, output, expected)
    codes = apart = 0
    for name in POOL:
        if name in pool:
            wrong, differ = _compare_cache(step, name, pool[name], expected_pool[name])
            problems += wrong
            apart += differ
            codes += len(step.new_slots) * prod(pool[name].shape[2:]) if name not in SCALES else 0
    return Comparison(tuple(problems), error, units, codes, apart)


def compare_output(
    variant: AttentionVariant, output: Array, expected: Array
) -> tuple[list[str], float, float]:
    """What is wrong, the largest error, and the largest of what is allowed."""
    if not np.isfinite(output).all():
        bad = ~np.isfinite(output)
        row, head = _first(bad, variant)
        return [f"output: NaN or infinity from row {row}, head {head} on ({bad.mean():.2%})"], np.inf, np.inf
    heads = expected.reshape(len(expected), variant.num_heads, variant.head_dim).astype(np.float64)
    magnitude = np.sqrt(np.square(heads).mean(axis=2, keepdims=True))
    allowed = (UNITS[variant.activation] * (OF_HEAD * magnitude + OF_ELEMENT * np.abs(heads))).reshape(
        expected.shape
    )
    error = np.abs(output - expected)
    share = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    problems = []
    if share.max(initial=0) > 1:
        row, head = _first(share > 1, variant)
        at = np.unravel_index(share.argmax(), share.shape)
        problems.append(
            f"output: from row {row}, head {head} on {np.mean(share > 1):.1%} of the elements are wrong, by "
            f"up to {error[at]:.3g} where {allowed[at]:.2g} is allowed"
        )
    return problems, float(error.max(initial=0)), float(share.max(initial=0))


def _first(bad: Array, variant: AttentionVariant) -> tuple[int, int]:
    row, column = (int(each[0]) for each in np.nonzero(bad))
    return row, column // variant.head_dim


def _compare_cache(step: Step, name: str, found: Array, expected: Array) -> tuple[list[str], int]:
    """What is wrong, and how many codes are one step apart."""
    flat, wanted = (array.reshape(-1, *array.shape[2:]) for array in (found, expected))
    written = np.zeros(len(flat), bool)
    written[step.new_slots] = True
    touched = (_bits(flat) != _bits(wanted)).reshape(len(flat), -1).any(axis=1) & ~written
    if touched.any():
        slot = int(touched.argmax())
        return [f"{name}: {touched.sum()} slots changed that the step must not write, from {slot} on"], 0
    new, wanted = flat[written], wanted[written]
    if name in SCALES:
        return _compare_scales(step.variant, name, new, wanted), 0
    steps = _steps(new, wanted, step.variant.cache)
    apart = int((steps > 0).sum())
    if _is_exact(step.variant, name):
        wrong, what = steps > 0, "to the bit"
    else:
        wrong, what = steps > 1, "within one step"
    if wrong.any():
        slot, head = (int(each[0]) for each in np.nonzero(wrong.any(axis=2)))
        return [f"{name}: {wrong.sum()} codes are not {what}, from new slot {slot}, head {head} on"], apart
    if apart > CODES_APART * steps.size + 1:
        return [f"{name}: {apart} of {steps.size} codes are one step apart"], apart
    return [], apart


def _compare_scales(variant: AttentionVariant, name: str, new: Array, wanted: Array) -> list[str]:
    error = np.abs(new / wanted - 1)
    wrong = ~(error <= (0.0 if _is_exact(variant, name) else SCALE_ERROR))  # NaN is wrong
    if not wrong.any():
        return []
    worst = error.max(initial=0, where=np.isfinite(error))
    return [f"{name}: {wrong.sum()} of {wrong.size} scales are wrong, by up to {worst:.2%} or NaN"]


def _is_exact(variant: AttentionVariant, name: str) -> bool:
    """Whether nothing but rounding to the cache's type is done to what is written."""
    if name.startswith("value"):
        return not variant.norm_values
    return not (variant.k_norm or variant.rotary_dim)


def _steps(new: Array, wanted: Array, cache: str) -> Array:
    """By how many steps of its type each element [n, heads, D] differs; 0.5 for less than one."""
    if cache == "fp8":  # codes in the order of their values, zero and minus zero alike
        order = [np.where(x < 128, x & 127, -(x & 127).astype(np.int32)) for x in (new, wanted)]
        return np.abs(order[0].astype(np.int32) - order[1])
    difference = np.abs(new.astype(np.float64) - wanted.astype(np.float64))
    if cache == "int8":
        return difference
    with np.errstate(invalid="ignore"):
        step = np.spacing(np.abs(wanted)).astype(np.float64)
    largest = np.abs(wanted.astype(np.float64)).max(axis=-1, keepdims=True, initial=0)
    finest = np.maximum(step, _CANCELLED * largest)
    steps: Array = np.divide(difference, finest, out=np.zeros_like(difference), where=difference != 0)
    return np.where(np.isnan(steps), np.inf, steps)


def _bits(array: Array) -> Array:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])
