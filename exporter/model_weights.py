"""All weights of a model, layer by layer: planned by the quantizer, written, and run as they were written."""

from pagelet.exporter.formats import Formats
from pagelet.exporter.job import Job
from pagelet.exporter.modules import layer_input_units, layer_units, layer_vectors, linear_units, norm_vectors
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import Quantizer
from pagelet.exporter.resume import Progress, load_progress, save_progress
from pagelet.exporter.weights import WEIGHTS_NAME, StoredWeights, WeightsFile, WeightsWriter


def write_weights(job: Job, formats: Formats, quantizer: Quantizer) -> StoredWeights:
    """Write the folder's model.weights; goes on where an export with the same key was cut.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, does not fit its format, or cannot be quantized; by
            its name.
    """
    checkpoint, spec, folder, on_progress = job.checkpoint, job.spec, job.folder, job.on_progress
    progress = load_progress(folder, job.key)
    done = {module: number for number, (module, _) in enumerate(linear_units(spec))}
    total = len(done) + spec.tie_embeddings  # the head is a step in either case
    with WeightsFile(folder / WEIGHTS_NAME, keep=progress.length if progress else 0) as file:
        writer = WeightsWriter(checkpoint, file, progress.stored if progress else None)
        written = Part(spec, writer.stored, folder)
        if progress:
            job.on_note(
                f"going on where an earlier export stopped: {progress.layers} of {spec.num_layers} layers"
            )
            quantizer.stream = progress.stream
        else:
            on_progress(0, total, "embedding")
            writer.tables(spec)
            writer.linear("embedding", ("embedding",), formats.of("embedding"), quantizer.table("embedding"))
            for module, roles in layer_input_units(spec):
                on_progress(done[module], total, module)
                writer.linear(module, roles, formats.of(module), quantizer.table(module))
            file.flush()
            quantizer.start(written)
        first = progress.layers if progress else 0
        for layer in range(first, spec.num_layers):
            on_progress(done[f"layers.{layer}.attention.qkv"], total, f"layers.{layer}")
            plan = quantizer.plan(layer)
            for module, roles in layer_units(spec, layer):
                on_progress(done[module], total, module)
                writer.linear(module, roles, formats.of(module), plan.of(module))
            for role in layer_vectors(spec, layer):
                writer.vector(role, plan.norm_scales)
            file.flush()
            quantizer.advance(layer, written)
            save_progress(folder, job.key, Progress(layer + 1, file.length, writer.stored, quantizer.stream))
        on_progress(total - 1, total, "head")
        if not spec.tie_embeddings:
            writer.linear("head", ("head",), formats.of("head"), quantizer.table("head"))
        for role in norm_vectors(spec, "final_norm"):
            writer.vector(role)
        on_progress(total, total, "")
    return writer.stored
