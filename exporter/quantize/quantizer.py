"""The quantizers as an export sees them: before a layer is written, how; after it, what follows from it.

    rtn     each group alone, with a searched clip: no text is run
    awq     columns scaled by what activations say, folded into what computes them (Lin et al. 2023)
    gptq    columns rounded one after another, each error spread over those to come (Frantar et al. 2022)

The last two run the calibration texts through each layer twice: as it was, for its inputs; and as it was
written, so that the next layer is quantized for the inputs that it will really get.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pagelet.exporter.calibration.moments import Float64, LayerMoments, head_hessian, small_weights
from pagelet.exporter.formats import TABLES, Formats
from pagelet.exporter.job import Job
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.modules import is_routed, layer_units, linear_units
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.awq import foldable, search_input_scales
from pagelet.exporter.quantize.gptq import Gptq
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.exporter.stacked_rows import PLAIN, Round, Treatment, named, nearest, sample_rows
from pagelet.exporter.stream import Float32, Stream
from pagelet.exporter.weights import stacked
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import LinearFormat

# Rows that the search for scales looks at: they are alike enough.
_SAMPLE_ROWS = 1024
# The rows of a shared table are inputs too, and those are not to move far.
_TABLE_DAMPING = 0.1


@dataclass(frozen=True)
class LayerPlan:
    """How a layer's matrices are written, by module, and what its norms' weights are divided by."""

    treatments: Mapping[str, Treatment] = field(default_factory=dict)
    norm_scales: Mapping[str, Float32] = field(default_factory=dict)

    def of(self, module: str) -> Treatment:
        return self.treatments.get(module, PLAIN)


class Quantizer(Protocol):
    """Called in this order: `table`, `start`, `plan` and `advance` for each layer, `table` again."""

    stream: Stream | None
    """What an interrupted export must keep: the calibration texts' stream before the next layer."""
    notes: list[str]
    """What the user should be told."""

    def table(self, module: str) -> Treatment:
        """Of the embedding table, or of the head."""

    def start(self, embedding: Part) -> None: ...

    def plan(self, layer: int) -> LayerPlan: ...

    def advance(self, layer: int, written: Part) -> None: ...

    def close(self) -> None: ...


def open_quantizer(job: Job, formats: Formats, texts: list[list[int]]) -> Quantizer:
    """The quantizer that the options name, to be closed; `texts`: token ids to calibrate on."""
    options = job.options
    if options.is_calibrated and _nothing_to_round(job, formats):
        job.on_note(
            "the checkpoint holds all matrices in these formats already: nothing is quantized, and "
            f"{options.quantizer} looks at no text"
        )
    elif options.is_calibrated:
        return Calibrated(
            job,
            formats,
            Layerwise(Texts.of(texts), job.cache),
            error_feedback=options.quantizer != "awq",
            scaling=options.quantizer == "awq",
        )
    return RoundToNearest(job.spec, formats, fp8_blocks=options.block_scales)


def _nothing_to_round(job: Job, formats: Formats) -> bool:
    """Whether every matrix that the quantizer would touch is the checkpoint's own."""
    return all(
        stacked(job.checkpoint, module, roles, format).kept
        for module, roles in linear_units(job.spec)
        if isinstance(format := formats.of(module), LinearFormat)
        and not (module in TABLES and format.bits == 8)
    )


class RoundToNearest:
    """Every group alone."""

    def __init__(self, spec: ModelSpec, formats: Formats, *, fp8_blocks: bool = False) -> None:
        self._spec = spec
        self._formats = formats
        self._fp8_blocks = fp8_blocks
        self.stream: Stream | None = None
        self.notes: list[str] = []

    def table(self, module: str) -> Treatment:
        return nearest(self._formats.of(module), fp8_blocks=self._fp8_blocks)

    def start(self, embedding: Part) -> None:
        """Nothing is run."""

    def plan(self, layer: int) -> LayerPlan:
        return LayerPlan({module: self.table(module) for module, _ in layer_units(self._spec, layer)})

    def advance(self, layer: int, written: Part) -> None:
        """Nothing is run."""

    def close(self) -> None:
        """Nothing is held."""


