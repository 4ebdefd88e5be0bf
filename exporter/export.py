"""The export, on one page: checkpoint → spec → text → weights → graph → bundle."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.bundle import file_entries, new_bundle
from pagelet.exporter.checkpoint import Checkpoint, open_checkpoint
from pagelet.exporter.early_exit import exit_after
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.options import GROUP_SIZES, GROUPED, ExportOptions
from pagelet.exporter.text import write_text_files
from pagelet.exporter.weights import WEIGHTS_NAME, Formats, OnTensor, type_name, write_weights
from pagelet.models.errors import InputError
from pagelet.models.manifest import Manifest, Quantization
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

GRAPH_NAME = "model.onnx"


def _silent(done: int, total: int, name: str) -> None:
    """Progress for callers who want none."""


def export(
    source: Path, out: Path, options: ExportOptions | None = None, *, on_progress: OnTensor = _silent
) -> Manifest:
    """Export a checkpoint (a Hugging Face folder or a GGUF file) into the bundle folder `out`.

    The bundle appears whole or not at all. Memory stays near one piece of one tensor.

    Raises:
        InputError: an option, or the destination.
        CheckpointError, UnsupportedError: the checkpoint.
        BundleError: writing failed.
    """
    options = options or ExportOptions()
    with open_checkpoint(source) as checkpoint, new_bundle(out, force=options.force) as folder:
        spec = _limited(checkpoint.spec, options.max_context)
        if options.layers is not None:
            spec = exit_after(checkpoint, spec, options.layers)
        text, generation = write_text_files(checkpoint, folder)
        formats = _formats(options, checkpoint)
        weights = write_weights(checkpoint, spec, formats, folder, on_progress)
        cache = CacheFormat(options.block_size, options.cache_type)
        ir.save(build_graph(spec, weights, cache, folder), folder / GRAPH_NAME)
        manifest = Manifest(
            spec=spec,
            quantization=_quantization(options, formats),
            text=text,
            files=file_entries(folder, frozenset({WEIGHTS_NAME})),
            tensors=weights.entries,
            source=checkpoint.describe(),
            graph=GRAPH_NAME,
            target=options.target,
            block_size=options.block_size,
            cache_type=options.cache_type,
            generation=generation,
            created_by=f"pagelet {version('pagelet')}",
        )
        manifest.save(folder)
    return manifest


def _limited(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    if max_context is None:
        return spec
    if max_context > spec.max_context:
        raise InputError(
            f"max context {max_context} is more than the model's own {spec.max_context} positions."
        )
    return replace(spec, max_context=max_context)


def _formats(options: ExportOptions, checkpoint: Checkpoint) -> Formats:
    group_size = options.inputs_per_scale
    if options.weights == "fp8" and options.group_size is None:
        group_size = _own_fp8_groups(checkpoint)
    if options.weights == "int4":
        layers = LinearFormat(4, group_size, asymmetric=not options.symmetric)
        int8 = LinearFormat(8, asymmetric=False)
        return Formats(layers, tables=int8 if options.embedding == "int8" else layers)
    if options.weights == "int8":
        int8 = LinearFormat(8, group_size, asymmetric=False)
        return Formats(int8, tables=int8)
    if options.weights == "fp8":
        # Three bits of mantissa in the head go straight into the logits: FP8 checkpoints too leave it alone.
        source = checkpoint.weights["embedding.weight"].dtype
        return Formats(FloatFormat("fp8", group_size), FloatFormat("bf16" if source == "BF16" else "f16"))
    plain = FloatFormat({"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[options.weights])
    return Formats(plain, tables=plain)


def _own_fp8_groups(checkpoint: Checkpoint) -> int:
    """Inputs per scale of an FP8 checkpoint, so that its numbers pass through; 0 where that cannot be."""
    rows = checkpoint.read_fp8("layers.0.mlp.down.weight", 0, 1)
    size = rows.group_size if rows else 0
    widths = [info.shape[1] for info in checkpoint.weights.values() if len(info.shape) == 2]
    return size if size in GROUP_SIZES and all(width % size == 0 for width in widths) else 0


def _quantization(options: ExportOptions, formats: Formats) -> Quantization:
    embedding = type_name(formats.tables)
    return Quantization(
        options.weights,
        "rtn" if options.weights in GROUPED else "none",
        formats.layers.group_size,
        options.symmetric,
        embedding="" if embedding == options.weights else embedding,
    )
