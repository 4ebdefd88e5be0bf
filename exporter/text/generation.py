"""generation_config.json: the sampling defaults that a checkpoint brings, and the tokens that end a text."""

import math
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_json
from pagelet.models.errors import CheckpointError

# Name to smallest and largest sensible value; everything else in the file is about training or search.
_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 4_000_000),
    "repetition_penalty": (0.0, 100.0),
}
MAX_END_IDS = 256


def read_generation(path: Path) -> dict[str, Any]:
    """temperature, top_p, min_p, top_k, repetition_penalty and do_sample, where the file has them.

    Raises:
        CheckpointError: a value of the wrong type or out of its range.
    """
    config = read_json(path) if path.exists() else {}
    found: dict[str, Any] = {}
    for name, (low, high) in _NUMBERS.items():
        value = config.get(name)
        if value is None:
            continue
        kinds: tuple[type, ...] = (int,) if isinstance(low, int) else (int, float)
        if type(value) not in kinds or not math.isfinite(value) or not low <= value <= high:
            raise CheckpointError(f"{path}: {name} is {value!r:.40}; expected a number from {low} to {high}.")
        found[name] = value
    if config.get("do_sample") is not None:
        if not isinstance(config["do_sample"], bool):
            raise CheckpointError(
                f"{path}: do_sample is {config['do_sample']!r:.40}; expected true or false."
            )
        found["do_sample"] = config["do_sample"]
    return found


def end_ids(path: Path) -> tuple[int, ...]:
    """`eos_token_id` of a configuration file: one id, a list of ids, or none.

    Raises:
        CheckpointError: it is something else.
    """
    value = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MAX_END_IDS or not all(type(i) is int for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r:.80}; expected an id or a list of them.")
    return tuple(ids)
