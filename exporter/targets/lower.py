"""From the CPU's packed weights to a target's own, and the builder that spells its graph."""

from collections.abc import Callable
from functools import partial

import numpy as np

from pagelet.exporter.calibration.corpus import texts_of_calibration
from pagelet.exporter.calibration.ranges import Ranges, measure_ranges
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.part import Part
from pagelet.exporter.targets.cuda import CudaBuilder, CudaLayout, refuse_obstacles
from pagelet.exporter.targets.finish import check_tools
from pagelet.exporter.targets.gpu_builder import GpuBuilder, refuse_experts
from pagelet.exporter.targets.lowering import Layout, QdqLayout, lower_weights
from pagelet.exporter.targets.tensorrt import TensorRTBuilder, refuse_heads
from pagelet.models.text import Tokenizer


def lower(job: Job, packed: Part, tokenizer: Tokenizer) -> Part:
    """The part in its target's form; the CPU's is packed already.

    Raises:
        UnsupportedError: the target cannot compute this model.
        InputError: static scales are needed, and the calibration's text gives none.
    """
    options = job.options
    if not options.row.is_gpu:
        return packed
    ranges = _ranges(job, packed, tokenizer)
    layout: Layout = CudaLayout() if options.target == "cuda" else QdqLayout()
    weights = lower_weights(
        packed.spec,
        packed.weights,
        packed.folder,
        layout,
        activations=options.activation_type,
        input_scales=_input_scales(ranges) if options.weights == "fp8" and ranges else {},
    )
    device: Callable[..., GpuBuilder] = TensorRTBuilder
    if options.target == "cuda":
        device = partial(CudaBuilder, cache_scales=_cache_scales(job, ranges))
    device = partial(device, activations=options.activation_type)
    return Part(packed.spec, weights, packed.folder, device, partial(device, emulated=True))


def check_model(job: Job) -> None:
    """Before any work.

    Raises:
        UnsupportedError: the target cannot compute this model.
        BackendError: what compiles for it is not installed.
    """
    if job.options.target == "cuda":
        refuse_obstacles(job.spec, job.cache)
    elif job.options.row.is_gpu:
        refuse_experts(job.spec)
        refuse_heads(job.spec)
        check_tools(job.options)


def _ranges(job: Job, packed: Part, tokenizer: Tokenizer) -> Ranges | None:
    """Measured where scales are static: FP8 inputs, and quantized caches of ONNX Runtime's op."""
    if not job.options.has_static_scales:
        return None
    texts = Texts.of(texts_of_calibration(job.options, tokenizer, packed.spec.max_context))
    return measure_ranges(
        Layerwise(texts, CacheFormat(job.cache.block_size, "f32")), packed, on_progress=job.on_progress
    )


def _input_scales(ranges: Ranges) -> dict[str, float]:
    # Float16 is full of bits down to its smallest normal number; a larger scale only wastes small codes.
    least = float(np.finfo(np.float16).tiny)
    return {module: max(ranges.input_scale(module), least) for module in ranges.inputs}


def _cache_scales(job: Job, ranges: Ranges | None) -> dict[int, tuple[float, float]]:
    kind = job.cache.type
    if ranges is None or kind not in ("int8", "fp8"):
        return {}
    return {layer: ranges.cache_scales(layer, kind) for layer in ranges.caches}
