"""What every engine is asked to do, and with which prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagelet.models.errors import InputError


@dataclass(frozen=True)
class Scenario:
    """One shape of run.

    Attributes:
        every: it is run in each such round only, for those that take long.
        ours_only: it serves a figure that only pagelet's own rows have.
    """

    key: str
    prompt_tokens: int
    new_tokens: int
    sequences: int = 1
    every: int = 1
    ours_only: bool = False

    @property
    def tokens(self) -> int:
        """What all sequences hold together at the end."""
        return self.sequences * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and replies, and the numbers of sequences.

    Raises:
        InputError: one is out of its bounds.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    long_prompt_tokens: int = 4096
    long_new_tokens: int = 32
    batch_tokens: int = 128  # of each prompt and each reply, where many sequences run at once
    batches: tuple[int, ...] = (8, 16)
    rows: tuple[int, ...] = (4, 8)
    row_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "long_prompt_tokens"):
            _check(name, getattr(self, name), 1, 1 << 20)
        for name in ("new_tokens", "long_new_tokens", "batch_tokens", "row_tokens"):
            _check(name, getattr(self, name), 2, 1 << 16)
        for name in ("batches", "rows"):
            for count in getattr(self, name):
                _check(name, count, 1, 32)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"--{name.replace('_', '-')} is {value}; expected {least} to {most}.")


def scenarios(sizes: Sizes) -> list[Scenario]:
    """All of them, in the order of a round; the plain one first, for peak memory is taken after it."""
    plain = Scenario("plain", sizes.prompt_tokens, sizes.new_tokens)
    long = Scenario("long", sizes.long_prompt_tokens, sizes.long_new_tokens, every=2)
    batches = [
        Scenario(f"batch-{count}", sizes.batch_tokens, sizes.batch_tokens, count, every=2)
        for count in sizes.batches
    ]
    rows = [
        Scenario(f"rows-{count}", sizes.row_tokens, sizes.row_tokens, count, ours_only=True)
        for count in (1, *sizes.rows)
    ]
    return [plain, *rows, *batches, long]


def prompts(scenario: Scenario, round_index: int, allowed: Sequence[int]) -> list[list[int]]:
    """The same random tokens of `allowed` in every round, but for the first one of each sequence.

    That one is never the same twice, so that no engine finds a prompt's beginning in a cache.
    """
    choose = np.random.default_rng(0)
    tokens = choose.choice(np.asarray(allowed), (scenario.sequences, scenario.prompt_tokens))
    tokens[:, 0] = np.take(
        allowed, round_index * scenario.sequences + np.arange(scenario.sequences), mode="wrap"
    )
    return [[int(token) for token in prompt] for prompt in tokens]
