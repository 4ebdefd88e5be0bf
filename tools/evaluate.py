"""What quantization costs: perplexity of a text, and the distance to a reference, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import InputError
from pagelet.runtime import Engine

Logits = NDArray[np.float32]


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
    engine: Engine,
    pieces: Sequence[Sequence[int]],
    reference: Engine | None = None,
    on_piece: Callable[[int, int, str], None] | None = None,
) -> EvalResult:
    """Score each piece from an empty context: every token but the first, given those before it.

    Raises:
        InputError: there is nothing to score, or the vocabularies differ.
    """
    if not pieces:
        raise InputError("the text has fewer than two tokens; there is nothing to score.")
    if reference and reference.vocab_size != engine.vocab_size:
        raise InputError(f"the vocabularies differ: {engine.vocab_size} and {reference.vocab_size} tokens.")
    losses, reference_losses, kls, agree = [], [], [], []
    for done, piece in enumerate(pieces):
        if on_piece:
            on_piece(done, len(pieces), "")
        ours = log_softmax(engine.logits(piece)[:-1])
        targets = np.asarray(piece[1:])
        losses.append(-np.take_along_axis(ours, targets[:, None], 1))
        if reference:
            theirs = log_softmax(reference.logits(piece)[:-1])
            reference_losses.append(-np.take_along_axis(theirs, targets[:, None], 1))
            kls.append((np.exp(theirs) * (theirs - ours)).sum(axis=1, dtype=np.float64))
            agree.append(ours.argmax(1) == theirs.argmax(1))
    count = sum(len(loss) for loss in losses)
    perplexity = _perplexity(losses)
    if not reference:
        return EvalResult(count, perplexity)
    kl = np.concatenate(kls)
    return EvalResult(
        count,
        perplexity,
        _perplexity(reference_losses),
        float(kl.mean()),
        float(np.quantile(kl, 0.99)),
        float(np.concatenate(agree).mean()),
    )


def log_softmax(logits: Logits) -> NDArray[np.float32]:
    """Row-wise log-probabilities [T, vocab]; the sum runs in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: NDArray[np.float32] = shifted - np.log(total).astype(np.float32)
    return result


def _perplexity(losses: Sequence[NDArray[np.floating[Any]]]) -> float:
    return float(np.exp(np.concatenate(losses).mean(dtype=np.float64)))
