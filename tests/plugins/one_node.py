"""Graphs of one node of the domain `pagelet`, and a file's tests again on another instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from pagelet.plugins import native

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

_TYPES = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}


def run_node(
    op: str,
    order: Sequence[str],
    attributes: Mapping[str, Any],
    inputs: Mapping[str, Array],
    threads: int = 1,
) -> Float32:
    """The op's float output; of its inputs in `order`, those that are not among `inputs` are left out."""
    ranks = tuple((name, array.dtype.name, array.ndim) for name, array in inputs.items())
    session = _session(op, tuple(order), tuple(attributes.items()), ranks, threads)
    y: Float32 = session.run(None, dict(inputs))[0]
    return y


@lru_cache(maxsize=64)
def _session(
    op: str,
    order: tuple[str, ...],
    attributes: tuple[tuple[str, Any], ...],
    inputs: tuple[tuple[str, str, int], ...],
    threads: int,
) -> ort.InferenceSession:
    given = {name for name, _, _ in inputs}
    names = [name if name in given else "" for name in order]
    node = helper.make_node(op, names, ["y"], domain="pagelet", **dict(attributes))
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, _TYPES[dtype], [None] * rank) for name, dtype, rank in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the tests look at the exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    native.register_ops(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


def run_tests_on(isa: str, file: str) -> None:
    """All tests of a file but those named instruction_set, in a process that is told to use `isa`."""
    if isa == native.selected_isa():
        pytest.skip("the tests of this process run on it")
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", "-knot instruction_set", file]
    environment = os.environ | {"PAGELET_ISA": isa}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
