"""What a bundle can be made for: a row per target."""

from dataclasses import dataclass

KERNEL_SMS = (80, 86, 87, 89, 90, 110, 120, 121)
"""Compute capabilities, times ten, for which the attention kernels are compiled."""
RTX_SMS = (80, 86, 89, 120, 121)
"""Of them, those for which TensorRT-RTX 1.7 builds."""
FIRST_FP8_SM = 89


@dataclass(frozen=True)
class Target:
    """What a device's engine can be given.

    Attributes:
        weights: types of the linear weights.
        caches: types of the KV cache; of the GPU's, "f16" means the type of the activations' width.
        asymmetric: INT4 groups may have a minimum.
        sms: the devices that an export may be asked for; none where the engine serves all.
        block_size: tokens per block of the KV cache, by default; others are multiples of `block_multiple`.
    """

    name: str
    title: str
    weights: tuple[str, ...]
    caches: tuple[str, ...]
    asymmetric: bool = False
    sms: tuple[int, ...] = ()
    block_size: int = 32
    block_multiple: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def has_kernels(self) -> bool:
        """Whether the bundle carries attention kernels of ours."""
        return bool(self.sms)


TARGETS = {
    row.name: row
    for row in (
        Target(
            "cpu",
            "ONNX Runtime on the CPU",
            ("int4", "int8", "fp8", "fp16", "bf16", "fp32"),
            ("f32", "f16", "int8", "fp8"),
            asymmetric=True,
        ),
        Target(
            "cuda",
            "ONNX Runtime on CUDA",
            ("int4", "int8", "fp16", "bf16"),
            ("f16", "int8", "fp8"),
            block_size=256,
            block_multiple=256,
        ),
        Target(
            "rtx",
            "TensorRT-RTX",
            ("int4", "fp8", "fp16", "bf16"),
            ("f16", "int8", "fp8"),
            sms=RTX_SMS,
            block_multiple=16,
        ),
        Target(
            "tensorrt",
            "TensorRT",
            ("int4", "fp8", "fp16", "bf16"),
            ("f16", "int8", "fp8"),
            sms=KERNEL_SMS,
            block_multiple=16,
        ),
    )
}


MOST_WORKSPACE = 1 << 30
"""Bytes that a layer of an engine may use beside its inputs and outputs, by default."""


def build_bytes(weights: int, workspace: int = MOST_WORKSPACE) -> int:
    """About what building an engine takes: TensorRT holds the weights as parsed, and as it writes them."""
    return 2 * weights + workspace


@dataclass(frozen=True)
class GpuSettings:
    """What a bundle for a GPU has beside its graph.

    Attributes:
        activations: "f16" or "bf16".
        sms: compute capabilities, times ten, that the attention kernels are compiled for.
        engine: its file; "": none was built yet, or the target has none.
        engine_version: what built it, "TensorRT-RTX 1.7.1.116" say.
        engine_sms: that the engine is for.
        kernels: the folder of the attention kernels; "": the target has its own.
        max_sequences: of a step.
        decode_tokens, step_tokens: the most rows of a step that decodes or verifies, and of any.
        logits_rows: the most rows of logits of a step.
    """

    activations: str = "f16"
    sms: tuple[int, ...] = ()
    engine: str = ""
    engine_version: str = ""
    engine_sms: tuple[int, ...] = ()
    kernels: str = ""
    max_sequences: int = 32
    decode_tokens: int = 128
    step_tokens: int = 512
    logits_rows: int = 256
