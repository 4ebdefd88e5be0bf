"""EngineConfig: what a user may set when an engine is opened, and the sizes that follow from it."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from pagelet.models.errors import CapacityError, InputError
from pagelet.models.strict import reject_unknown

Speculate = Literal["auto", "ngram", "draft", "off"]

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
    "num_draft_tokens": (0, 64),
    "max_draft_tokens": (1, 64),
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
        speculate: who guesses ahead: "ngram" finds in the text itself what followed the last tokens before,
            "draft" asks a second model, "auto" is both as far as there are any, "off" nobody. The text is the
            same in any case.
        draft: bundle of a smaller model with the same tokenizer; its cache is part of `kv_memory`.
        num_draft_tokens: candidates for each sequence in every step, as far as there are likely ones, whether
            that pays or not; None: as many as are expected to pay.
        max_draft_tokens: most candidates for a sequence in one step.
        share_ngrams: "ngram" looks into earlier texts of this engine too: of requests with the same
            `cache_salt` that use the prefix cache.

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
    speculate: Speculate = "auto"
    draft: str | Path | None = None
    num_draft_tokens: int | None = None
    max_draft_tokens: int = 48
    share_ngrams: bool = False

    def __post_init__(self) -> None:
        if self.kv_memory is not None:
            parse_size(self.kv_memory, "kv_memory")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None and _DEFAULTS[name] is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{name} is {value!r}; expected a whole number from {least} to {most}.")
        for name in ("prefix_cache", "share_ngrams"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name} is {value!r}; expected true or false.")
        self._check_speculation()
        if self.max_step_tokens < self.max_sequences:
            raise InputError(
                f"max_step_tokens is {self.max_step_tokens}, below max_sequences, {self.max_sequences}: "
                "each running sequence needs a token per step. Raise the one or lower the other."
            )

    def _check_speculation(self) -> None:
        if self.speculate not in get_args(Speculate):
            known = ", ".join(map(repr, get_args(Speculate)))
            raise InputError(f"speculate is {self.speculate!r}; expected one of {known}.")
        if self.draft is not None and not (isinstance(self.draft, str | Path) and str(self.draft)):
            raise InputError(f"draft is {self.draft!r}; expected the folder of a bundle, or None.")
        if self.speculate == "draft" and self.draft is None:
            raise InputError("speculate is 'draft', but no draft is given; pass the folder of its bundle.")
        if self.draft is not None and self.speculate in ("off", "ngram"):
            raise InputError(
                f"a draft is given, but speculate is {self.speculate!r}; leave one out, or set it to 'auto'."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineConfig":
        """Build from parsed JSON or keyword arguments.

        Raises:
            InputError: an unknown key (the nearest known one is named), or a value that is not valid.
        """
        reject_unknown(values, (f.name for f in fields(cls)), "engine config", InputError)
        return cls(**values)

    def cache_bytes(self, sequence_bytes: Callable[[int], int], model_context: int, free: int) -> int:
        """Bytes to spend on the KV cache, where a sequence of n tokens takes `sequence_bytes(n)`.

        `free`: bytes of the memory that the cache will lie in.

        Raises:
            CapacityError: `kv_memory` is more than the memory that is free.
        """
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


_DEFAULTS = {f.name: f.default for f in fields(EngineConfig)}


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
