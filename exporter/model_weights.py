"""All weights of a model, layer by layer: planned by the quantizer, written, and run as they were written."""

from collections.abc import Callable
from pathlib import Path

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.layerwise import Part
from pagelet.exporter.quantize.quantizer import Quantizer
from pagelet.exporter.resume import Progress, load_progress, save_progress
from pagelet.exporter.weights import WEIGHTS_NAME, StoredWeights, WeightsFile, WeightsWriter, layer_units
from pagelet.models.spec import ModelSpec

OnProgress = Callable[[int, int, str], None]
"""on_progress(steps done, steps in all, name of the next)."""
OnNote = Callable[[str], None]
"""Something that the user should be told."""


def write_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    formats: Formats,
    quantizer: Quantizer,
    folder: Path,
    key: str,
    on_progress: OnProgress,
    on_note: OnNote,
) -> StoredWeights:
    """Write `folder`/model.weights; goes on where an export with the same `key` was cut.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, does not fit its format, or cannot be quantized; by
            its name.
    """
    progress = load_progress(folder, key)
    total = 4 * spec.num_layers + 2
    with WeightsFile(folder / WEIGHTS_NAME, keep=progress.length if progress else 0) as file:
        writer = WeightsWriter(checkpoint, file, progress.stored if progress else None)
        written = Part(spec, writer.stored, folder)
        if progress:
            on_note(
                f"going on where an earlier export stopped: {progress.layers} of {spec.num_layers} layers"
            )
            quantizer.residual = progress.residual
        else:
            on_progress(0, total, "embedding")
            writer.rope_tables(spec)
            writer.linear("embedding", ("embedding",), formats.of("embedding"), quantizer.table("embedding"))
            file.flush()
            quantizer.start(written)
        for layer in range(progress.layers if progress else 0, spec.num_layers):
            on_progress(4 * layer + 1, total, f"layers.{layer}")
            plan = quantizer.plan(layer)
            for part, (module, roles) in enumerate(layer_units(layer)):
                on_progress(4 * layer + 1 + part, total, module)
                writer.linear(module, roles, formats.of(module), plan.of(module))
            for norm in ("attention.norm", "mlp.norm"):
                writer.norm(f"layers.{layer}.{norm}", plan.norm_scales)
            file.flush()
            quantizer.advance(layer, written)
            save_progress(folder, key, Progress(layer + 1, file.length, writer.stored, quantizer.residual))
        on_progress(total - 1, total, "head")
        if not spec.tie_embeddings:
            writer.linear("head", ("head",), formats.of("head"), quantizer.table("head"))
        writer.norm("final_norm")
        on_progress(total, total, "")
    return writer.stored
