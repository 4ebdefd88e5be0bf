"""Bundles with a certificate over texts that a test chooses, and ways to damage them behind its back."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from pagelet.exporter import ExportOptions
from pagelet.exporter.bundle import file_entries
from pagelet.exporter.certificate import certify
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import choose_formats, describe
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.modules import layer_vectors, linear_units, norm_vectors
from pagelet.exporter.part import Part
from pagelet.exporter.text import write_text_files
from pagelet.exporter.weights import WEIGHTS_NAME, WeightsFile, WeightsWriter
from pagelet.models.certificate import CERTIFICATE_NAME, Certificate
from pagelet.models.manifest import MANIFEST_NAME, Manifest, load_manifest

VOCAB = 320  # of the tiny checkpoints


def random_texts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    tokens: list[list[int]] = np.random.default_rng(seed).integers(2, VOCAB, (count, length)).tolist()
    return tokens


def write_certified(
    source: Path,
    folder: Path,
    options: ExportOptions,
    texts: Sequence[Sequence[int]] | None = None,
    golden: Sequence[Sequence[int]] | None = None,
    seconds: float = 60.0,
    on_progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Certificate:
    """A bundle of `source` in the new `folder`, and its certificate."""
    folder.mkdir()
    cache = CacheFormat(options.tokens_per_block, options.cache_type)
    with open_checkpoint(source) as checkpoint:
        spec, formats = checkpoint.spec, choose_formats(options, checkpoint)
        text, generation = write_text_files(checkpoint, folder)
        with WeightsFile(folder / WEIGHTS_NAME) as file:
            writer = WeightsWriter(checkpoint, file)
            writer.tables(spec)
            for module, roles in linear_units(spec):
                writer.linear(module, roles, formats.of(module))
            for layer in range(spec.num_layers):
                for role in layer_vectors(spec, layer):
                    writer.vector(role)
            for role in norm_vectors(spec, "final_norm"):
                writer.vector(role)
        graph = folder / "model.onnx"
        ir.save(build_graph(Part(spec, writer.stored, folder), cache), graph)
        certificate = certify(
            checkpoint,
            Part(spec, writer.stored, folder),
            cache,
            texts or random_texts(2, 60),
            golden or random_texts(3, 20, seed=1),
            graph=graph,
            seconds=seconds,
            threads=2,
            on_progress=on_progress,
        )
        Manifest(
            spec,
            describe(options, formats),
            text,
            file_entries(folder, frozenset({WEIGHTS_NAME})),
            writer.stored.entries,
            checkpoint.describe(),
            block_size=options.tokens_per_block,
            cache_type=options.cache_type,
            generation=generation,
            certificate=CERTIFICATE_NAME,
        ).save(folder)
    return certificate


def rehash(bundle: Path) -> None:
    """Make the manifest agree with whatever the files hold now."""
    manifest = load_manifest(bundle)
    files = file_entries(bundle, frozenset({WEIGHTS_NAME}))
    del files[MANIFEST_NAME]
    replace(manifest, files=files).save(bundle)


def edit_graph(bundle: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, bundle / "model.onnx")


def edit_weight(bundle: Path, name: str, change: Callable[[NDArray[Any]], None]) -> None:
    """`change` the bytes, uint8, of a tensor in place."""
    offset, length = place(onnx.load(bundle / "model.onnx", load_external_data=False).graph, name)
    data = np.memmap(bundle / WEIGHTS_NAME, np.uint8, "r+", offset, (length,))
    change(data)
    data.flush()


def place(graph: onnx.GraphProto, name: str) -> tuple[int, int]:
    """(offset, length) of a tensor in the weights file."""
    tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
    external = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    return external["offset"], external["length"]


def swap_layers(bundle: Path, first: int, second: int) -> None:
    def swap(graph: onnx.GraphProto) -> None:
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        for name, tensor in tensors.items():
            if name.startswith(f"layers.{first}."):
                other = tensors[name.replace(f"layers.{first}.", f"layers.{second}.")]
                before = onnx.TensorProto()
                before.CopyFrom(tensor)
                tensor.CopyFrom(other)
                other.CopyFrom(before)
                tensor.name, other.name = other.name, tensor.name

    edit_graph(bundle, swap)
    rehash(bundle)


def wrong_rope_base(bundle: Path) -> None:
    spec = load_manifest(bundle).spec
    rope = replace(spec.ropes[0], theta=spec.ropes[0].theta * 2)
    for name, table in zip(("rope.0.cos", "rope.0.sin"), rope.tables(spec.max_context, 0), strict=True):
        values = np.ascontiguousarray(table, np.float32).view(np.uint8).reshape(-1)
        edit_weight(bundle, name, lambda data, values=values: data.__setitem__(slice(None), values))
    rehash(bundle)


def wrong_epsilon(bundle: Path, node: str) -> None:
    def change(graph: onnx.GraphProto) -> None:
        attributes = next(n for n in graph.node if n.name == node).attribute
        epsilon = next(attribute for attribute in attributes if attribute.name == "epsilon")
        epsilon.f /= 10

    edit_graph(bundle, change)
    rehash(bundle)


def double_a_scale(bundle: Path, weight: str) -> None:
    """Of the third output and the first group of an int4 weight in groups of 32."""

    def change(data: NDArray[Any]) -> None:
        data[256:288].view(np.float16)[2] *= 2

    edit_weight(bundle, weight, change)
    rehash(bundle)
