"""Building an engine from a bundle's ONNX graph: with TensorRT-RTX anywhere, with TensorRT on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagelet.plugins.tensorrt.host import PluginError, PluginHost
from pagelet.plugins.tensorrt.plugin import attention_plugins
from pagelet.plugins.tensorrt.runtime_library import TensorRTError, import_tensorrt

PACKAGES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
"""The Python package of each target."""
_NAMES = {"rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}
_KIB = 1 << 10

Profiles = Sequence[Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]
OnPhase = Callable[[str, int, int], bool | None]
"""on_phase(name, steps done, steps in all); False stops the build."""


@dataclass(frozen=True)
class Network:
    """What was parsed, as the parser sees it.

    Attributes:
        inputs, outputs: (name, type, shape), -1 for what varies.
        aliases: graph output to the graph input whose memory it is.
    """

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine, and what it was built from and by."""

    data: Any
    version: str
    sms: tuple[int, ...]
    network: Network


def engine_version(target: str, trt: Any) -> str:
    """As the manifest records it: an engine runs with the version that built it."""
    return f"{_NAMES[target]} {trt.__version__}"


def build_engine(
    target: str,
    graph: Path,
    profiles: Profiles,
    *,
    sms: Sequence[int] = (),
    workspace: int | None = None,
    timing_cache: Path | None = None,
    on_phase: OnPhase | None = None,
) -> BuiltEngine:
    """Parse `graph`, whose weights lie beside it, and build it.

    Args:
        target: "rtx" or "tensorrt".
        profiles: of each, the smallest, usual and largest shape of every input.
        sms: compute capabilities, times ten (rtx); TensorRT builds for the GPU that is here.
        workspace: the most bytes that a layer may use beside its inputs and outputs; None: TensorRT's limit.
        timing_cache: a file of measured times that later builds reuse; made if there is none (tensorrt).

    Raises:
        TensorRTError: the package is missing, or it refuses the graph or the device.
        PluginError: the attention plugin refuses a node.
    """
    trt = import_tensorrt(PACKAGES[target])
    plugins, host = attention_plugins(trt), PluginHost()
    log = _Log(trt)
    builder = trt.Builder(log.logger)
    if builder is None:
        raise TensorRTError(log.explain(f"{_NAMES[target]} cannot build here"))
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log.logger)
    with plugins.hosting(host):
        if not parser.parse_from_file(str(graph)):
            errors = "; ".join(str(parser.get_error(i).desc()) for i in range(min(parser.num_errors, 3)))
            host.check()
            raise TensorRTError(f"{_NAMES[target]} cannot read {graph}: {errors}")
        config = builder.create_builder_config()
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        _add_profiles(builder, config, profiles)
        if workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        if target == "rtx":
            # Steps are captured as CUDA graphs, in memory that the runtime gives.
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            config.num_compute_capabilities = len(sms)
            for index, sm in enumerate(sms):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
        if on_phase is not None:
            config.progress_monitor = _monitor(trt, on_phase)
        cache = _open_timing_cache(config, timing_cache) if target == "tensorrt" else None
        data = builder.build_serialized_network(network, config)
        if data is None:
            host.check()
            raise TensorRTError(log.explain(f"{_NAMES[target]} could not build an engine of {graph}"))
        if cache is not None and timing_cache is not None:
            timing_cache.unlink(missing_ok=True)  # a link would be written through
            timing_cache.write_bytes(bytes(cache.serialize()))
    return BuiltEngine(data, engine_version(target, trt), tuple(sms), _described(network))


def _strongly_typed(trt: Any) -> int:
    """The flag; TensorRT 11 has no other networks, and no flag."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _add_profiles(builder: Any, config: Any, profiles: Profiles) -> None:
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, least, usual, most)
        if config.add_optimization_profile(profile) < 0:
            raise TensorRTError(f"an optimization profile is not valid: {dict(shapes)!r:.300}")


def _open_timing_cache(config: Any, path: Path | None) -> Any:
    data = path.read_bytes() if path is not None and path.is_file() else b""
    cache = config.create_timing_cache(data)
    if not config.set_timing_cache(cache, False):  # of another device or version: begin anew
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _described(network: Any) -> Network:
    def each(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
        return tensor.name, str(tensor.dtype).rpartition(".")[2].lower(), tuple(tensor.shape)

    return Network(
        tuple(each(network.get_input(i)) for i in range(network.num_inputs)),
        tuple(each(network.get_output(i)) for i in range(network.num_outputs)),
    )


class _Log:
    """TensorRT's errors, which it tells nobody but its logger."""

    def __init__(self, trt: Any) -> None:
        lines: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    lines.append(message)

        self.logger, self._lines = Logger(), lines

    def explain(self, what: str) -> str:
        return f"{what}: {self._lines[0] if self._lines else 'it gives no reason'}"


def _monitor(trt: Any, on_phase: OnPhase) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._totals[phase_name] = num_steps
            on_phase(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return on_phase(phase_name, step + 1, self._totals.get(phase_name, step + 1)) is not False

        def phase_finish(self, phase_name: str) -> None:
            self._totals.pop(phase_name, None)

    return Monitor()


__all__ = ["PACKAGES", "BuiltEngine", "Network", "PluginError", "TensorRTError", "build_engine"]
