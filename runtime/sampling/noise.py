"""Counter-based noise: a pure function of (seed, sample index, position, token id).

No generator has a state, so a token's noise can be computed for any subset of the vocabulary, in any
order and as often as needed: batching, speculation and filters cannot change what a seed draws.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = 2**64 - 1


def mix64(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al. 2014, Fast Splittable Pseudorandom Number Generators)."""
    value &= _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def row_key(seed: int, sample_index: int, position: int) -> int:
    """64-bit key of one draw; every argument passes the finalizer before the next is added."""
    golden = 0x9E3779B97F4A7C15
    return mix64(mix64(mix64(seed + golden) + sample_index + golden) + position + golden)


def token_bits(key: int, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """uint32 [m]: 32 random bits for each token id of the draw `key`.

    A keyed 32-bit mixer with the multipliers and shifts of `triple32` (C. Wellons, hash-prospector, 2018).
    The key's halves are added before it and within it, so that two draws are not shifts of one sequence.
    32-bit lanes, since AVX2 has no 64-bit product.
    """
    bits: NDArray[np.uint32] = token_ids * np.uint32(0x9E3779B1)
    bits += np.uint32(key & 0xFFFFFFFF)
    shifted = bits >> np.uint32(17)
    bits ^= shifted
    bits *= np.uint32(0xED5AD4BB)
    np.right_shift(bits, np.uint32(11), out=shifted)
    bits ^= shifted
    bits += np.uint32(key >> 32)
    bits *= np.uint32(0xAC4C1B51)
    np.right_shift(bits, np.uint32(15), out=shifted)
    bits ^= shifted
    bits *= np.uint32(0x31848BAB)
    np.right_shift(bits, np.uint32(14), out=shifted)
    bits ^= shifted
    return bits


def exponential(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """float64 [m]: Exp(1) variates -log(1 - x), x = (bits + 1/2) / 2**32; never below x, never 0."""
    return -np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32)


def gumbel(key: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """float64 [m]: standard Gumbel variates, -log of an exponential one."""
    gumbels: NDArray[np.float64] = -np.log(exponential(token_bits(key, token_ids)))
    return gumbels
