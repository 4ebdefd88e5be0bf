"""Which storage each matrix gets: from the options, and from what the checkpoint holds already."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.options import FP8_BLOCK, GROUP_SIZES, ExportOptions
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.weights import type_name
from pagelet.models.manifest import Quantization
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

TABLES = ("embedding", "head")
ROUTER = "mlp.router"
INT8 = LinearFormat(8, asymmetric=False)


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored: of the layers, of the embedding table and the head, and single ones."""

    layers: WeightFormat
    tables: WeightFormat
    modules: Mapping[str, WeightFormat] = field(default_factory=dict)

    def of(self, module: str) -> WeightFormat:
        if module.endswith(ROUTER):  # its few numbers choose the experts
            return FloatFormat("f32")
        return self.modules.get(module) or (self.tables if module in TABLES else self.layers)


def choose_formats(options: ExportOptions, checkpoint: Checkpoint) -> Formats:
    """The formats that `options` name, the same for all layers."""
    group_size = options.inputs_per_scale
    if options.block_scales:
        group_size = FP8_BLOCK
    elif options.weights == "fp8" and options.group_size is None:
        group_size = _own_fp8_groups(checkpoint)
    if options.weights == "int4":
        layers = LinearFormat(4, group_size, asymmetric=not options.symmetric)
        return Formats(layers, tables=INT8 if options.embedding == "int8" else layers)
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
    rows = checkpoint.read_fp8("layers.0.attention.o.weight", 0, 1)
    size = rows.group_size if rows else 0
    widths = [info.shape[1] for info in checkpoint.weights.values() if len(info.shape) == 2]
    return size if size in GROUP_SIZES and all(width % size == 0 for width in widths) else 0


def describe(options: ExportOptions, formats: Formats) -> Quantization:
    """As the manifest says it."""
    embedding = type_name(formats.of("embedding"))
    if options.quantizer == "auto":  # the tensors say what each of them got
        return Quantization(options.weights, "auto")
    return Quantization(
        options.weights,
        options.quantizer if options.is_grouped else "none",
        formats.layers.group_size,
        options.symmetric,
        embedding="" if embedding == options.weights else embedding,
    )
