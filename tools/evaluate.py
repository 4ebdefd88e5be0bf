"""What quantization costs: perplexity of a text, and the distance to a reference, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
    scores = []
    for done, piece in enumerate(pieces):
        if on_piece:
            on_piece(done, len(pieces), "")
        ours, targets = engine.logits(piece), np.asarray(piece[1:])
        theirs = reference.logits(piece) if reference else None
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, min(start + _ROWS, len(targets)))
            scores.append(_score(ours[rows], targets[rows], None if theirs is None else theirs[rows]))
    return _summary(np.concatenate(scores, axis=1))


def log_softmax(logits: Logits) -> NDArray[np.float32]:
    """Row-wise log-probabilities [T, vocab]; the sum runs in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: NDArray[np.float32] = shifted - np.log(total).astype(np.float32)
    return result


def _score(ours: Logits, targets: NDArray[np.int64], theirs: Logits | None) -> NDArray[np.float64]:
    """[1 or 4, T]: the loss; with a reference its loss too, the KL divergence, and whether both agree."""
    rows = np.arange(len(targets))
    ours = log_softmax(ours)
    if theirs is None:
        return -ours[rows, targets][None].astype(np.float64)
    theirs = log_softmax(theirs)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1, dtype=np.float64)
    agree = ours.argmax(axis=1) == theirs.argmax(axis=1)
    return np.stack([-ours[rows, targets], -theirs[rows, targets], kl, agree]).astype(np.float64)


def _summary(scores: NDArray[np.float64]) -> EvalResult:
    tokens, perplexity = scores.shape[1], float(np.exp(scores[0].mean()))
    if len(scores) == 1:
        return EvalResult(tokens, perplexity)
    _, reference_loss, kl, agree = scores
    return EvalResult(
        tokens,
        perplexity,
        float(np.exp(reference_loss.mean())),
        float(kl.mean()),
        float(np.quantile(kl, 0.99)),
        float(agree.mean()),
    )
