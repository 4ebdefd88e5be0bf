"""Where in a model the distance arises: one layer of a bundle at a time, among the reference's others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.graph_builder import path
from pagelet.exporter.options import INTEGERS
from pagelet.exporter.part import Part
from pagelet.exporter.sensitivity import Sensitivity, Variant
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.weights import Linear, StoredTensor, StoredWeights
from pagelet.models.errors import InputError
from pagelet.models.manifest import TensorEntry, load_manifest
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

_DTYPES = {int(onnx.TensorProto.FLOAT): "float32", int(onnx.TensorProto.UINT8): "uint8"}


def layer_kl(
    bundle: Path, reference: Path, pieces: Sequence[Sequence[int]], on_layer: Callable[[int, int, str], None]
) -> list[float]:
    """Mean KL divergence in nats, for each layer, of the reference with that layer's weights from the bundle.

    The embedding and the head are the reference's; keys and values are stored as the reference stores them.

    Raises:
        InputError: the bundles are not of one model.
    """
    original, rounded = bundle_part(reference), bundle_part(bundle)
    if replace(original.spec, max_context=rounded.spec.max_context) != rounded.spec:
        raise InputError(f"{bundle} and {reference} are not of one model: their specs differ.")
    manifest = load_manifest(reference)
    runs = Sensitivity(pieces, CacheFormat(manifest.block_size, manifest.cache_type))
    runs.embed(original)
    layers = original.spec.num_layers
    for layer in range(layers):
        on_layer(layer, layers, f"layer {layer}")
        branches = runs.branch(layer, [Variant(str(layer), rounded)])
        runs.advance(original, layer, branches)
    divergences = runs.divergences(original, {})
    return [divergences[str(layer)] for layer in range(layers)]


def bundle_part(folder: Path) -> Part:
    """A finished bundle's weights, as the exporter knew them when it wrote their graph.

    Raises:
        BundleError: no bundle.
    """
    manifest = load_manifest(folder)
    graph = onnx.load(str(folder / manifest.graph), load_external_data=False).graph
    stored = [
        tensor for tensor in graph.initializer if tensor.external_data
    ]  # the others belong to the graph
    tensors = {tensor.name: _tensor(tensor) for tensor in stored}
    learned = manifest.spec.mlp.activation == "xielu"
    parameters = {node.name: _activation_parameters(node) for node in graph.node if learned}
    linears = {}
    for module, entry in manifest.tensors.items():
        weight, bias = tensors.pop(module + ".weight"), tensors.pop(module + ".bias", None)
        rows, width = entry.shape
        linears[module] = Linear(
            width,
            rows,
            _format(entry),
            weight,
            bias,
            gated=module.endswith(".gate_up"),
            activation_parameters=parameters.get(path(module), ())
            if manifest.spec.mlp.activation == "xielu"
            else (),
        )
    return Part(manifest.spec, StoredWeights(linears, tensors, manifest.tensors), folder)


def _tensor(tensor: onnx.TensorProto) -> StoredTensor:
    place = {entry.key: entry.value for entry in tensor.external_data}
    dtype = _DTYPES[tensor.data_type]
    return StoredTensor(tensor.name, dtype, tuple(tensor.dims), int(place["offset"]), int(place["length"]))


def _activation_parameters(node: onnx.NodeProto) -> tuple[float, ...]:
    found = {each.name: each.f for each in node.attribute if each.name.startswith("activation_")}
    return tuple(found[name] for name in sorted(found))


def _format(entry: TensorEntry) -> WeightFormat:
    if entry.type in INTEGERS:
        return LinearFormat(int(entry.type[3:]), entry.group_size, asymmetric=not entry.symmetric)
    return FloatFormat({"fp16": "f16", "fp32": "f32"}.get(entry.type, entry.type), entry.group_size)
