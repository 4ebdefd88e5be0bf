"""`auto`: a bit budget, spent matrix by matrix where a few texts say that it helps most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pagelet.exporter.calibration.moments import Float64, LayerMoments, head_hessian, small_weights
from pagelet.exporter.formats import ROUTER, Formats
from pagelet.exporter.job import Job
from pagelet.exporter.modules import is_routed, layer_units, linear_units
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.allocation import Choice, allocate
from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.exporter.resume import load_formats, save_formats
from pagelet.exporter.sensitivity import Sensitivity, Variant
from pagelet.exporter.stacked_rows import StackedRows, Treatment, named, nearest, sample_rows
from pagelet.exporter.stream import Float32
from pagelet.exporter.weights import stacked
from pagelet.models.errors import InputError
from pagelet.plugins.packing import GROUP_SIZES, LinearFormat, dequantize

DEFAULT_BITS = 4.5
# Tokens that the costs are measured on, in so many texts: all matrices are measured on the same ones.
NUM_TEXTS, TEXT_TOKENS = 2, 128
# Rows that a format's error is measured on: its share of the matrix is scaled up.
_SAMPLE_ROWS = 512


@dataclass(frozen=True)
class Measured:
    """A matrix: what rounding it in the basic format cost, and the error of every format (Δw H Δwᵀ)."""

    divergence: float
    errors: dict[LinearFormat, float]
    basic: LinearFormat

    def choices(self, rows: int, width: int) -> list[Choice]:
        """A divergence grows with the square of the outputs' error, so it scales as the errors do."""
        unit = self.divergence / self.errors[self.basic] if self.errors[self.basic] else 0.0
        return [Choice(f, f.packed_bytes(width, rows), unit * error) for f, error in self.errors.items()]


def spend_budget(job: Job, texts: list[list[int]]) -> Formats:
    """Formats of all matrices within the bits per weight of all together, scales included.

    What is found stays in the folder for an export with the same key that goes on after a cut.

    Raises:
        InputError: a budget below the smallest formats.
        CheckpointError: a matrix that no group size divides.
    """
    if (kept := load_formats(job.folder, job.key)) is not None:
        return kept
    small = LinearFormat(4, 32, asymmetric=False)
    sizes = {
        module: stacked(job.checkpoint, module, roles, small)
        for module, roles in linear_units(job.spec)
        if _is_measured(module)
    }
    budget = _budget(job.options, sizes)
    measured = _Measuring(job, texts).run()
    choices = {m: measured[m].choices(rows.count, rows.width) for m, rows in sizes.items()}
    chosen = allocate(choices, budget)
    basic = LinearFormat(4, 32, asymmetric=not job.options.is_symmetric)
    formats = Formats(basic, basic, {module: choice.format for module, choice in chosen.items()})
    save_formats(job.folder, job.key, formats)
    return formats


def _is_measured(module: str) -> bool:
    """Not those that stay in full, nor what all layers' own inputs come from: it has the basic format."""
    return not module.endswith(ROUTER) and not module.startswith("layer_inputs.")


def _budget(options: ExportOptions, sizes: Mapping[str, StackedRows]) -> int:
    """Bytes of all matrices; refused at once where not even the smallest formats fit."""
    weights = sum(rows.count * rows.width for rows in sizes.values())
    budget = int(weights * (options.bits_per_weight or DEFAULT_BITS) / 8)
    least = sum(
        min(f.packed_bytes(rows.width, rows.count) for f in candidates(rows.width, options.is_symmetric))
        for rows in sizes.values()
    )
    if least > budget:
        raise InputError(
            f"bits per weight is {options.bits_per_weight or DEFAULT_BITS:g}; this model's smallest formats "
            f"take {8 * least / weights:.3f}: raise --bits-per-weight."
        )
    return budget


def candidates(width: int, symmetric: bool) -> Iterator[LinearFormat]:
    """Formats that a matrix of so many inputs may get."""
    for group in GROUP_SIZES:
        if width % group == 0:
            yield LinearFormat(4, group, asymmetric=False)
            if not symmetric:
                yield LinearFormat(4, group, asymmetric=True)
            yield LinearFormat(8, group, asymmetric=False)


