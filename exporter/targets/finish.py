"""What a bundle for a GPU has beside its graph: attention kernels, and an engine where one can be built."""

import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.job import Job
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.part import Part
from pagelet.models.engine_profiles import engine_profiles
from pagelet.models.errors import BackendError, UnsupportedError
from pagelet.models.targets import GpuSettings
from pagelet.plugins.kernels.variant import AttentionVariant

ENGINE_NAME, KERNELS_NAME = "model.engine", "kernels"


def finish(job: Job, part: Part, graph: Path) -> GpuSettings | None:
    """Compile what the target has compiled at export; None for the CPU.

    Raises:
        BackendError: a compiler or TensorRT-RTX is missing, or failed.
        UnsupportedError: there is no kernel for this model's attention.
    """
    options = job.options
    if not options.row.is_gpu:
        return None
    settings = GpuSettings(
        activations=options.activation_type,
        sms=options.device_sms,
        kernels=KERNELS_NAME if options.row.has_kernels else "",
    )
    if settings.kernels:
        _compile_kernels(job, graph, settings)
    if options.target != "rtx":
        return settings
    return _build(job, part, graph, settings)


def check_tools(options: ExportOptions) -> None:
    """Whether what compiles kernels and engines is there.

    Raises:
        BackendError: says what to install.
    """
    if find_spec("triton") is None:
        raise BackendError(
            "attention kernels are compiled with triton; run: pip install 'pagelet[gpu-export]'"
        )
    if options.target == "rtx":
        from pagelet.plugins.tensorrt.runtime_library import TensorRTError, import_tensorrt

        try:
            import_tensorrt("tensorrt_rtx")
        except TensorRTError as error:
            raise BackendError(str(error)) from error


def attention_variants(graph: Path) -> list[AttentionVariant]:
    """Those of a graph's nodes, each once.

    Raises:
        UnsupportedError: there is no kernel for one.
    """
    from pagelet.plugins.tensorrt.node import AttentionNode

    found: dict[AttentionVariant, None] = {}
    for node in ir.load(graph).graph:
        if node.op_type == "PagedAttention":
            fields = {name: value.value for name, value in node.attributes.items()}
            try:
                found[AttentionNode.from_fields(fields).variant] = None
            except ValueError as error:
                raise UnsupportedError(f"no attention kernel for this model: {error}") from error
    return list(found)


def _compile_kernels(job: Job, graph: Path, settings: GpuSettings) -> None:
    from pagelet.plugins.kernels.assembler import KernelCompileError
    from pagelet.plugins.kernels.compile import compile_variants
    from pagelet.plugins.kernels.cubin_cache import default_folder

    try:
        compile_variants(
            attention_variants(graph),
            settings.sms,
            job.folder / KERNELS_NAME,
            cache=default_folder(),
            on_progress=lambda done, total: job.on_progress(done, total, "attention kernels"),
        )
    except KernelCompileError as error:
        raise BackendError(str(error)) from error


def _build(job: Job, part: Part, graph: Path, settings: GpuSettings) -> GpuSettings:
    from pagelet.plugins.tensorrt.build import PluginError, TensorRTError, build_engine

    job.on_progress(0, 1, "engine")
    cache, start = job.cache, time.monotonic()
    profiles = engine_profiles(part.spec, cache.type, cache.block_size, settings)
    try:
        built = build_engine("rtx", graph, profiles, sms=settings.sms)
    except (TensorRTError, PluginError) as error:
        raise BackendError(str(error)) from error
    (job.folder / ENGINE_NAME).write_bytes(built.data)
    seconds = time.monotonic() - start
    job.on_note(f"{built.version} built an engine of {built.data.nbytes / 1e6:.0f} MB in {seconds:.1f} s")
    job.on_progress(1, 1, "")
    return replace(settings, engine=ENGINE_NAME, engine_version=built.version, engine_sms=built.sms)
