"""What quantization costs: perplexity of a text, and the distance to a reference, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagelet.models.distance import LogitsDistance, log_softmax, token_losses
from pagelet.models.errors import InputError

Logits = NDArray[np.float32]
OnPiece = Callable[[int, int, str], None]

_ROWS = 128  # of logits at once: copies of a whole window's would take a gigabyte


class Scorer(Protocol):
    """What can be evaluated: an engine of ours, another one, logits that were kept."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits [T, vocab] after each of T tokens, read from an empty context."""


@dataclass(frozen=True)
class EvalResult:
    """Over all scored tokens; KL divergences are in nats, from the reference to the bundle."""

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1_agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def windows(tokens: Sequence[int], size: int, limit: int | None = None) -> Iterator[list[int]]:
    """Consecutive pieces of `size` tokens, the last one shorter; at most `limit` tokens in all."""
    tokens = list(tokens[:limit] if limit else tokens)
    for start in range(0, len(tokens), size):
        if len(tokens) - start > 1:
            yield tokens[start : start + size]


def evaluate(
    engine: Scorer,
    pieces: Sequence[Sequence[int]],
    reference: Scorer | None = None,
    on_piece: OnPiece | None = None,
) -> EvalResult:
    """Score each piece from an empty context: every token but the first, given those before it.

    Raises:
        InputError: there is nothing to score, or the vocabularies differ.
    """
    if not pieces:
        raise InputError("the text has fewer than two tokens; there is nothing to score.")
    if reference and reference.vocab_size != engine.vocab_size:
        raise InputError(f"the vocabularies differ: {engine.vocab_size} and {reference.vocab_size} tokens.")
    distance, losses = LogitsDistance(), []
    for done, piece in enumerate(pieces):
        if on_piece:
            on_piece(done, len(pieces), "")
        ours, targets = engine.logits(piece)[:-1], np.asarray(piece[1:])
        if reference:
            distance.add(ours, reference.logits(piece)[:-1], targets)
        else:
            losses.append(_losses(ours, targets))
    if reference:
        return EvalResult(**asdict(distance.quality()))
    scores = np.concatenate(losses)
    return EvalResult(len(scores), float(np.exp(scores.mean())))


def _losses(logits: Logits, targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each token [T], a piece of the rows at a time."""
    pieces = [slice(start, start + _ROWS) for start in range(0, len(targets), _ROWS)]
    return np.concatenate([token_losses(log_softmax(logits[rows]), targets[rows]) for rows in pieces])