class Calibrated:
    """`awq` and `gptq`."""

    def __init__(
        self, job: Job, formats: Formats, layerwise: Layerwise, *, error_feedback: bool, scaling: bool
    ) -> None:
        """`error_feedback`: round as GPTQ does; `scaling`: fold AWQ's scales."""
        self._checkpoint = job.checkpoint
        self._spec = job.spec
        self._formats = formats
        self._layerwise = layerwise
        self._error_feedback = error_feedback
        self._scaling = scaling
        self._desc_act = job.options.desc_act
        longest = max(layerwise.texts.lengths)
        self._original = Original(job.checkpoint, job.spec, longest, job.folder)
        self.stream: Stream | None = None
        self.notes: list[str] = []
        if any(layer.experts for layer in job.spec.layers):
            self.notes.append(
                "experts are rounded to the nearest: a calibration text reaches most too seldom"
            )

    def table(self, module: str) -> Treatment:
        """The head, or the table that it shares, for what it will read; an embedding alone to the nearest."""
        format = self._formats.of(module)
        is_head = module == ("embedding" if self._spec.tie_embeddings else "head")
        if not is_head or not isinstance(format, LinearFormat) or format.bits == 8:
            return nearest(format)
        stream = self._original_output() if module == "embedding" else self.stream
        assert stream is not None
        hessian = head_hessian(self._checkpoint, self._spec, stream.residual)
        return Treatment(self._round(module, hessian, format, None, damping=_TABLE_DAMPING))

    def _original_output(self) -> Stream:
        """The calibration texts' stream behind the original's last layer."""
        run, original = self._layerwise, self._original
        stream = run.embed(original.embedding())
        for layer in range(self._spec.num_layers):
            stream = run.layer(original.layer(layer), layer, stream)
        return stream

    def start(self, embedding: Part) -> None:
        self.stream = self._layerwise.embed(embedding)

    def plan(self, layer: int) -> LayerPlan:
        moments = self._moments(layer)
        at = f"layers.{layer}."
        hessians = {
            module: moments.hessian(module.removeprefix(at))
            for module, _ in layer_units(self._spec, layer)
            if not is_routed(module)
        }
        scales = self._search(layer, hessians) if self._scaling else _Scales()
        treatments = {}
        for module, roles in layer_units(self._spec, layer):
            treatment = scales.treatment(module)
            format = self._formats.of(module)
            kept = stacked(self._checkpoint, module, roles, format, treatment).kept
            if is_routed(module):
                treatment = nearest(format)
            elif isinstance(format, LinearFormat) and not kept:
                round = self._round(module, hessians[module], format, treatment.input_scales)
                treatment = Treatment(round, treatment.input_scales, treatment.output_scales)
            treatments[module] = treatment
        return LayerPlan(
            treatments, {role: scales.outputs[role] for role in scales.outputs if "norm" in role}
        )

    def advance(self, layer: int, written: Part) -> None:
        assert self.stream is not None
        self.stream = self._layerwise.layer(written, layer, self.stream)

    def close(self) -> None:
        self._original.close()

    def _moments(self, layer: int) -> LayerMoments:
        assert self.stream is not None, "start comes first"
        norms = small_weights(self._checkpoint, self._spec, layer)
        moments = LayerMoments(self._spec, layer, norms)
        self._layerwise.layer(self._original.layer(layer), layer, self.stream, moments.add)
        return moments

    def _round(
        self,
        module: str,
        hessian: Float64,
        format: LinearFormat,
        input_scales: Float32 | None,
        damping: float = 0.01,
    ) -> Round:
        if input_scales is not None:
            hessian = hessian / np.outer(input_scales, input_scales)
        importance = np.diag(hessian).astype(np.float32)
        if not self._error_feedback:
            return lambda rows: round_to_nearest(rows, format, importance)
        with named(module):
            gptq = Gptq(hessian, format, damping=damping, desc_act=self._desc_act)
        if gptq.dead_inputs:
            self.notes.append(
                f"{module}: {gptq.dead_inputs} of {len(hessian)} inputs are zero in the whole calibration "
                "text; their weights are rounded to the nearest. A text of the kind that the model will read "
                "may help."
            )
        return gptq

    def _search(self, layer: int, hessians: Mapping[str, Float64]) -> "_Scales":
        """Of the inputs of each linear layer, those nearest the output first: they scale rows further up."""
        scales = _Scales()
        units = dict(layer_units(self._spec, layer))
        for module, source in foldable(self._spec, layer).items():
            format = self._formats.of(module)
            if not isinstance(format, LinearFormat) or format.bits == 8:
                continue
            rows = stacked(self._checkpoint, module, units[module], format, scales.treatment(module))
            # Scales would only make the checkpoint's own numbers inexact: here, or where they are divided.
            if rows.kept or self._is_kept(source):
                continue
            shared = self._shared_values(layer) if module.endswith("attention.o") else None
            sample = np.concatenate([rows.floats(*some) for some in sample_rows(rows.count, _SAMPLE_ROWS)])
            with named(module):
                found = search_input_scales(sample, hessians[module], format, shared=shared)
            if np.all(found == 1):
                continue
            scales.inputs[module] = found
            scales.outputs[source] = (
                found if shared is None else found[np.unique(shared, return_index=True)[1]]
            )
        return scales

    def _is_kept(self, source: str) -> bool:
        """Whether the role that outputs are divided in is of a matrix that passes through unchanged."""
        for module, roles in layer_units(self._spec, int(source.split(".")[1])):
            if source in roles:
                return stacked(self._checkpoint, module, roles, self._formats.of(module)).kept
        return False

    def _shared_values(self, layer: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Of each input of o, the channel of v that it is a mean of: query heads of a group share one."""
        spec = self._spec
        kind = spec.layers[layer]
        kv_heads = np.arange(spec.num_heads) // (spec.num_heads // kind.num_kv_heads)
        return (kv_heads[:, None] * kind.head_dim + np.arange(kind.head_dim)).reshape(-1)


@dataclass
class _Scales:
    """Of inputs by module, and by role of what computes them (rows, biases and norms are divided)."""

    inputs: dict[str, Float32] = field(default_factory=dict)
    outputs: dict[str, Float32] = field(default_factory=dict)

    def treatment(self, module: str) -> Treatment:
        return Treatment(None, self.inputs.get(module), self.outputs_of(module))

    def outputs_of(self, module: str) -> dict[str, Float32]:
        part = {"qkv": ("v",), "gate_up": ("up",)}.get(module.rpartition(".")[2], ())
        roles = [f"{module.rpartition('.')[0]}.{name}" for name in part]
        return {role: self.outputs[role] for role in roles if role in self.outputs}
