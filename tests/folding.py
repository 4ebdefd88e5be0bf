"""Weights that a quantizer folds and does not round: what is folded must then change nothing."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter import ExportOptions
from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.model_weights import write_weights
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import Calibrated, LayerPlan, Quantizer, RoundToNearest
from pagelet.exporter.stacked_rows import PLAIN, Treatment
from pagelet.exporter.stream import Stream
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
F32 = FloatFormat("f32")
CACHE = CacheFormat(32, "f32")
TEXTS = [np.random.default_rng(seed).integers(2, 258, 60).tolist() for seed in range(2)]


class Unrounded:
    """A quantizer of which all but the rounding is kept: what it folds must then change nothing."""

    def __init__(self, inner: Quantizer, spoil: Callable[[LayerPlan], LayerPlan] = lambda plan: plan) -> None:
        self._inner = inner
        self._spoil = spoil
        self.plans: list[LayerPlan] = []
        self.stream: Stream | None = None
        self.notes: list[str] = []

    def table(self, module: str) -> Treatment:
        return PLAIN

    def start(self, embedding: Part) -> None:
        self._inner.start(embedding)

    def plan(self, layer: int) -> LayerPlan:
        plan = self._inner.plan(layer)
        unrounded = {
            module: Treatment(None, treatment.input_scales, treatment.output_scales)
            for module, treatment in plan.treatments.items()
        }
        self.plans.append(LayerPlan(unrounded, plan.norm_scales))
        return self._spoil(self.plans[-1])

    def advance(self, layer: int, written: Part) -> None:
        self._inner.advance(layer, written)

    def close(self) -> None:
        self._inner.close()


def logits_of(part: Part, texts: Sequence[Sequence[int]], cache: CacheFormat = CACHE) -> Float32:
    run = Layerwise(Texts.of(texts), cache)
    residual = run.embed(part)
    for layer in range(part.spec.num_layers):
        residual = run.layer(part, layer, residual)
    return np.concatenate([logits for _, logits in run.logits(part, residual)])


def write(job: Job, formats: Formats, quantizer: Quantizer) -> Part:
    with closing(quantizer):
        stored = write_weights(job, formats, quantizer)
    return Part(job.spec, stored, job.folder)


def job_in(folder: Path, checkpoint: Checkpoint, **options: Any) -> Job:
    folder.mkdir()
    return Job(checkpoint, checkpoint.spec, ExportOptions(cache_type="f32", **options), folder)


def awq(job: Job) -> Calibrated:
    formats = Formats(LinearFormat(), LinearFormat())
    run = Layerwise(Texts.of(TEXTS), job.cache)
    return Calibrated(job, formats, run, error_feedback=False, scaling=True)


def folded(
    checkpoint: Checkpoint, folder: Path, spoil: Callable[[LayerPlan], LayerPlan] = lambda plan: plan
) -> tuple[Float32, list[LayerPlan]]:
    """Logits of a bundle whose weights are folded and not rounded, and its plans."""
    job = job_in(folder, checkpoint)
    quantizer = Unrounded(awq(job), spoil)
    return logits_of(write(job, Formats(F32, F32), quantizer), TEXTS), quantizer.plans


def unfolded(checkpoint: Checkpoint, folder: Path) -> Float32:
    formats = Formats(F32, F32)
    job = job_in(folder, checkpoint)
    return logits_of(write(job, formats, RoundToNearest(job.spec, formats)), TEXTS)


def random_scales(seed: int) -> Callable[..., Float32]:
    """In place of the search: scales from about 1/5 to 5, inputs that share one alike."""
    rng = np.random.default_rng(seed)

    def search(
        weight: Float32, hessian: Float64, format: LinearFormat, *, shared: NDArray[np.integer] | None = None
    ) -> Float32:
        shared = np.arange(weight.shape[1]) if shared is None else shared
        drawn = np.exp(rng.uniform(-1.6, 1.6, shared.max() + 1)).astype(np.float32)
        return drawn[shared]

    return search
