"""`quantization_config`, read strictly: what changes the weights' meaning is known, or refused by name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_json
from pagelet.models.errors import UnsupportedError
from pagelet.models.strict import reject_unknown

WHERE = "config.json: quantization_config"
MAX_GROUP = 1 << 20
# Older tools write a file of their own beside config.json: its method, and its words for config.json's.
_BESIDE: dict[str, tuple[str, dict[str, str]]] = {
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
}


def settings_beside(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` that AutoGPTQ or AutoAWQ left in a file of its own; None: they did not.

    Raises:
        CheckpointError: the file is damaged.
    """
    for name, (method, words) in _BESIDE.items():
        if (folder / name).exists():
            found = {words.get(key, key): value for key, value in read_json(folder / name).items()}
            return {"quant_method": method, **found}
    return None


def known_keys(settings: Mapping[str, Any], keys: Iterable[str], where: str = WHERE) -> None:
    """UnsupportedError for a key that is none of these: it may change what the weights mean."""
    reject_unknown(settings, ("quant_method", *keys), where, UnsupportedError)


def choose(settings: Mapping[str, Any], key: str, known: Iterable[Any], where: str = WHERE) -> Any:
    """The value of `key`, one of `known`; a default is never assumed.

    Raises:
        UnsupportedError: it is missing, or another.
    """
    options = list(known)
    value = settings.get(key)
    # 1 is not True: they are equal in Python alone.
    if not any(value == option and type(value) is type(option) for option in options):
        found = f"{key} is {value!r:.60}" if key in settings else f"{key!r} is missing"
        raise UnsupportedError(f"{where}: {found}; this version reads {', '.join(map(repr, options))}.")
    return value


def group_size(settings: Mapping[str, Any], key: str = "group_size", where: str = WHERE) -> int:
    """Inputs of a group; 0: all of them (-1 in the file).

    Raises:
        UnsupportedError: missing, or no size.
    """
    value = settings.get(key)
    if type(value) is int and (value == -1 or 1 <= value <= MAX_GROUP):
        return max(value, 0)
    raise UnsupportedError(f"{where}: {key} is {value!r:.60}; expected -1, or 1 to {MAX_GROUP} inputs.")
