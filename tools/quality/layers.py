"""Where in a model the distance arises: one layer of a bundle at a time, among the reference's others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Part
from pagelet.exporter.sensitivity import Sensitivity, Variant
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.weights import Linear, StoredTensor, StoredWeights
from pagelet.models.errors import InputError
from pagelet.models.manifest import load_manifest
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
    tensors = {tensor.name: _tensor(tensor) for tensor in graph.initializer}
    linears = {}
    for node in graph.node:
        module = node.name.removeprefix("/").replace("/", ".")
        if module in manifest.tensors:
            linears[module] = _linear(node, tensors)
    used = {linear.weight.name for linear in linears.values()}
    used |= {linear.bias.name for linear in linears.values() if linear.bias}
    vectors = {name: tensor for name, tensor in tensors.items() if name not in used}
    return Part(manifest.spec, StoredWeights(linears, vectors, manifest.tensors), folder)


def _tensor(tensor: onnx.TensorProto) -> StoredTensor:
    place = {entry.key: entry.value for entry in tensor.external_data}
    dtype = _DTYPES[tensor.data_type]
    return StoredTensor(tensor.name, dtype, tuple(tensor.dims), int(place["offset"]), int(place["length"]))


def _linear(node: onnx.NodeProto, tensors: Mapping[str, StoredTensor]) -> Linear:
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    bias = node.input[2] if len(node.input) > 2 else ""
    return Linear(
        attributes["in_features"],
        attributes["out_features"],
        _format(attributes),
        tensors[node.input[1]],
        tensors[bias] if bias else None,
        gated=bool(attributes.get("gated", 0)),
    )


def _format(attributes: Mapping[str, Any]) -> WeightFormat:
    kind, group_size = attributes["weight_type"].decode(), attributes.get("group_size", 0)
    if kind.startswith("int"):
        return LinearFormat(int(kind[3:]), group_size, asymmetric=bool(attributes.get("asymmetric", 0)))
    return FloatFormat(kind, group_size)
