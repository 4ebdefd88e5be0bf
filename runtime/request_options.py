"""RequestOptions: how a request is served, beside what it samples; validated where it enters."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import InputError
from pagelet.runtime.truncation import OnContextFull

# (prompt tokens read, prompt tokens in all); False cancels the request.
OnProgress = Callable[[int, int], bool | None]
# (tokens generated so far) to bool [vocab], True where the next token is allowed; None allows all.
TokenMask = Callable[[Sequence[int]], "NDArray[np.bool_] | None"]
MAX_SALT_CHARACTERS = 1_024


class Options(TypedDict, total=False):
    """The keyword arguments that `submit` and everything built on it take: fields of RequestOptions."""

    priority: int
    timeout: float | None
    on_progress: OnProgress | None
    cache_salt: str | None
    prefix_cache: bool
    on_context_full: OnContextFull
    speculate: bool
    token_mask: TokenMask | None


@dataclass(frozen=True)
class RequestOptions:
    """How one request is served.

    Attributes:
        priority: higher is served first; equal ones in order of arrival.
        timeout: seconds from now; what is there then becomes the result, with finish_reason "timeout".
        on_progress: told (prompt tokens read, prompt tokens), in the engine's own thread, so it must be
            quick. If it returns False the request is cancelled.
        cache_salt: only requests with the same salt find each other's blocks in the prefix cache, so
            that nobody learns by timing what others asked.
        prefix_cache: find and publish blocks at all.
        on_context_full: what becomes of messages that leave no room for a reply: "refuse" them, or "truncate"
            them, which drops the oldest turns after the system prompt and says how many messages it took.
        speculate: let the engine guess ahead where it can; the text is the same either way.
        token_mask: which tokens may come next, asked before each draw in the engine's own thread, so it must
            be quick; the same tokens must give the same answer. Bool [vocab], or None for all.

    Raises:
        InputError: a value of the wrong type or out of its range.
    """

    priority: int = 0
    timeout: float | None = None
    on_progress: OnProgress | None = None
    cache_salt: str | None = None
    prefix_cache: bool = True
    on_context_full: OnContextFull = "refuse"
    speculate: bool = True
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):
            raise InputError(f"priority is {self.priority!r}; expected a whole number.")
        if self.timeout is not None and not (
            isinstance(self.timeout, int | float) and 0 < self.timeout <= threading.TIMEOUT_MAX
        ):
            raise InputError(f"timeout is {self.timeout!r}; expected seconds above 0, or None.")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARACTERS):
            raise InputError(
                f"cache_salt is {str(salt)[:40]!r}; expected 1 to {MAX_SALT_CHARACTERS} characters, or None."
            )
        for name in ("prefix_cache", "speculate"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name} is {value!r}; expected true or false.")
        if self.token_mask is not None and not callable(self.token_mask):
            raise InputError(f"token_mask is {self.token_mask!r}; expected a function, or None.")
        if self.on_context_full not in get_args(OnContextFull):
            known = " or ".join(map(repr, get_args(OnContextFull)))
            raise InputError(f"on_context_full is {self.on_context_full!r}; expected {known}.")