class _Measuring:
    """One walk through the model."""

    def __init__(self, job: Job, texts: list[list[int]]) -> None:
        self._job = job
        self._checkpoint = job.checkpoint
        self._spec = job.spec
        self._basic: dict[str, LinearFormat] = {}
        self._texts = [text[:TEXT_TOKENS] for text in texts[:NUM_TEXTS]]
        self._run = Sensitivity(self._texts, job.cache)
        self._errors: dict[str, dict[LinearFormat, float]] = {}

    def run(self) -> dict[str, Measured]:
        spec, total = self._spec, self._spec.num_layers + 2
        longest = max(map(len, self._texts))
        with (
            Original(self._checkpoint, spec, longest, self._job.folder) as original,
            Original(self._checkpoint, spec, longest, self._job.folder) as changed,
        ):
            self._job.on_progress(0, total, "measure embedding")
            basic = self._choose_basic("embedding", ("embedding",))
            table = {"embedding": (basic, nearest(basic))}
            variant = Variant("embedding", changed.embedding(table))
            self._run.embed(original.embedding(), [variant])
            for layer in range(spec.num_layers):
                self._job.on_progress(layer + 1, total, f"measure layers.{layer}")
                self._layer(original.layer(layer), changed, layer)
            self._job.on_progress(total - 1, total, "measure head")
            hessian = head_hessian(self._checkpoint, spec, self._run.output)
            head = "embedding" if spec.tie_embeddings else "head"
            if head == "head":  # tokens are looked up alike often, for all that is known
                self._errors["embedding"] = self._format_errors("embedding", ("embedding",), None)
            basic = self._choose_basic(head, (head,))
            self._errors[head] = self._format_errors(head, (head,), hessian)
            treatment = _nearest(basic, np.diag(hessian).astype(np.float32))
            heads = {head: changed.head({head: (basic, treatment)})}
            divergences = self._run.divergences(original.head(), heads)
        return {m: Measured(divergences[m], errors, self._basic[m]) for m, errors in self._errors.items()}

    def _layer(self, original: Part, changed: Original, layer: int) -> None:
        """Errors of the layer's matrices in all formats; their variants branch off."""
        norms = small_weights(self._checkpoint, self._spec, layer)
        moments = LayerMoments(self._spec, layer, norms)
        self._run.moments(original, layer, moments)
        branches = []
        for module, roles in layer_units(self._spec, layer):
            if not _is_measured(module):
                continue
            hessian = None if is_routed(module) else moments.hessian(module.removeprefix(f"layers.{layer}."))
            importance = None if hessian is None else np.diag(hessian).astype(np.float32)
            basic = self._choose_basic(module, roles)
            self._errors[module] = self._format_errors(module, roles, hessian)
            part = changed.layer(layer, {module: (basic, _nearest(basic, importance))})
            branches += self._run.branch(layer, [Variant(module, part)])
        self._run.advance(original, layer, branches)

    def _format_errors(
        self, module: str, roles: tuple[str, ...], hessian: Float64 | None
    ) -> dict[LinearFormat, float]:
        rows = stacked(self._checkpoint, module, roles, self._basic[module])
        sample = np.concatenate([rows.floats(*some) for some in sample_rows(rows.count, _SAMPLE_ROWS)])
        share = rows.count / len(sample)
        importance = None if hessian is None else np.diag(hessian).astype(np.float32)
        errors = {}
        for format in candidates(rows.width, self._job.options.is_symmetric):
            kept = stacked(self._checkpoint, module, roles, format).kept
            with named(module):
                errors[format] = 0.0 if kept else share * _error(sample, format, importance, hessian)
        return errors

    def _choose_basic(self, module: str, roles: tuple[str, ...]) -> LinearFormat:
        """Symmetric INT4 in the smallest groups in which the checkpoint's own numbers have to be rounded."""
        width = self._checkpoint.weights[roles[0] + ".weight"].shape[1]
        coarse = [LinearFormat(4, group, asymmetric=False) for group in GROUP_SIZES if width % group == 0]
        basic = next(
            (f for f in coarse if not stacked(self._checkpoint, module, roles, f).kept),
            LinearFormat(4, 32, asymmetric=False),
        )
        self._basic[module] = basic
        return basic


def _nearest(format: LinearFormat, importance: Float32 | None) -> Treatment:
    return Treatment(round=lambda rows: round_to_nearest(rows, format, importance))


def _error(rows: Float32, format: LinearFormat, importance: Float32 | None, hessian: Float64 | None) -> float:
    restored = dequantize(*round_to_nearest(rows, format, importance), format)
    if hessian is None:
        return float(np.square(rows - restored, dtype=np.float64).sum())
    return float(output_error(rows, restored, hessian).sum())
