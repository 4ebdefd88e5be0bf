"""What the user asks of an export: one frozen value, checked at the edge."""

from dataclasses import dataclass
from pathlib import Path

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.errors import InputError
from pagelet.models.targets import FIRST_FP8_SM, TARGETS, Target

WEIGHTS = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")
EMBEDDINGS = ("int8", "int4", "fp16")
ACTIVATIONS = ("f16", "bf16")
GROUP_SIZES = (32, 64, 128)
GROUPED = {"int4": 32, "int8": 32, "fp8": 0}
"""Weight types with scales, and how many inputs share one by default; 0: all inputs of an output."""
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
        symmetric: no minimum per group (int4): smaller, and further from the original; None: as the target
            has it, which is True on GPUs.
        block_scales: 128 rows of a weight share the scale of 128 inputs (fp8), as some devices want it.
        quantizer: of int4 and int8 weights. "rtn" rounds each group alone; "awq" and "gptq" look at
            the inputs that a text brings forth; "auto" (int4) besides spends `bits_per_weight` where they
            help most.
        bits_per_weight: "auto": of all matrices together, scales included; None: 4.5.
        calibration: a text in UTF-8 to look at; None: texts written for this project.
        calibration_tokens: at most so many of it.
        desc_act: "gptq", "auto": round the columns with the largest activations first.
        embedding: storage of the embedding table and the head beside int4 weights. They lose most by
            rounding, so they have 8 bits by default, 16 where a target knows no 8; beside fp8 weights they
            have 16.
        target: what the bundle is for (TARGETS in `models.targets`).
        sms: compute capabilities, times ten, of the GPUs that it is for; empty: all that the target serves.
        activations: of GPU targets, "f16" or "bf16"; sums and the residual stream are float32 in both.
        cache_type: storage of keys and values in the KV cache: "f32", "f16", "int8" or "fp8" (E4M3), the
            last two with a scale per token and KV head.
        max_context: tokens; None keeps the checkpoint's own.
        layers: only the first so many, with an early exit's norm and head where the checkpoint has them: a
            draft of the model for itself.
        block_size: tokens per block of the KV cache; None: the target's default.
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
    symmetric: bool | None = None
    block_scales: bool = False
    quantizer: str = "rtn"
    bits_per_weight: float | None = None
    calibration: Path | None = None
    calibration_tokens: int = 8_192
    desc_act: bool = True
    embedding: str | None = None
    target: str = "cpu"
    sms: tuple[int, ...] = ()
    activations: str = "f16"
    cache_type: str = "f16"
    max_context: int | None = None
    layers: int | None = None
    block_size: int | None = None
    certificate_seconds: float | None = 60.0
    max_kl: float | None = None
    accept_loss: bool = False
    force: bool = False
    adapter: Path | None = None

    def __post_init__(self) -> None:
        _one_of("target", self.target, tuple(TARGETS))
        _one_of("weights", self.weights, WEIGHTS)
        self._check_target()
        if self.group_size is not None:
            if self.weights not in GROUPED:
                raise InputError(
                    f"a group size belongs to {', '.join(GROUPED)} weights, not to {self.weights}: "
                    "leave it out."
                )
            _one_of("group size", self.group_size, GROUP_SIZES)
        if self.block_scales and (self.weights != "fp8" or self.group_size not in (None, FP8_BLOCK)):
            raise InputError(f"scales of {FP8_BLOCK} × {FP8_BLOCK} blocks belong to fp8 weights alone.")
        self._check_quantizer()
        _one_of("cache type", self.cache_type, tuple(CACHE_TYPES))
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max context is {self.max_context}; expected at least 1 token.")
        if self.layers is not None and self.layers < 1:
            raise InputError(f"layers is {self.layers}; expected at least 1.")
        self._check_block_size()
        if self.certificate_seconds is not None and not 0 < self.certificate_seconds <= 86_400:
            raise InputError(
                f"certificate seconds is {self.certificate_seconds}; expected more than 0, at most 86,400; "
                "to have none is an option of its own (--no-certificate)."
            )
        if self.max_kl is not None and not 0 < self.max_kl <= 1_000:
            raise InputError(f"max KL is {self.max_kl}; expected more than 0, at most 1,000 nats.")

    def _check_target(self) -> None:
        row = self.row
        if self.weights not in row.weights:
            raise InputError(
                f"the target {row.name} has no {self.weights} weights; it serves {', '.join(row.weights)}."
            )
        if self.cache_type in CACHE_TYPES and self.cache_type not in row.caches:
            raise InputError(
                f"the target {row.name} has no {self.cache_type} cache; it serves {', '.join(row.caches)}."
            )
        if self.symmetric is False and self.weights == "int4" and not row.asymmetric:
            raise InputError(
                f"the target {row.name} has no zero points: int4 weights are symmetric there. Leave "
                "--asymmetric out, or take --target cpu."
            )
        if self.embedding is not None:
            _one_of("embedding", self.embedding, EMBEDDINGS)
            if self.embedding == "int8" and "int8" not in row.weights:
                raise InputError(f"the target {row.name} has no int8 table: take fp16 or int4.")
        if row.is_gpu and self.weights == "fp8" and (self.block_scales or self.group_size):
            raise InputError(
                f"the target {row.name} has one scale per output of fp8 weights: leave groups and blocks out."
            )
        if not row.is_gpu and self.activations != "f16":
            raise InputError("activations are a choice of GPU targets; the CPU computes in float32.")
        _one_of("activations", self.activations, ACTIVATIONS)
        if self.weights == "fp16" and self.activations == "bf16":
            raise InputError("fp16 weights are multiplied with f16 activations: take bf16 weights, or f16.")
        if self.sms and not row.sms:
            raise InputError(f"the target {row.name} is not made for single GPUs: leave --sm out.")
        for sm in self.sms:
            _one_of(f"SM of the target {row.name}", sm, row.sms)
        old = [sm for sm in self.sms if sm < FIRST_FP8_SM]
        if old and (kinds := self._in_fp8):
            raise InputError(
                f"fp8 {kinds} need SM {FIRST_FP8_SM} or newer; asked for {', '.join(map(str, old))}. Leave "
                "these GPUs out of --sm, or take int4."
            )

    def _check_block_size(self) -> None:
        size, multiple = self.tokens_per_block, self.row.block_multiple
        if not 1 <= size <= 4096:
            raise InputError(f"block size is {size}; expected 1 to 4096 tokens.")
        if size % multiple or (self.row.has_kernels and size & (size - 1)):
            sizes = f"powers of two from {multiple}" if self.row.has_kernels else f"multiples of {multiple}"
            raise InputError(f"block size is {size}; the target {self.target} takes {sizes}.")

    @property
    def row(self) -> Target:
        """The target's."""
        return TARGETS[self.target]

    @property
    def _in_fp8(self) -> str:
        """What of the bundle TensorRT sees as FP8."""
        kinds = {"weights": self.weights, "caches": self.cache_type}
        return " and ".join(name for name, kind in kinds.items() if kind == "fp8")

    @property
    def device_sms(self) -> tuple[int, ...]:
        """Sorted; empty where the target serves every GPU."""
        able = [sm for sm in self.row.sms if not self._in_fp8 or sm >= FIRST_FP8_SM]
        return tuple(sorted(set(self.sms or able)))

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or the target's default."""
        return self.row.block_size if self.block_size is None else self.block_size

    @property
    def activation_type(self) -> str:
        """Of GPU targets: that of 16-bit weights, if the weights have 16 bits."""
        return {"fp16": "f16", "bf16": "bf16"}.get(self.weights, self.activations)

    @property
    def is_symmetric(self) -> bool:
        """Of int4 groups."""
        return self.row.is_gpu if self.symmetric is None else self.symmetric

    @property
    def tables(self) -> str:
        """Storage of the embedding table and the head beside int4 weights."""
        return self.embedding or ("int8" if "int8" in self.row.weights else "fp16")

    def _check_quantizer(self) -> None:
        _one_of("quantizer", self.quantizer, QUANTIZERS)
        if self.quantizer == "auto" and "int8" not in self.row.weights:
            raise InputError(
                f"the quantizer auto stores some matrices in int8, which the target {self.target} has not: "
                "take gptq or awq."
            )
        served = ("int4",) if self.quantizer == "auto" else INTEGERS
        if self.quantizer != "rtn" and self.weights not in served:
            raise InputError(
                f"the quantizer {self.quantizer} belongs to {' and '.join(served)} weights, not to "
                f"{self.weights}: leave it out."
            )
        if self.calibration is not None and not (self.is_calibrated or self.has_static_scales):
            raise InputError(
                "a calibration belongs to the quantizers awq, gptq and auto, and to fp8 weights on a GPU, "
                "whose inputs have static scales: name one of them."
            )
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
    def has_static_scales(self) -> bool:
        """Whether a text's largest activations, keys or values become scales."""
        fp8_inputs = self.weights == "fp8" and self.row.is_gpu
        return fp8_inputs or (self.target == "cuda" and self.cache_type in ("int8", "fp8"))

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
