"""The export, on one page: checkpoint → spec → text → formats → weights → target → certificate → bundle."""

from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.bundle import file_entries, new_bundle
from pagelet.exporter.calibration.corpus import calibration_texts
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.early_exit import exit_after
from pagelet.exporter.formats import choose_formats, describe, quantized_again
from pagelet.exporter.graph import build_graph
from pagelet.exporter.job import Job, OnNote, OnProgress, silent
from pagelet.exporter.model_weights import write_weights
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.part import Part
from pagelet.exporter.proof import prove
from pagelet.exporter.quantize.auto import spend_budget
from pagelet.exporter.quantize.quantizer import open_quantizer
from pagelet.exporter.resume import clear_progress, export_key, resumes
from pagelet.exporter.targets import check_model, finish, lower
from pagelet.exporter.targets.finish import ENGINE_NAME
from pagelet.exporter.targets.gpu_builder import LOWERED_NAME
from pagelet.exporter.text import write_text_files
from pagelet.exporter.weights import WEIGHTS_NAME
from pagelet.models.errors import InputError
from pagelet.models.manifest import Manifest
from pagelet.models.spec import ModelSpec
from pagelet.models.text import Tokenizer

GRAPH_NAME = "model.onnx"


def export(
    source: Path,
    out: Path,
    options: ExportOptions | None = None,
    *,
    on_progress: OnProgress = silent,
    on_note: OnNote = silent,
) -> Manifest:
    """Export a checkpoint (a Hugging Face folder or a GGUF file) into the bundle folder `out`.

    The bundle appears whole or not at all; an export that was interrupted goes on at its layer when it is
    asked for again. Memory stays near one piece of one tensor, with a calibration or a certificate near one
    layer and the activations of the texts.

    Raises:
        InputError: an option, the calibration's text, or the destination.
        CheckpointError, UnsupportedError: the checkpoint, or the adapter.
        UnfinishedError: the bundle is further from the original than `options.max_kl` allows.
        BundleError: writing failed.
    """
    options = options or ExportOptions()
    with open_checkpoint(source, options.adapter) as checkpoint:
        key = export_key(checkpoint, options)
        spec = _limited(checkpoint.spec, options.max_context)
        if options.layers is not None:
            spec = exit_after(checkpoint, spec, options.layers)
        with new_bundle(out, force=options.force, resumes=lambda left: resumes(left, key)) as folder:
            job = Job(checkpoint, spec, options, folder, key, on_progress, on_note)
            check_model(job)
            text, generation = write_text_files(checkpoint, folder)
            tokenizer = Tokenizer.open(folder, text)
            texts = calibration_texts(options, tokenizer, spec.max_context)
            formats = choose_formats(options, checkpoint)
            if options.quantizer == "auto":
                formats = spend_budget(job, texts)
            with closing(open_quantizer(job, formats, texts)) as quantizer:
                weights = write_weights(job, formats, quantizer)
            part = lower(job, Part(spec, weights, folder), tokenizer)
            ir.save(build_graph(part, job.cache), folder / GRAPH_NAME)
            certificate = prove(job, part, tokenizer, folder / GRAPH_NAME)
            gpu = finish(job, part, folder / GRAPH_NAME)
            for note in (*checkpoint.notes, *quantized_again(spec, checkpoint, formats), *quantizer.notes):
                on_note(note)
            clear_progress(folder)
            if gpu is not None:  # its weights lie in a file of their own
                (folder / WEIGHTS_NAME).unlink()
            manifest = Manifest(
                spec=spec,
                quantization=describe(options, formats),
                text=text,
                files=file_entries(folder, frozenset({WEIGHTS_NAME, LOWERED_NAME, ENGINE_NAME})),
                tensors=weights.entries,
                source=checkpoint.describe(),
                graph=GRAPH_NAME,
                target=options.target,
                block_size=options.tokens_per_block,
                cache_type=options.cache_type,
                generation=generation,
                created_by=f"pagelet {version('pagelet')}",
                certificate=certificate,
                gpu=gpu,
            )
            manifest.save(folder)
    return manifest


def _limited(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    """With the context that the bundle is made for, and the rotations that it then has."""
    longest = max((rope.reach(spec.max_context) for rope in spec.ropes), default=spec.max_context)
    if max_context is not None and max_context > longest:
        raise InputError(f"max context {max_context} is more than the model's own {longest} positions.")
    context = max_context or spec.max_context
    ropes = tuple(rope.for_context(context) for rope in spec.ropes)
    return replace(spec, max_context=context, ropes=ropes)
