"""EngineConfig: what a user may set when an engine is opened, and the sizes that follow from it."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagelet.models.errors import CapacityError, InputError
from pagelet.models.strict import reject_unknown

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*")
MAX_BYTES = 1 << 44
# Without `kv_memory` the pool holds this many sequences of this many tokens, if memory allows.
DEFAULT_SEQUENCES = 4
DEFAULT_CONTEXT = 8192
# Bounds of the whole-number settings: (least, most).
_BOUNDS = {
    "threads": (1, 1024),
    "max_sequences": (1, 1024),
    "max_step_tokens": (1, 65_536),
    "max_queue": (1, 1_000_000),
    "max_queue_tokens": (1, 1 << 40),
    "max_context": (1, 1 << 24),
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        kv_memory: bytes of the KV cache, or a size such as "512MiB"; None: room for four sequences of
            8,192 tokens (or the model's context), but at most a quarter of the memory that is free.
        threads: threads of one step; None: physical cores.
        max_sequences: sequences that run at once.
        max_step_tokens: tokens of one step; a longer prompt is read in chunks of at most this.
        max_queue: sequences that may wait; a request beyond it is refused.
        max_queue_tokens: tokens, prompts and the longest replies to them, that may wait; so neither many
            requests nor one with a large `n` can cause work without a limit.
        max_context: tokens of one sequence; None: the model's own limit.
        prefix_cache: keep the blocks of finished sequences until memory is needed, for later requests
            that begin with the same tokens.

    Raises:
        InputError: a value of the wrong type or out of its bounds.
    """

    kv_memory: int | str | None = None
    threads: int | None = None
    max_sequences: int = 32
    max_step_tokens: int = 512
    max_queue: int = 1024
    max_queue_tokens: int = 1 << 24
    max_context: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.kv_memory is not None:
            parse_size(self.kv_memory, "kv_memory")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in ("threads", "max_context"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{name} is {value!r}; expected a whole number from {least} to {most}.")
        if not isinstance(self.prefix_cache, bool):
            raise InputError(f"prefix_cache is {self.prefix_cache!r}; expected true or false.")
        if self.max_step_tokens < self.max_sequences:
            raise InputError(
                f"max_step_tokens is {self.max_step_tokens}, below max_sequences, {self.max_sequences}: "
                "each running sequence needs a token per step. Raise the one or lower the other."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineConfig":
        """Build from parsed JSON or keyword arguments.

        Raises:
            InputError: an unknown key (the nearest known one is named), or a value that is not valid.
        """
        reject_unknown(values, (f.name for f in fields(cls)), "engine config", InputError)
        return cls(**values)

    def cache_bytes(self, sequence_bytes: Callable[[int], int], model_context: int) -> int:
        """Bytes to spend on the KV cache, where a sequence of n tokens takes `sequence_bytes(n)`.

        Raises:
            CapacityError: `kv_memory` is more than the memory that is free.
        """
        free = available_memory()
        if self.kv_memory is None:
            context = min(model_context, self.max_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
            return min(DEFAULT_SEQUENCES * sequence_bytes(context), free // 4)
        size = parse_size(self.kv_memory, "kv_memory")
        if size > free:
            raise CapacityError(
                f"kv_memory is {size} bytes, but only {free} bytes of memory are free. "
                "Lower kv_memory or close other programs."
            )
        return size


def parse_size(value: int | str, name: str) -> int:
    """Bytes of a size: a whole number, or a string with B, KB, MB, GB, KiB, MiB or GiB.

    Raises:
        InputError: neither, zero, or beyond 16 TiB.
    """
    size = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InputError(f"{name} is {value!r}; expected bytes or a size such as '512MiB' or '2GB'.")
        size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_BYTES:
        raise InputError(f"{name} is {value!r}; expected 1 to {MAX_BYTES} bytes, or a size such as '512MiB'.")
    return size


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30
