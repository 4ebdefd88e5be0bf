"""Which part of the held-out texts is compared: a share of each, in windows."""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

MAX_TOKENS = 4096
WINDOW = 1024
# However little time there is; and windows are no shorter, or most of their tokens would lack a context.
MIN_TOKENS = 128
_SAMPLE = 256


def held_out(texts: Sequence[Sequence[int]], budget: int, max_context: int) -> list[list[int]]:
    """Windows of at least two tokens, taken from each text in turn, of about `budget` tokens in all."""
    share = max(budget // max(len(texts), 1), MIN_TOKENS)
    size = max(min(share, WINDOW, max_context), 2)
    cuts = [[list(text[at : at + size]) for at in range(0, len(text), size)] for text in texts]
    chosen: list[list[int]] = []
    for piece in _in_turn(cuts):
        if len(window := piece[: max(budget, 0)]) > 1:
            chosen.append(window)
            budget -= len(window)
    return chosen


def sample(pieces: Sequence[Sequence[int]]) -> list[slice]:
    """Rows of the beginnings of some windows, 256 tokens in all, where single layers are compared."""
    lengths = [len(piece) for piece in pieces]
    starts = [sum(lengths[:index]) for index in range(len(pieces))]
    few = range(0, len(pieces), max(len(pieces) // 4, 1))[:4]
    return [slice(starts[i], starts[i] + min(lengths[i], _SAMPLE // len(few))) for i in few]


def _in_turn(cuts: Sequence[Sequence[list[int]]]) -> Iterator[list[int]]:
    return (piece for piece in chain.from_iterable(zip_longest(*cuts, fillvalue=[])) if piece)
