"""The export, on one page: checkpoint → spec → text → weights → graph → bundle."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.bundle import file_entries, new_bundle
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.text import write_text_files
from pagelet.exporter.weights import WEIGHTS_NAME, Formats, OnTensor, write_weights
from pagelet.models.errors import InputError
from pagelet.models.manifest import Manifest, Quantization
from pagelet.models.spec import ModelSpec
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
        text, generation = write_text_files(checkpoint, folder)
        weights = write_weights(checkpoint, spec, _formats(options), folder, on_progress)
        cache = CacheFormat(options.block_size, options.cache_type)
        ir.save(build_graph(spec, weights, cache, folder), folder / GRAPH_NAME)
        manifest = Manifest(
            spec=spec,
            quantization=_quantization(options),
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


def _formats(options: ExportOptions) -> Formats:
    if options.weights == "fp32":
        return Formats(layers=None, tables=None)
    layers = LinearFormat(4, options.group_size, asymmetric=not options.symmetric)
    int8 = LinearFormat(8, asymmetric=False)
    return Formats(layers, tables=int8 if options.embedding == "int8" else layers)


def _quantization(options: ExportOptions) -> Quantization:
    if options.weights == "fp32":
        return Quantization("fp32")
    return Quantization(
        options.weights, "rtn", options.group_size, options.symmetric, embedding=options.embedding
    )
