"""What the user asks of an export: one frozen value, checked at the edge."""

from dataclasses import dataclass
from pathlib import Path

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.errors import InputError

WEIGHTS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")
EMBEDDINGS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
GROUPED = {"int4": 32, "int8": 32, "fp8": 0}
"""Weight types with scales, and how many inputs share one by default; 0: all inputs of an output."""
TARGETS = ("cpu",)
QUANTIZERS = ("rtn", "awq", "gptq", "auto")
INTEGERS = ("int4", "int8")
FP8_BLOCK = 128
"""Rows, and inputs, of a block with one scale, as FP8 checkpoints with blocks have them."""
MAX_KL = {"int4": 0.5, "int8": 0.05, "fp8": 0.1, "fp16": 0.02, "bf16": 0.05, "fp32": 0.005}
"""Above so much mean KL divergence (nats) an export stops: something is wrong, or too much was lost."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `pagelet export`.

    Attributes:
        weights: storage of the linear weights; "fp8" is E4M3.
        group_size: inputs that share a scale (int4, int8, fp8); None: a quantized checkpoint's own, or the
            type's default (GROUPED).
        symmetric: no minimum per group (int4): smaller, and further from the original.
        block_scales: 128 rows of a weight share the scale of 128 inputs (fp8), as some devices want it.
        quantizer: of int4 and int8 weights. "rtn" rounds each group alone; "awq" and "gptq" look at
            the inputs that a text brings forth; "auto" (int4) besides spends `bits_per_weight` where they
            help most.
        bits_per_weight: "auto": of all matrices together, scales included; None: 4.5.
        calibration: a text in UTF-8 to look at; None: texts written for this project.
        calibration_tokens: at most so many of it.
        desc_act: "gptq", "auto": round the columns with the largest activations first.
        embedding: storage of the embedding table and the head beside int4 weights. They lose most by
            rounding, so they have 8 bits by default; beside fp8 weights they have 16.
        cache_type: storage of keys and values in the KV cache: "f32", "f16", "int8" or "fp8" (E4M3), the
            last two with a scale per token and KV head.
        max_context: tokens; None keeps the checkpoint's own.
        layers: only the first so many, with an early exit's norm and head where the checkpoint has them: a
            draft of the model for itself.
        block_size: tokens per block of the KV cache.
        certificate_seconds: how long the bundle is compared with the original at the end; None: not at all,
            which is recorded.
        max_kl: mean KL divergence (nats) above which the export stops; None: that of the type (MAX_KL).
        accept_loss: keep a bundle that is above `max_kl`; it is recorded.
        force: replace an existing bundle.
        adapter: a folder with a LoRA as PEFT writes it, merged into the checkpoint's weights.

    Raises:
        InputError: a value that this version cannot serve.
    """

    weights: str = "int4"
    group_size: int | None = None
    symmetric: bool = False
    block_scales: bool = False
    quantizer: str = "rtn"
    bits_per_weight: float | None = None
    calibration: Path | None = None
    calibration_tokens: int = 8_192
    desc_act: bool = True
    embedding: str = "int8"
    target: str = "cpu"
    cache_type: str = "f16"
    max_context: int | None = None
    layers: int | None = None
    block_size: int = 32
    certificate_seconds: float | None = 60.0
    max_kl: float | None = None
    accept_loss: bool = False
    force: bool = False
    adapter: Path | None = None

    def __post_init__(self) -> None:
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("embedding", self.embedding, EMBEDDINGS)
        if self.group_size is not None:
            if self.weights not in GROUPED:
                raise InputError(
                    f"a group size belongs to {', '.join(GROUPED)} weights, not to {self.weights}: "
                    "leave it out."
                )
            _one_of("group size", self.group_size, GROUP_SIZES)
        _one_of("target", self.target, TARGETS)
        if self.block_scales and (self.weights != "fp8" or self.group_size not in (None, FP8_BLOCK)):
            raise InputError(f"scales of {FP8_BLOCK} × {FP8_BLOCK} blocks belong to fp8 weights alone.")
        self._check_quantizer()
        _one_of("cache type", self.cache_type, tuple(CACHE_TYPES))
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max context is {self.max_context}; expected at least 1 token.")
        if self.layers is not None and self.layers < 1:
            raise InputError(f"layers is {self.layers}; expected at least 1.")
        if not 1 <= self.block_size <= 4096:
            raise InputError(f"block size is {self.block_size}; expected 1 to 4096 tokens.")

        if self.certificate_seconds is not None and not 0 < self.certificate_seconds <= 86_400:
            raise InputError(
                f"certificate seconds is {self.certificate_seconds}; expected more than 0, at most 86,400; "
                "to have none is an option of its own (--no-certificate)."
            )
        if self.max_kl is not None and not 0 < self.max_kl <= 1_000:
            raise InputError(f"max KL is {self.max_kl}; expected more than 0, at most 1,000 nats.")

    def _check_quantizer(self) -> None:
        _one_of("quantizer", self.quantizer, QUANTIZERS)
        served = ("int4",) if self.quantizer == "auto" else INTEGERS
        if self.quantizer != "rtn" and self.weights not in served:
            raise InputError(
                f"the quantizer {self.quantizer} belongs to {' and '.join(served)} weights, not to "
                f"{self.weights}: leave it out."
            )
        if not self.is_calibrated and self.calibration is not None:
            raise InputError("a calibration belongs to the quantizers awq, gptq and auto: name one of them.")
        if not self.desc_act and self.quantizer not in ("gptq", "auto"):
            raise InputError("the order of columns (desc_act) belongs to the quantizers gptq and auto.")
        if not 1024 <= self.calibration_tokens <= 1 << 20:
            raise InputError(f"calibration tokens is {self.calibration_tokens}; expected 1,024 to 1,048,576.")
        if self.quantizer == "auto" and self.group_size is not None:
            raise InputError("the quantizer auto chooses the group sizes itself: leave it out.")
        if self.bits_per_weight is not None and self.quantizer != "auto":
            raise InputError("bits per weight is a budget for the quantizer auto: name it.")
        if self.bits_per_weight is not None and not 4 < self.bits_per_weight <= 8.5:
            raise InputError(f"bits per weight is {self.bits_per_weight}; expected more than 4, at most 8.5.")

    @property
    def is_grouped(self) -> bool:
        """Whether the weights have scales."""
        return self.weights in GROUPED

    @property
    def is_calibrated(self) -> bool:
        """Whether the quantizer looks at a text's activations."""
        return self.quantizer != "rtn"

    @property
    def kl_limit(self) -> float:
        """Mean KL divergence in nats."""
        return MAX_KL[self.weights] if self.max_kl is None else self.max_kl

    @property
    def inputs_per_scale(self) -> int:
        """`group_size`, or the default of the weight type; 0: all inputs of an output share one, or none."""
        return GROUPED.get(self.weights, 0) if self.group_size is None else self.group_size


def _one_of(what: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise InputError(f"{what} is {value!r}; this version serves {', '.join(map(str, known))}.")
