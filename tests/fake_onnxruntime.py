"""An onnxruntime-gpu without a GPU: its CUDA sessions are the CPU's, over the memory of a fake driver.

What a CUDA session would do wrong in silence fails here: a cache that is not in the device's memory, a run
while copies of the cache still wait in a stream, options under which ONNX Runtime falls back to the CPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from cuda_on_cpu import on_cpu
from fake_cuda import FakeCuda
from numpy.typing import NDArray

from pagelet.plugins.session import open_session

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_ITEM_BYTES = {10: 2, 3: 1, 17: 1}


class FakeRuntime:
    """Pass it as `runtime`.

    Attributes:
        available, used: providers of the package, and of its sessions.
        loads: CUDA's libraries are there.
        severities: of the messages that were asked for.
        failure: what opening a session raises.
        sessions: those that were opened.
    """

    cuda_version = "13.0"

    def __init__(self, cuda: FakeCuda) -> None:
        self.__version__ = onnxruntime.__version__
        self.cuda = cuda
        self.available = [CUDA, CPU]
        self.used = [CUDA, CPU]
        self.loads = True
        self.severities: list[int] = []
        self.failure: Exception | None = None
        self.sessions: list[FakeSession] = []
        self.OrtValue = SimpleNamespace(
            ortvalue_from_numpy=onnxruntime.OrtValue.ortvalue_from_numpy,
            ortvalue_from_shape_and_type=self._allocate,
        )

    def _allocate(self, shape: list[int], dtype: Any, device: str, number: int) -> None:
        assert (device, number) == ("cuda", 0)
        if not self.loads:
            raise RuntimeError("CUDA Provider not available, can't get interface for it\n")

    def set_default_logger_severity(self, severity: int) -> None:
        self.severities.append(severity)

    def get_available_providers(self) -> list[str]:
        return self.available

    def preload_dlls(self) -> None:
        if not self.loads:  # in the words of the real one
            print("Failed to load libcublasLt.so.13: libcublasLt.so.13: cannot open shared object file")

    class SessionOptions:
        def __init__(self) -> None:
            self.entries: dict[str, str] = {}

        def add_session_config_entry(self, name: str, value: str) -> None:
            self.entries[name] = value

    def InferenceSession(
        self, path: str, options: Any, providers: Any, enable_fallback: int = 1
    ) -> "FakeSession":
        assert enable_fallback == 0
        assert options.entries["session.disable_cpu_ep_fallback"] == "1"
        ((name, given),) = providers
        assert name == CUDA
        assert given["arena_extend_strategy"] == "kSameAsRequested"
        if self.failure:
            raise self.failure
        self.sessions.append(FakeSession(Path(path), self.cuda, self.used))
        return self.sessions[-1]


class FakeSession:
    """A session of the graph as `cuda_on_cpu` spells it.

    Attributes:
        runs: the small inputs of each run, by name.
        failure: what the next run raises.
    """

    def __init__(self, path: Path, cuda: FakeCuda, providers: list[str]) -> None:
        model = onnx.load(path, load_external_data=False)
        self._names = {each.name for each in model.graph.input}
        self._session = open_session(on_cpu(model).SerializeToString(), threads=1, folder=path.parent)
        self._cuda = cuda
        self._providers = providers
        self.runs: list[dict[str, NDArray[Any]]] = []
        self.failure: Exception | None = None

    def get_inputs(self) -> list[Any]:
        return [each for each in self._session.get_inputs() if each.name in self._names]

    def get_outputs(self) -> list[Any]:
        return list(self._session.get_outputs())

    def get_providers(self) -> list[str]:
        return self._providers

    def io_binding(self) -> "FakeBinding":
        return FakeBinding(self._session.io_binding(), self._cuda, self._names)

    def run_with_iobinding(self, binding: "FakeBinding") -> None:
        assert not any(stream.waiting for stream in self._cuda.streams.values()), "copies still wait"
        assert binding.synchronized, "inputs may still be on their way"
        binding.synchronized = False
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure
        self.runs.append(dict(binding.small))
        binding.real.bind_cpu_input("position_ids", _positions(binding.small))
        self._session.run_with_iobinding(binding.real)


class FakeBinding:
    """What is bound as memory of the device must be; the CPU's session has it as the host's."""

    def __init__(self, real: Any, cuda: FakeCuda, names: set[str]) -> None:
        self.real, self._cuda, self._names = real, cuda, names
        self.small: dict[str, NDArray[Any]] = {}
        self.synchronized = False

    def bind_cpu_input(self, name: str, array: NDArray[Any]) -> None:
        assert name in self._names, f"the graph has no input {name}"
        self.small[name] = array.copy()
        self.synchronized = False
        if name != "position_ids":
            self.real.bind_cpu_input(name, self.small[name])

    def synchronize_inputs(self) -> None:
        self.synchronized = True

    def bind_input(self, name: str, *where: Any) -> None:
        self.real.bind_input(name, *self._checked(*where))

    def bind_output(self, name: str, *where: Any) -> None:
        self.real.bind_output(name, *self._checked(*where))

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.real.bind_ortvalue_output(name, value)

    def _checked(self, device: str, number: int, element: int, shape: list[int], pointer: int) -> Any:
        assert (device, number) == ("cuda", 0)
        self._cuda.array(pointer, (int(np.prod(shape)) * _ITEM_BYTES[element],), np.uint8)
        return "cpu", 0, element, shape, pointer


def _positions(small: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """past + row, as the device's op has them; what the graph itself reads is the same."""
    lengths = np.diff(small["cumulative_sequence_length"])
    rows = [past + np.arange(n) for past, n in zip(small["past_seqlens"], lengths, strict=True)]
    positions = np.concatenate(rows).astype(np.int64)
    if "position_ids" in small:
        np.testing.assert_array_equal(small["position_ids"], positions)
    return positions
