"""Which exports are compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pagelet.models.errors import InputError

_QUANTIZERS = ("rtn", "awq", "gptq")
_GROUP_SIZES = (32, 64, 128)
_BUDGETS = (4.5, 4.6, 5.0, 5.5)


@dataclass(frozen=True)
class Configuration:
    """An export with a name, which is its folder's too.

    Attributes:
        options: of ExportOptions, as JSON has them.
        baseline: the configuration of the same format that only rounds; "" for that one itself, and where
            there is none.
    """

    name: str
    options: dict[str, Any]
    baseline: str = ""


# Keys and values too are float32 there; the row "fp32" has them in half precision, as all the others.
REFERENCE = Configuration("reference", {"weights": "fp32", "cache_type": "f32", "certificate_seconds": None})


def configurations(calibration: str | None = None) -> list[Configuration]:
    """All of them, in the table's order; `calibration` is the path of a text to calibrate with."""
    plain = [Configuration(weights, {"weights": weights}) for weights in ("fp32", "int8", "fp8")]
    found = [*plain, *_int4(symmetric=False), *_int4(symmetric=True)]
    return [replace(one, options=_completed(one.options, calibration)) for one in found]


def _completed(options: dict[str, Any], calibration: str | None) -> dict[str, Any]:
    """No certificate, which would be counted into the export's seconds."""
    calibrated = options.get("quantizer", "rtn") != "rtn"
    text = {"calibration": calibration} if calibrated and calibration else {}
    return {**options, **text, "certificate_seconds": None}


def _int4(*, symmetric: bool) -> Iterator[Configuration]:
    form = "int4-sym" if symmetric else "int4"
    for size in _GROUP_SIZES:
        baseline = f"{form}-g{size}-rtn"
        for quantizer in _QUANTIZERS:
            options = {
                "weights": "int4",
                "group_size": size,
                "symmetric": symmetric,
                "quantizer": quantizer,
            }
            plain = quantizer == "rtn"
            yield Configuration(f"{form}-g{size}-{quantizer}", options, "" if plain else baseline)
    for bits in _BUDGETS:
        options = {"weights": "int4", "symmetric": symmetric, "quantizer": "auto", "bits_per_weight": bits}
        yield Configuration(f"{form}-auto-{bits}", options)


def chosen(only: str | None, known: Sequence[Configuration]) -> list[Configuration]:
    """Those whose names `only` gives, with commas between; a name may be a pattern such as int4-*-rtn.

    Raises:
        InputError: a name that fits none.
    """
    patterns = only.split(",") if only else ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(one.name, pattern) for one in known):
            names = ", ".join(one.name for one in known)
            raise InputError(f"--only has {pattern!r}, which is none of: {names}.")
    return [one for one in known if any(fnmatchcase(one.name, pattern) for pattern in patterns)]
