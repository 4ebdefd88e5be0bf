"""The Triton kernels on the CPU: launch plans, run by Triton's interpreter over NumPy arrays.

Triton decides when a kernel is decorated whether it is interpreted or compiled. So tests that interpret run
in a process of their own, which `start` starts, and never disturb those that compile.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagelet.plugins.kernels.launch_plan import Argument, Offset, Shapes, Workspace, plan, workspace_bytes
from pagelet.plugins.kernels.variant import AttentionVariant

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH_TYPES = {
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
# Rotated queries, weights and outputs are rounded to the activation's type; with bf16 what an f16 cache
# holds is too. Each moves an output by about a unit roundoff of what it reduces, below 4 here: 3.3 units were
# seen.
TOLERANCE = {
    "f16": {"rtol": 3 * 2.0**-11, "atol": 6 * 2.0**-11},
    "bf16": {"rtol": 3 * 2.0**-8, "atol": 6 * 2.0**-8},
}
POISON = 0xFF  # in every byte: NaN as floats, -1 as integers


def start(file: Path) -> subprocess.Popen[str]:
    """All tests of a file with the interpreter, in a process of its own; skips where there is no Triton."""
    if find_spec("triton") is None:
        pytest.skip("no Triton for this platform")
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Its tests passed."""
    output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]


def variant_of(layer: Any, activation: str = "f16", **changes: Any) -> AttentionVariant:
    """For a `Layer` of conftest."""
    attributes = {
        "num_heads": layer.num_heads,
        "kv_num_heads": layer.kv_num_heads,
        "head_dim": layer.head_size,
        "block_size": layer.block_size,
        "activation": activation,
        "cache": layer.cache_type,
        "scale": layer.scale,
        "softcap": layer.softcap,
        "local_window_size": layer.local_window_size,
        "rotary_dim": (layer.rotary_dim or layer.head_size) if layer.rotary else 0,
        "rotary_interleaved": layer.rotary_interleaved,
        "norm_epsilon": layer.norm_epsilon,
        "norm_after_rotation": layer.norm_after_rotation,
        "norm_values": layer.norm_values,
        "writes": not layer.reads_only,
        "packed": layer.packed,
        "q_norm": "q_norm_weight" in layer.head_weights,
        "k_norm": "k_norm_weight" in layer.head_weights,
        "sinks": "head_sink" in layer.head_weights,
    }
    return AttentionVariant(**attributes | changes)


def rounded(array: Any, activation: str) -> Any:
    """float32 with the nearest values of the activation's type."""
    dtype = TORCH_TYPES[{"f16": "*fp16", "bf16": "*bf16"}[activation]]
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype).float().numpy()


def run(
    variant: AttentionVariant, arrays: Mapping[str, Any], roles: tuple[str, ...] = ()
) -> tuple[Any, list[str]]:
    """One step: float32 ``[T, num_heads * head_dim]``, and the roles that were launched: of `roles`, or all.

    Caches among the arrays are updated in place.
    """
    mask = arrays.get("ancestor_mask", np.empty((0, 0), np.int32))
    tokens, (sequences, width) = len(arrays["query"]), arrays["block_table"].shape
    shapes = Shapes(tokens, sequences, width, *mask.shape)
    workspace = torch.full((workspace_bytes(variant, tokens, sequences, width),), POISON, dtype=torch.uint8)
    activation = TORCH_TYPES[dict(variant.kernel("prepare").arguments)["query"]]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name in {"query", "key", "value"} & set(tensors):
        tensors[name] = tensors[name].to(activation)
    tensors["output"] = torch.full((tokens, variant.num_heads * variant.head_dim), torch.nan).to(activation)
    launches = [launch for launch in plan(variant, shapes) if not roles or launch.kernel.role in roles]
    for launch in launches:
        kernel = launch.kernel
        types = [TORCH_TYPES.get(kind) for _, kind in kernel.arguments]
        values = [_value(a, t, tensors, workspace) for a, t in zip(launch.arguments, types, strict=True)]
        function = getattr(importlib.import_module(kernel.module), kernel.function)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # NaN and infinity are what some tests are about
            function[launch.grid](*values, **kernel.constants)
    return tensors["output"].float().numpy(), [launch.kernel.role for launch in launches]


def check(
    make_world: Any, layer: Any, spans: list[tuple[int, int, int]], activation: str = "f16", seed: int = 0
) -> list[str]:
    """Compares a step of a `World` of conftest with the reference; the roles that were launched."""
    world = make_world(layer, [end for _, _, end in spans], seed)
    world.qkv = [rounded(rows, activation) for rows in world.qkv]
    return compare(world, world.step(spans), world.with_past([begin for _, begin, _ in spans]), activation)


def compare(world: Any, step: Mapping[str, Any], caches: Any, activation: str = "f16") -> list[str]:
    """Output and caches of a step, of a world with rounded activations."""
    expected_caches = caches.copy()
    expected = world.reference(step, expected_caches)
    output, roles = run(variant_of(world.layer, activation), {**step, **caches.arrays()})
    np.testing.assert_allclose(output, expected, **TOLERANCE[activation])
    normed = world.layer.norm_values or "k_norm_weight" in world.layer.head_weights
    for name, cache in expected_caches.arrays().items():
        compare_caches(caches.arrays()[name], cache, name, exactly=not normed)
    return roles


def compare_caches(found: Any, expected: Any, name: str, *, exactly: bool) -> None:
    """To the bit, or but for the order in which a norm sums squares: steps of codes, ulps of scales."""
    if exactly or expected.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=0 if exactly else 3e-7, err_msg=name)
        return
    bits = {1: np.int8, 2: np.int16}[expected.itemsize]
    apart = np.abs(found.view(bits).astype(np.int32) - expected.view(bits))
    assert apart.max(initial=0) <= 1, name
    assert (apart > 0).mean() < 0.01, name


def _value(argument: Argument, dtype: Any, tensors: Mapping[str, Any], workspace: Any) -> Any:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, Workspace):
        return workspace[argument.offset :].view(dtype)
    name, skipped = (argument.name, argument.bytes) if isinstance(argument, Offset) else (argument, 0)
    if name not in tensors:
        return torch.empty(0, dtype=dtype)  # a null pointer
    tensor = tensors[name].flatten()
    assert tensor.dtype == dtype, name
    assert tensor.data_ptr() == tensors[name].data_ptr(), f"{name} was copied"
    return tensor[skipped // tensor.element_size() :]


def _mend_interpreter() -> None:
    """What Triton 3.9's interpreter lacks.

    It multiplies the bits of bfloat16 as integers in `tl.dot`, and cuts where GPUs round. And it patches all
    of `triton.language` again for each call of a function, which is most of its time: once is enough here.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            data = torch.from_numpy(np.ascontiguousarray(widened(src))).to(torch.bfloat16)
            return interpreter.TensorHandle(data.view(torch.uint16).numpy(), tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return interpreter.TensorHandle(widened(src), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return interpreter.TensorHandle(widened(a) @ widened(b) + d.data, d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # Checks of each addition for overflow take a third of the time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


if INTERPRETED:
    _mend_interpreter()
