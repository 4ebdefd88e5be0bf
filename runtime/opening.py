"""Opening a bundle: check its files, read its tokenizer, load its graph."""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagelet.models.errors import BundleError, CancelledError, CapacityError
from pagelet.models.manifest import Manifest, check_files, load_manifest
from pagelet.models.text import Tokenizer
from pagelet.runtime.backends.base import Backend
from pagelet.runtime.backends.select import (
    cache_memory,
    cache_shape,
    device_memory,
    open_backend,
    weights_bytes,
)
from pagelet.runtime.cache_layout import CacheShape
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.speculation.choice import lookups
from pagelet.runtime.speculation.draft import DraftProposer
from pagelet.runtime.speculation.pairing import check_pair
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.speculation.speculator import MAX_ROWS
from pagelet.runtime.tasks import Scoring

_HASHING = 0.8  # of stage "verify"; the rest is the replay

# (stage, fraction of it that is done); False cancels. Stages: "verify", "tokenizer", "session", "draft".
OnOpenProgress = Callable[[str, float], bool | None]


@dataclass(frozen=True)
class Opened:
    """What an engine is made of."""

    backend: Backend
    tokenizer: Tokenizer
    manifest: Manifest
    proposers: list[Proposer]


@dataclass(frozen=True)
class _Model:
    """A bundle whose files were checked, and the shape of its cache."""

    folder: Path
    manifest: Manifest
    shape: CacheShape

    def load(self, num_bytes: int, context: int, config: EngineConfig, max_rows: int) -> Backend:
        layout = self.shape.layout(num_bytes, context)
        return open_backend(self.folder, self.manifest, layout, config, max_rows)


def open_bundle(
    folder: Path, config: EngineConfig, verify: bool, on_progress: OnOpenProgress | None
) -> Opened:
    """What `Engine.open` does; errors as there. Nothing stays open if it fails or is cancelled."""

    def report(stage: str, fraction: float) -> None:
        if on_progress is not None and on_progress(stage, fraction) is False:
            raise CancelledError(f"opening {folder} was cancelled in stage {stage!r}.")

    target = _checked(folder, config, verify, report)
    draft = None if config.draft is None else _checked(Path(config.draft), config, verify, report)
    context = min(target.manifest.spec.max_context, config.max_context or target.manifest.spec.max_context)
    budgets = _budgets(target, draft, context, config)
    max_rows = config.max_sequences + Scoring.max_chunk + MAX_ROWS
    # The graph is loaded without the interpreter's lock, which the tokenizer's file is read with.
    proposers = lookups(config)
    with ThreadPoolExecutor(1, "pagelet-open") as pool:
        loading = pool.submit(target.load, budgets[0], context, config, max_rows)
        try:
            report("tokenizer", 0.0)
            tokenizer = Tokenizer.open(folder, target.manifest.text)
            report("tokenizer", 1.0)
            report("session", 0.0)
            backend = loading.result()
            report("session", 1.0)
            if draft is not None:
                report("draft", 0.0)
                proposers.append(_open_draft(target, draft, budgets[1], context, config))
                report("draft", 1.0)
        except BaseException:
            if loading.exception() is None:
                loading.result().close()
            for proposer in proposers:
                proposer.close()
            raise
    _trim_heap()
    return Opened(backend, tokenizer, target.manifest, proposers)


def _check_steps(model: "_Model", config: EngineConfig) -> None:
    """An engine takes steps of so many sequences and rows."""
    gpu = model.manifest.gpu
    if gpu is None or not gpu.kernels:
        return
    for name, most in (("max_sequences", gpu.max_sequences), ("max_step_tokens", gpu.step_tokens)):
        if (asked := getattr(config, name)) > most:
            raise CapacityError(
                f"{name} is {asked}, but the engine of {model.folder} was made for {most}. Lower {name}."
            )


def _checked(
    folder: Path, config: EngineConfig, verify: bool, report: Callable[[str, float], None]
) -> _Model:
    manifest = load_manifest(folder)
    _check_files(folder, manifest, verify, report)
    if verify:
        _check_numbers(folder, manifest, config)
        report("verify", 1.0)
    model = _Model(folder, manifest, cache_shape(manifest, config.max_step_tokens))
    _check_steps(model, config)
    return model


def _budgets(target: _Model, draft: _Model | None, context: int, config: EngineConfig) -> list[int]:
    """Bytes of each model's cache: one budget, divided so that both hold as many tokens."""
    models = [target] if draft is None else [target, draft]
    if draft is not None:
        check_pair(target.folder, target.manifest, draft.folder, draft.manifest, context)
        _check_room(draft)

    def sequence_bytes(num_tokens: int) -> int:
        return sum(model.shape.sequence_bytes(num_tokens) for model in models)

    total = config.cache_bytes(sequence_bytes, context, cache_memory([model.manifest for model in models]))
    if draft is not None and total < sequence_bytes(1):
        raise CapacityError(
            f"{total} bytes are given to the KV cache, but one block of the target and one of the draft take "
            f"{target.shape.sequence_bytes(1)} and {draft.shape.sequence_bytes(1)}. Raise kv_memory."
        )
    if draft is None:
        return [total]
    shares = [model.shape.sequence_bytes(context) for model in models]
    # At least one block each, which whoever has the smaller share may not have.
    least = [model.shape.sequence_bytes(1) for model in models]
    rest = min(max(total * shares[1] // sum(shares), least[1]), total - least[0])
    return [total - rest, rest]


def _check_room(draft: _Model) -> None:
    """The target alone is let in beside what is free; a second model must not push it into swap."""
    weights, free = weights_bytes(draft.manifest), device_memory(draft.manifest)
    if weights > free:
        raise CapacityError(
            f"the draft {draft.folder} has {weights} bytes of weights, but only {free} bytes of memory are "
            "free beside the target. Close other programs, or open without a draft."
        )


def _open_draft(
    target: _Model, draft: _Model, num_bytes: int, context: int, config: EngineConfig
) -> DraftProposer:
    backend = draft.load(num_bytes, context, config, config.max_sequences)
    try:
        proposer = DraftProposer(
            backend,
            vocab_size=target.manifest.spec.vocab_size,
            context=context,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
            prefix_cache=config.prefix_cache,
        )
        proposer.measure()
    except BaseException:
        backend.close()
        raise
    return proposer


def _trim_heap() -> None:
    """Give the C library's free memory back: reading a tokenizer leaves twice as much as it needs."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc has it
        trim(0)


def _check_files(
    folder: Path, manifest: Manifest, verify: bool, report: Callable[[str, float], None]
) -> None:
    entries = manifest.files.values()
    total = sum(entry.bytes for entry in entries if verify or not entry.weights)
    share = _HASHING if verify else 1.0
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        report("verify", share * done / total)

    report("verify", 0.0)
    check_files(folder, manifest, weights=verify, on_bytes=on_bytes)


def _check_numbers(folder: Path, manifest: Manifest, config: EngineConfig) -> None:
    """Refuse a bundle that computes other numbers here than it should; one without a certificate passes."""
    from pagelet.runtime.verification import replay

    found = replay(folder, manifest, config.threads)
    if found.status == "broken":
        raise BundleError(f"{folder} {found.explanation}")
