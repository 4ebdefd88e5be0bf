"""Options that do not go together are refused, with a word about what would."""

from pathlib import Path
from typing import Any

import pytest

from pagelet.exporter.options import MAX_KL, WEIGHTS, ExportOptions
from pagelet.models.errors import InputError

TEXT = Path("text.txt")
NAN = float("nan")

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int3"}, "weights is 'int3'; this version serves int4, int8, fp8, fp16, bf16, fp32."),
    ({"embedding": "fp8"}, "embedding is 'fp8'; this version serves int8, int4, fp16."),
    ({"group_size": 48}, "group size is 48; this version serves 32, 64, 128."),
    ({"weights": "fp16", "group_size": 32}, "a group size belongs to int4, int8, fp8 weights, not to fp16"),
    ({"weights": "fp32", "group_size": 48}, "a group size belongs to int4, int8, fp8 weights, not to fp32"),
    ({"target": "toaster"}, "target is 'toaster'; this version serves cpu, cuda, rtx, tensorrt."),
    ({"block_scales": True}, "scales of 128 × 128 blocks belong to fp8 weights alone."),
    ({"block_scales": True, "weights": "fp8", "group_size": 64}, "scales of 128 × 128 blocks"),
    ({"quantizer": "magic"}, "quantizer is 'magic'; this version serves rtn, awq, gptq, auto."),
    (
        {"quantizer": "auto", "weights": "int8"},
        "quantizer auto belongs to int4 weights, not to int8: leave it",
    ),
    *(
        (
            {"quantizer": quantizer, "weights": weights},
            f"the quantizer {quantizer} belongs to int4 and int8 weights, not to {weights}: leave it out.",
        )
        for quantizer in ("awq", "gptq")
        for weights in ("fp8", "fp16", "bf16", "fp32")
    ),
    ({"calibration": TEXT}, "a calibration belongs to the quantizers awq, gptq and auto, and to fp8"),
    (
        {"quantizer": "gptq", "calibration_tokens": 1023},
        "calibration tokens is 1023; expected 1,024 to 1,048,576.",
    ),
    (
        {"quantizer": "gptq", "calibration_tokens": -5},
        "calibration tokens is -5; expected 1,024 to 1,048,576.",
    ),
    ({"bits_per_weight": 4.5}, "bits per weight is a budget for the quantizer auto: name it."),
    ({"quantizer": "gptq", "bits_per_weight": 4.5}, "bits per weight is a budget for the quantizer auto"),
    *(
        (
            {"quantizer": "auto", "bits_per_weight": bits},
            f"bits per weight is {bits}; expected more than 4, at",
        )
        for bits in (0, 4, 8.6, -1, NAN, float("inf"))
    ),
    ({"cache_type": "int2"}, "cache type is 'int2'; this version serves"),
    ({"max_context": 0}, "max context is 0; expected at least 1 token."),
    ({"layers": 0}, "layers is 0; expected at least 1."),
    *(({"block_size": size}, f"block size is {size}; expected 1 to 4096 tokens.") for size in (0, -1, 4097)),
    *(
        (
            {"certificate_seconds": seconds},
            f"certificate seconds is {seconds}; expected more than 0, at most 86,400;",
        )
        for seconds in (0, -1.0, 86_401, NAN)
    ),
    *(
        ({"max_kl": kl}, f"max KL is {kl}; expected more than 0, at most 1,000 nats.")
        for kl in (0, -1.0, NAN)
    ),
]


