"""Distances between a bundle and its original: of logits, and of residual streams."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagelet.models.certificate import Quality

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# Rows at once: of a vocabulary of 128,000 they take 8 MB, which a cache may hold.
_ROWS = 16


def relative_error(ours: Float32, reference: Float32, scale: Float32 | None = None) -> float:
    """Root mean square of the difference over that of `scale`, or of the reference; 0 if they are equal."""
    difference = np.subtract(ours, reference, dtype=np.float64)
    norm = float(np.linalg.norm(reference if scale is None else scale))
    error = float(np.linalg.norm(difference))
    return error / norm if norm else float(error > 0)


def log_softmax(logits: Float32) -> Float32:
    """Row-wise log-probabilities float32 [T, vocab]; the sum runs in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: Float32 = shifted - np.log(total).astype(np.float32)
    return result


def token_losses(log_probabilities: Float32, targets: NDArray[np.int64]) -> Float64:
    """Negative log-probabilities [T], in nats, of the tokens [T] that did follow."""
    losses: Float64 = -np.take_along_axis(log_probabilities, targets[:, None], 1)[:, 0].astype(np.float64)
    return losses


def kl_divergence(reference: Float32, ours: Float32) -> Float64:
    """From `reference` to `ours`, log-probabilities float32 [T, vocab], in nats, float64 [T].

    Never negative: what rounding puts below zero is zero.
    """
    divergences: Float64 = (np.exp(reference) * (reference - ours)).sum(axis=1, dtype=np.float64)
    np.maximum(divergences, 0, out=divergences)
    return divergences


@dataclass
class LogitsDistance:
    """Collects what a `Quality` says, some rows of logits at a time."""

    _losses: list[Float64] = field(default_factory=list)
    _reference_losses: list[Float64] = field(default_factory=list)
    _kls: list[Float64] = field(default_factory=list)
    _agrees: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, ours: Float32, reference: Float32, targets: NDArray[np.int64]) -> None:
        """Logits [T, vocab] of both, and the tokens [T] that did follow."""
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            self._add(log_softmax(ours[rows]), log_softmax(reference[rows]), targets[rows])

    def _add(self, ours: Float32, reference: Float32, targets: NDArray[np.int64]) -> None:
        self._losses.append(token_losses(ours, targets))
        self._reference_losses.append(token_losses(reference, targets))
        self._kls.append(kl_divergence(reference, ours))
        self._agrees.append(ours.argmax(axis=1) == reference.argmax(axis=1))

    def quality(self) -> Quality:
        """Over all rows so far, at least one."""
        kl = np.concatenate(self._kls)
        return Quality(
            tokens=len(kl),
            perplexity=_perplexity(self._losses),
            reference_perplexity=_perplexity(self._reference_losses),
            mean_kl=float(kl.mean()),
            p99_kl=float(np.quantile(kl, 0.99)),
            top1_agreement=float(np.concatenate(self._agrees).mean()),
        )


def _perplexity(losses: list[Float64]) -> float:
    """At most float32's largest number, of which a broken model may have more."""
    most = float(np.finfo(np.float32).max)
    return float(np.exp(min(float(np.concatenate(losses).mean()), np.log(most))))
