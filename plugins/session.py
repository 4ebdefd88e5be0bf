"""Sessions of ONNX Runtime's CPU provider over our graphs: one set of options for whoever runs one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pagelet.plugins.native import register_ops

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Fields of ModelProto and GraphProto, and the element type, as ONNX numbers them.
_GRAPH, _OUTPUT, _FLOAT = 7, 12, 1


def open_session(
    graph: Path | bytes, *, threads: int, folder: Path | None = None, taps: Iterable[str] = ()
) -> InferenceSession:
    """Load a graph, a file or its bytes; `threads` 0 means the physical cores.

    Args:
        folder: where its weights' file is; None: beside the graph's file.
        taps: names of float values inside the graph that become outputs too; nothing else changes.

    Raises:
        FileNotFoundError: the op library is missing.
        RuntimeError, or an exception of ONNX Runtime's own: the graph cannot be loaded.
    """
    import onnxruntime

    options = _session_options(threads)
    names = list(taps)
    if names and isinstance(graph, Path):
        folder, graph = folder or graph.parent, graph.read_bytes()
    if isinstance(graph, bytes):
        # A message that follows another of its type is merged with it: repeated fields are appended.
        graph += _message(_GRAPH, b"".join(_message(_OUTPUT, _float_value(name)) for name in names))
        if folder is not None:
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder.resolve()))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _session_options(threads: int) -> SessionOptions:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Shapes differ from step to step, so a planned memory pattern would never be used twice.
    options.enable_mem_pattern = False
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    # Threads spin within a step, where work follows at once, and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Graphs of other targets have DequantizeLinear before MatMul. ONNX Runtime makes one product of the two,
    # and would round its activations to INT8; 1: float32.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    register_ops(options)
    return options


def _float_value(name: str) -> bytes:
    """A ValueInfoProto: its name (field 1) and a TypeProto with a tensor type of floats (fields 2, 1, 1)."""
    return _message(1, name.encode()) + _message(2, _message(1, b"\x08" + bytes([_FLOAT])))


def _message(field: int, data: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))
