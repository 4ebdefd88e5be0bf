"""ONNX Runtime with CUDA and nothing else: a session that fell back to the CPU is an error.

Tried with onnxruntime-gpu 1.31.1 where there is no GPU: asked for CUDA alone, it goes on with the CPU, and
then refuses the graph for types that the CPU has no kernels of.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagelet.models.errors import BackendError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

TOO_LITTLE = re.compile(r"out of memory|failed to allocate memory|ALLOC_FAILED", re.IGNORECASE)
"""What ONNX Runtime says where a device's memory is full."""
_PROVIDER = "CUDAExecutionProvider"
_LEAST_VERSION = (1, 31)  # whose attention op has the inputs that the graph gives it
_OPTIONS = {
    "device_id": "0",
    # By default the arena doubles with each extension, and keeps what nobody uses.
    "arena_extend_strategy": "kSameAsRequested",
}
_SESSION_OPTIONS = {
    # A node without a CUDA kernel is an error; it would take the residual stream to the host and back.
    "session.disable_cpu_ep_fallback": "1",
    # Weights stay as long as the session: in an arena they would round its chunks up.
    "session.use_device_allocator_for_initializers": "1",
}
_WARNING, _FATAL = 2, 4  # of ONNX Runtime's messages: what it prints by default, and next to nothing


def import_runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"ONNX Runtime cannot be imported ({error}). Install onnxruntime-gpu.") from error
    return onnxruntime


def checked(runtime: Any) -> Any:
    """ONNX Runtime, if it serves.

    Raises:
        BackendError: it is made for processors only, or too old.
    """
    version = runtime.__version__
    if _PROVIDER not in runtime.get_available_providers():
        raise BackendError(
            f"the installed ONNX Runtime {version} has no {_PROVIDER}. Install onnxruntime-gpu in the place "
            "of onnxruntime (the two share one folder), or use a bundle for the target 'cpu'."
        )
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise BackendError(
            f"ONNX Runtime {version} is installed; the target cuda needs {least} or later. "
            "Install a newer onnxruntime-gpu."
        )
    return runtime


def load_provider(runtime: Any) -> None:
    """Load CUDA's libraries and the provider that needs them.

    Raises:
        BackendError: one is missing. A session would go on without the provider, and then find that the CPU
            has no kernel of the attention op.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        runtime.preload_dlls()  # of NVIDIA's packages beside it, if they are installed
    runtime.set_default_logger_severity(_FATAL)
    try:
        runtime.OrtValue.ortvalue_from_shape_and_type([1], np.uint8, "cuda", 0)
    except RuntimeError as error:
        if TOO_LITTLE.search(str(error)):
            raise
        cause = (printed.getvalue().splitlines() or [str(error).strip()])[0]
        raise BackendError(
            f"ONNX Runtime's {_PROVIDER} cannot be loaded ({cause}). Install onnxruntime-gpu[cuda,cudnn], "
            f"and a driver that serves CUDA {runtime.cuda_version}."
        ) from error
    finally:
        runtime.set_default_logger_severity(_WARNING)


def open_session(graph: Path, runtime: Any) -> "InferenceSession":
    """A session all of whose nodes run on the device."""
    options = runtime.SessionOptions()
    # Shapes differ from step to step, so a planned memory pattern would never be used twice.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    for name, value in _SESSION_OPTIONS.items():
        options.add_session_config_entry(name, value)
    # Without the last argument a provider that fails is replaced by the CPU's, here and in every run.
    session = runtime.InferenceSession(
        str(graph), options, providers=[(_PROVIDER, _OPTIONS)], enable_fallback=0
    )
    if _PROVIDER not in session.get_providers():
        raise BackendError(
            f"ONNX Runtime has opened {graph} without {_PROVIDER}. Is the driver too old for it?"
        )
    return session
