"""Which storage each matrix gets: from the options, and from what the checkpoint holds already."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.modules import linear_units
from pagelet.exporter.options import FP8_BLOCK, GROUP_SIZES, INTEGERS, ExportOptions
from pagelet.exporter.stacked_rows import WeightFormat, fits
from pagelet.exporter.weights import type_name
from pagelet.models.errors import InputError
from pagelet.models.manifest import Quantization
from pagelet.models.spec import ModelSpec
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
    elif options.weights == "fp8" and options.group_size is None and not options.row.is_gpu:
        group_size = _own_fp8_groups(checkpoint)
    elif options.weights in INTEGERS and options.group_size is None:
        group_size = _own_groups(options.weights, checkpoint) or group_size
    if options.weights == "int4":
        layers = LinearFormat(4, group_size, asymmetric=not options.is_symmetric)
        _check_minimums(options, checkpoint)
        tables: dict[str, WeightFormat] = {
            "int8": INT8,
            "int4": layers,
            "fp16": FloatFormat(options.activation_type),
        }
        return Formats(layers, tables=tables[options.tables])
    if options.weights == "int8":
        int8 = LinearFormat(8, group_size, asymmetric=False)
        return Formats(int8, tables=int8)
    if options.weights == "fp8":
        # Three bits of mantissa in the head go straight into the logits: FP8 checkpoints too leave it alone.
        source = checkpoint.weights["embedding.weight"].dtype
        half = "bf16" if source == "BF16" else "f16"
        if options.row.is_gpu:
            half = options.activation_type
        return Formats(FloatFormat("fp8", group_size), FloatFormat(half))
    plain = FloatFormat({"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[options.weights])
    return Formats(plain, tables=plain)


def _check_minimums(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """Codes with a minimum are never made symmetric in silence."""
    if options.row.asymmetric or options.symmetric:
        return
    for role, info in checkpoint.weights.items():
        if len(info.shape) == 2 and role.removesuffix(".weight") not in TABLES:
            blocks = checkpoint.read_blocks(role, 0, 1)
            if blocks is not None and blocks.bits == 4 and blocks.minimums is not None:
                raise InputError(
                    f"the checkpoint's int4 codes have minimums ({role}), which the target {options.target} "
                    "cannot hold. To quantize them again, symmetric, at a loss that the certificate states, "
                    "say --symmetric; to keep them, take --target cpu."
                )


def _own_fp8_groups(checkpoint: Checkpoint) -> int:
    """Inputs per scale of an FP8 checkpoint, so that its numbers pass through; 0 where that cannot be."""
    first = [role for role in checkpoint.weights if role.startswith("layers.0.") and role.endswith(".weight")]
    found = [rows.group_size for role in first if (rows := checkpoint.read_fp8(role, 0, 1))]
    size = max(found, default=0)  # one scale for all fits in any group
    widths = [info.shape[1] for info in checkpoint.weights.values() if len(info.shape) == 2]
    return size if size in GROUP_SIZES and all(width % size == 0 for width in widths) else 0


def _own_groups(weights: str, checkpoint: Checkpoint) -> int:
    """The largest group in which a checkpoint's own codes of this type stand as they are; 0: it has none."""
    sizes, widths = set(), set()
    for role, info in checkpoint.weights.items():
        if len(info.shape) == 2 and role.removesuffix(".weight") not in TABLES:
            blocks = checkpoint.read_blocks(role, 0, 1)
            widths.add(info.shape[1])
            if blocks is not None and f"int{blocks.bits}" == weights:
                sizes.add(blocks.group_size)
    divisible = (n for n in reversed(GROUP_SIZES) if not any(size % n for size in sizes | widths))
    return next(divisible, 0) if sizes else 0


def quantized_again(spec: ModelSpec, checkpoint: Checkpoint, formats: Formats) -> Iterator[str]:
    """What the user should know of matrices whose own codes the formats do not hold."""
    reasons: Counter[str] = Counter()
    for module, roles in linear_units(spec):
        format = formats.of(module)
        if format.group_size or format.weight_type == "fp8":
            reasons.update(filter(None, (_misfit(checkpoint, role + ".weight", format) for role in roles)))
    for reason, count in reasons.items():
        weights = "one weight" if count == 1 else f"{count} weights"
        yield f"the checkpoint's codes of {weights} are quantized again: {reason}"


def _misfit(checkpoint: Checkpoint, role: str, format: WeightFormat) -> str:
    """Why the codes that a checkpoint has of a weight cannot stay; "" if they can, or there are none."""
    obstacle = checkpoint.obstacle(role)
    if obstacle:
        return obstacle
    blocks = checkpoint.read_blocks(role, 0, 1)
    if blocks is None or (isinstance(format, LinearFormat) and fits(blocks, format)):
        return ""
    own = _words(f"int{blocks.bits}", blocks.minimums is not None, blocks.group_size)
    minimums = isinstance(format, LinearFormat) and format.asymmetric
    asked = _words(type_name(format), minimums, format.group_size)
    return f"they are {own}; {asked} is asked for"


def _words(kind: str, minimums: bool, group_size: int) -> str:
    groups = f"groups of {group_size}" if group_size else "a scale per output"
    return f"{kind}, {groups}{' with minimum' if minimums else ''}"


def describe(options: ExportOptions, formats: Formats) -> Quantization:
    """As the manifest says it."""
    embedding = type_name(formats.of("embedding"))
    if options.quantizer == "auto":  # the tensors say what each of them got
        return Quantization(options.weights, "auto")
    return Quantization(
        options.weights,
        options.quantizer if options.is_grouped else "none",
        formats.layers.group_size,
        options.is_symmetric,
        embedding="" if embedding == options.weights else embedding,
    )