GPU_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target": "rtx", "symmetric": False}, "the target rtx has no zero points: int4 weights are symmetric"),
    ({"target": "cuda", "symmetric": False}, "the target cuda has no zero points"),
    (
        {"target": "rtx", "weights": "int8"},
        "the target rtx has no int8 weights; it serves int4, fp8, fp16, bf16.",
    ),
    ({"target": "cuda", "weights": "fp8"}, "the target cuda has no fp8 weights"),
    ({"target": "rtx", "cache_type": "f32"}, "the target rtx has no f32 cache; it serves f16, int8, fp8."),
    ({"target": "rtx", "embedding": "int8"}, "the target rtx has no int8 table: take fp16 or int4."),
    ({"target": "rtx", "weights": "fp8", "sms": (86, 89)}, "fp8 weights need SM 89 or newer; asked for 86."),
    (
        {"target": "rtx", "sms": (87,)},
        "SM of the target rtx is 87; this version serves 80, 86, 89, 120, 121.",
    ),
    ({"target": "tensorrt", "sms": (75,)}, "SM of the target tensorrt is 75"),
    ({"target": "cuda", "sms": (89,)}, "the target cuda is not made for single GPUs: leave --sm out."),
    ({"sms": (89,)}, "the target cpu is not made for single GPUs"),
    ({"activations": "bf16"}, "activations are a choice of GPU targets"),
    ({"target": "rtx", "activations": "f8"}, "activations is 'f8'; this version serves f16, bf16."),
    ({"target": "rtx", "weights": "fp8", "block_scales": True}, "one scale per output of fp8 weights"),
    ({"target": "rtx", "weights": "fp8", "group_size": 64}, "one scale per output of fp8 weights"),
    ({"target": "rtx", "cache_type": "fp8", "sms": (86,)}, "fp8 caches need SM 89 or newer; asked for 86."),
    ({"target": "rtx", "quantizer": "auto"}, "int8, which the target rtx has not: take gptq or awq."),
    ({"target": "rtx", "weights": "fp16", "activations": "bf16"}, "fp16 weights are multiplied with f16"),
    ({"target": "rtx", "block_size": 24}, "the target rtx takes powers of two from 16."),
    ({"target": "cuda", "block_size": 32}, "block size is 32; the target cuda takes multiples of 256."),
]


@pytest.mark.parametrize(("options", "message"), REFUSED + GPU_REFUSED)
def test_what_is_refused_and_how(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        ExportOptions(**options)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"weights": weights} for weights in WEIGHTS),
        {"weights": "fp8", "group_size": 128, "block_scales": True},
        {"quantizer": "gptq", "weights": "int8", "calibration": TEXT, "calibration_tokens": 1024},
        {"quantizer": "awq", "symmetric": True, "group_size": 128},
        {"quantizer": "auto", "bits_per_weight": 8.5},
        {"quantizer": "auto", "bits_per_weight": 4.001, "symmetric": True},
        {"certificate_seconds": None},
        {"certificate_seconds": 86_400},
    ],
)
def test_what_is_served(options: dict[str, Any]) -> None:
    ExportOptions(**options)


def test_defaults_that_depend_on_the_weights() -> None:
    limits = {weights: ExportOptions(weights=weights).kl_limit for weights in WEIGHTS}
    assert limits == MAX_KL
    assert ExportOptions(max_kl=0.25).kl_limit == 0.25
    sizes = {weights: ExportOptions(weights=weights).inputs_per_scale for weights in WEIGHTS}
    assert sizes == {"int4": 32, "int8": 32, "fp8": 0, "fp16": 0, "bf16": 0, "fp32": 0}
    assert ExportOptions(group_size=128).inputs_per_scale == 128
    assert [ExportOptions(quantizer=q).is_calibrated for q in ("rtn", "awq", "gptq", "auto")] == [
        False,
        True,
        True,
        True,
    ]


def test_gpu_targets_have_defaults_of_their_own() -> None:
    rtx = ExportOptions(target="rtx")
    assert (rtx.is_symmetric, rtx.tables, rtx.tokens_per_block) == (True, "fp16", 32)
    assert rtx.device_sms == (80, 86, 89, 120, 121)
    assert ExportOptions(target="rtx", weights="fp8").device_sms == (89, 120, 121)
    assert ExportOptions(target="rtx", sms=(120, 89, 89)).device_sms == (89, 120)
    cuda = ExportOptions(target="cuda")
    assert (cuda.is_symmetric, cuda.tables, cuda.tokens_per_block, cuda.device_sms) == (True, "int8", 256, ())
    cpu = ExportOptions()
    assert (cpu.is_symmetric, cpu.tables, cpu.tokens_per_block, cpu.device_sms) == (False, "int8", 32, ())


@pytest.mark.parametrize(("weights", "expected"), [("bf16", "bf16"), ("int4", "bf16")])
def test_weights_of_16_bits_are_of_the_activations_type(weights: str, expected: str) -> None:
    assert ExportOptions(target="rtx", weights=weights, activations="bf16").activation_type == expected
