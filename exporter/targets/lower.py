"""From the CPU's packed weights to a target's own, and the builder that spells its graph."""

from collections.abc import Mapping
from functools import partial

from pagelet.exporter.job import Job
from pagelet.exporter.part import Part
from pagelet.exporter.targets.gpu_builder import refuse_experts
from pagelet.exporter.targets.lowering import QdqLayout, lower_weights
from pagelet.exporter.targets.tensorrt import TensorRTBuilder
from pagelet.models.text import Tokenizer


def lower(job: Job, packed: Part, tokenizer: Tokenizer) -> Part:
    """The part in its target's form; the CPU's is packed already.

    Raises:
        UnsupportedError: the target cannot compute this model.
    """
    if not job.options.row.is_gpu:
        return packed
    refuse_experts(packed.spec)
    activations = job.options.activation_type
    weights = lower_weights(
        packed.spec,
        packed.weights,
        packed.folder,
        QdqLayout(),
        activations=activations,
        input_scales=_input_scales(job, packed, tokenizer),
    )
    builder = partial(TensorRTBuilder, activations=activations)
    return Part(packed.spec, weights, packed.folder, builder, partial(builder, emulated=True))


def _input_scales(job: Job, packed: Part, tokenizer: Tokenizer) -> Mapping[str, float]:
    return {}
