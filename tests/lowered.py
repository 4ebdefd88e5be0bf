"""Weights that were laid out for a GPU, and what they are compared with: the same codes, nothing rounded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from families.conftest import write_family
from families.rows import Row
from folding import job_in, write
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.part import Part
from pagelet.exporter.quantize.quantizer import RoundToNearest
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.targets.lowering import Layout, lower_weights
from pagelet.exporter.weights import WEIGHTS_NAME, WeightsFile
from pagelet.plugins import float_packing, packing
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Lowered:
    """A checkpoint's weights in the CPU's form, and as a GPU's ops want them, in one folder."""

    packed: Part
    device: Part

    def built(self, builder: Callable[..., Any], **options: Any) -> Part:
        """The device's part, its graph spelled by a builder."""
        return replace(self.device, builder=partial(builder, **options))


def lower_family(
    row: Row,
    home: Path,
    byte_tokenizer: Callable[[Path], None],
    layout: Layout,
    formats: Formats,
    activations: str = "f16",
    input_scales: Callable[[Part], dict[str, float]] = lambda part: {},
) -> Lowered:
    """A family's tiny checkpoint, rounded to the nearest; `input_scales` of the packed part."""
    source = home / "source"
    write_family(row, source)
    byte_tokenizer(source)
    with open_checkpoint(source) as checkpoint:
        job = job_in(home / "part", checkpoint)
        packed = write(job, formats, RoundToNearest(job.spec, formats))
    return lower_part(packed, layout, activations, input_scales(packed))


def lower_part(
    packed: Part, layout: Layout, activations: str, input_scales: dict[str, float] | None = None
) -> Lowered:
    weights = lower_weights(
        packed.spec,
        packed.weights,
        packed.folder,
        layout,
        activations=activations,
        input_scales=input_scales or {},
    )
    return Lowered(packed, replace(packed, weights=weights))


def in_float32(part: Part, folder: Path) -> Part:
    """The same weights, whose codes became numbers: products of the CPU's ops then round nothing."""
    folder.mkdir()
    packed = np.fromfile(part.folder / WEIGHTS_NAME, np.uint8)
    plain = FloatFormat("f32")
    linears, vectors = {}, {}
    with WeightsFile(folder / WEIGHTS_NAME) as file:
        for name, vector in part.weights.vectors.items():
            data = packed[vector.offset : vector.offset + vector.length]
            vectors[name] = file.add(name, "float32", vector.shape, iter([data]))
        for module, linear in part.weights.linears.items():
            data = packed[linear.weight.offset : linear.weight.offset + linear.weight.length]
            values = float_packing.pack(
                dequantized(data, linear.out_features, linear.in_features, linear.format), None, plain
            )
            weight = file.add(module, "uint8", values.shape, iter([values]))
            bias = linear.bias
            if bias is not None:
                data = packed[bias.offset : bias.offset + bias.length]
                bias = file.add(module + ".bias", "float32", bias.shape, iter([data]))
            linears[module] = replace(linear, format=plain, weight=weight, bias=bias)
    return replace(part, weights=replace(part.weights, linears=linears, vectors=vectors), folder=folder)


def dequantized(data: NDArray[np.uint8], rows: int, columns: int, format: WeightFormat) -> Float32:
    """Packed bytes as float32 [rows, columns]."""
    kind: Any = packing if isinstance(format, LinearFormat) else float_packing
    values: Float32 = kind.dequantize(*kind.unpack(data, columns, rows, format), format)
    return values


def distance(found: Float32, expected: Float32) -> float:
    """Root of the mean square of the error, relative to the logits' spread."""
    return float(np.sqrt(np.mean(np.square(found - expected))) / expected.std())
