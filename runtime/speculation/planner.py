"""Which candidates a step verifies: as many as raise the expected tokens per second."""

from collections.abc import Callable, Sequence

from pagelet.runtime.speculation.proposal import Proposal

# Numbers of candidates that are tried: a step's time bends little between two of them.
_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 31, 32, 40, 48, 63, 64, 96, 128)


def plan(
    outlooks: Sequence[Proposal],
    num_sequences: int,
    seconds: Callable[[Sequence[int]], float],
    limit: int,
) -> tuple[list[int], float]:
    """How many candidates of each outlook to verify, and the expected tokens per second.

    A chain of K candidates that are each accepted with probability a gives 1 + a + ... + a^K =
    (1 - a^(K+1)) / (1 - a) tokens (Leviathan et al. 2023). Over several sequences, and trees, the sum of the
    probabilities of all paths takes its place: the likeliest candidates of all sequences are added one after
    the other, and the number with the best tokens per second wins.

    Args:
        num_sequences: those that the step decodes, each of which gives a token in any case.
        seconds: of a step that verifies so many candidates of each outlook.
        limit: most candidates of the step.
    """
    ranked = sorted(
        (-likelihood, which) for which, outlook in enumerate(outlooks) for likelihood in likelihoods(outlook)
    )[:limit]
    lengths = [0] * len(outlooks)
    best, best_rate = lengths.copy(), num_sequences / seconds(lengths)
    tokens = float(num_sequences)
    for count, (negative, which) in enumerate(ranked, 1):
        lengths[which] += 1
        tokens -= negative
        if count in _TRIED or count == len(ranked):
            rate = tokens / seconds(lengths)
            if rate > best_rate:
                best, best_rate = lengths.copy(), rate
    return best, best_rate


def likelihoods(outlook: Proposal) -> list[float]:
    """Probability that each candidate is reached and accepted, lowered to those before it in the list.

    So a beginning of the outlook is always likelier than what follows it.
    """
    paths: list[float] = []
    lowered: list[float] = []
    for candidate in outlook:
        before = paths[candidate.parent] if candidate.parent >= 0 else 1.0
        paths.append(before * candidate.probability)
        lowered.append(min(paths[-1], lowered[-1]) if lowered else paths[-1])
    return lowered
