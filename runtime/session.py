"""Sessions: a sequence with its cached blocks, saved to a file and brought back, also after a restart."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError, SessionError
from pagelet.runtime.prompts import check_prompt
from pagelet.runtime.request import Request
from pagelet.runtime.sampling import SamplerState, SamplingParams
from pagelet.runtime.saved_blocks import read_blocks, restore_blocks
from pagelet.runtime.session_file import (
    SavedSampler,
    SessionFile,
    SessionHeader,
    open_session,
    write_session,
)
from pagelet.runtime.step_loop import StepLoop


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of `Engine.save_session`."""

    sample: int
    cache_salt: str | None
    metadata: Mapping[str, Any] | None


@dataclass(frozen=True)
class SessionInfo:
    """What was saved: of `num_tokens`, the blocks of the first `saved_tokens`; the file has `num_bytes`."""

    num_tokens: int
    saved_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class LoadedSession:
    """A session as it was saved.

    Attributes:
        token_ids: prompt and generated tokens.
        restored_tokens: how many of the first of them are in the prefix cache now.
        sampler: how the next tokens are drawn; None where tokens were saved, not a request.
        metadata: the caller's own.
    """

    token_ids: list[int]
    restored_tokens: int
    sampler: SamplerState | None
    metadata: dict[str, Any]


def save(
    loop: StepLoop,
    path: Path,
    request_or_tokens: Request | Iterable[int],
    vocab_size: int,
    options: SaveOptions,
) -> SessionInfo:
    """What `Engine.save_session` does. The step thread only copies; the file is written in this one."""
    sampler, cache_salt = None, options.cache_salt
    if isinstance(request_or_tokens, Request):
        tokens, _ = request_or_tokens.tokens_so_far(options.sample)
        sampler, cache_salt = request_or_tokens.states[options.sample], request_or_tokens.options.cache_salt
    else:
        tokens = check_prompt(request_or_tokens, vocab_size)
    cache = loop.blocks.new_cache(salt=cache_salt)
    saved_tokens, blocks = loop.call(lambda: read_blocks(cache, tokens, loop.backend))
    header = SessionHeader(
        fingerprint=loop.backend.fingerprint,
        cache_type=loop.backend.cache_type,
        block_size=loop.blocks.block_size,
        windows=_windows(loop),
        num_tokens=len(tokens),
        saved_tokens=saved_tokens,
        num_blocks=tuple(map(len, blocks)),
        sampler=None if sampler is None else _as_saved(sampler),
        metadata=dict(options.metadata or {}),
    )
    return SessionInfo(len(tokens), saved_tokens, write_session(path, header, tokens, blocks))


def load(loop: StepLoop, path: Path, vocab_size: int, *, cache_salt: str | None) -> LoadedSession:
    """What `Engine.load_session` does. The file is read in this thread; the step thread only copies."""
    loop.check_open()
    with open_session(path) as file:
        header = file.header
        _check_compatible(header, loop, path)
        block_bytes = tuple(group.block_bytes for group in loop.backend.layout.groups)
        tokens = _checked_tokens(file, block_bytes, vocab_size, path)
        sampler = _sampler(header, path)
        groups = zip(header.num_blocks, loop.blocks.pools, strict=True)
        # What no pool of this size can hold is not even read.
        blocks = tuple(
            file.blocks(group, min(count, pool.num_blocks), block_bytes)
            for group, (count, pool) in enumerate(groups)
        )
    cache = loop.blocks.new_cache(salt=cache_salt)
    prefix = tokens[: header.saved_tokens]
    restored = loop.call(lambda: restore_blocks(loop.blocks, cache, prefix, blocks, loop.backend))
    return LoadedSession(tokens, restored, sampler, header.metadata)


def _windows(loop: StepLoop) -> tuple[int, ...]:
    return tuple(group.window for group in loop.backend.layout.groups)


def _check_compatible(header: SessionHeader, loop: StepLoop, path: Path) -> None:
    """Raise SessionError where the values in the file mean something else here."""
    for what, saved, mine in (
        ("cache type", header.cache_type, loop.backend.cache_type),
        ("block size", header.block_size, loop.blocks.block_size),
        ("windows", header.windows, _windows(loop)),
        ("model", header.fingerprint, loop.backend.fingerprint),
    ):
        if saved != mine:
            raise SessionError(
                f"{path} was saved with the {what} {str(saved)[:200]}; this engine has {mine}. "
                "Open the bundle that it was saved with, or begin anew."
            )
    size = header.block_size
    count, rest = divmod(header.saved_tokens, size)
    firsts = (table.first_needed(count * size) for table in loop.blocks.new_cache().tables)
    if rest or header.saved_tokens > header.num_tokens:
        raise SessionError(
            f"{path} has blocks of {header.saved_tokens} tokens out of {header.num_tokens}; expected "
            f"whole blocks of {size}."
        )
    expected = tuple(count - first for first in firsts)
    if header.num_blocks != expected:
        raise SessionError(f"{path} has {header.num_blocks[:20]} blocks; expected {expected}.")


def _checked_tokens(
    file: SessionFile, block_bytes: tuple[int, ...], vocab_size: int, path: Path
) -> list[int]:
    try:
        return check_prompt(file.tokens(block_bytes), vocab_size)
    except InputError as error:
        raise SessionError(f"{path} is damaged: {error}") from error


def _as_saved(state: SamplerState) -> SavedSampler:
    return SavedSampler(asdict(state.params), state.seed, state.sample_index, state.prompt_tokens)


def _sampler(header: SessionHeader, path: Path) -> SamplerState | None:
    saved = header.sampler
    if saved is None:
        return None
    try:
        params = SamplingParams.from_dict(saved.params)
    except InputError as error:
        raise SessionError(f"{path} has sampling parameters that are not valid: {error}") from error
    for what, value, low, high in (
        ("seed", saved.seed, 0, 2**64 - 1),
        ("sample", saved.sample_index, 0, params.n - 1),
        ("prompt's length", saved.prompt_tokens, 1, header.num_tokens),
    ):
        if not low <= value <= high:
            raise SessionError(f"{path} has a {what} of {value}; expected {low} to {high}.")
    return SamplerState(params, saved.seed, saved.sample_index, saved.prompt_tokens)
