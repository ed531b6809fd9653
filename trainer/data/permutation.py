"""A pseudo-random permutation of [0, n) that is computed, not stored.

Used by the sampler: one permutation of all rows per (seed, epoch). It is a Feistel network over
pairs (left, right) with left < a, right < b and a * b just above n; a value outside [0, n) is
encrypted again until it is inside (cycle walking; Black and Rogaway, 2002). The hash is splitmix64,
written out here: the same seed gives the same order with any version of numpy.
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of [0, size).

    Args:
        size: number of values, at least 1.
        seed: any integer.
        epoch: any integer; each (seed, epoch) gives an order of its own.
    """

    size: int
    seed: int
    epoch: int

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each index goes: int64 of the same shape [k], values in [0, size)."""
        num_left = isqrt(self.size - 1) + 1
        num_right = -(-self.size // num_left)
        keys = self._keys()
        found = indices.astype(np.uint64)
        outside = np.arange(len(found))
        while len(outside):
            left, right = np.divmod(found[outside], np.uint64(num_right))
            for number in range(0, _ROUNDS, 2):
                left = _add(left, _hash(right, keys[number]), num_left)
                right = _add(right, _hash(left, keys[number + 1]), num_right)
            found[outside] = left * np.uint64(num_right) + right
            outside = outside[found[outside] >= np.uint64(self.size)]
        return found.astype(np.int64)

    def _keys(self) -> list[int]:
        state = _hash_one(_hash_one(self.seed & _MASK) ^ (self.epoch & _MASK))
        return [_hash_one((state + number * _GOLDEN) & _MASK) for number in range(_ROUNDS)]


def _add(
    values: NDArray[np.uint64], hashes: NDArray[np.uint64], modulus: int
) -> NDArray[np.uint64]:
    """Add modulo `modulus`; the hash is reduced first, else the sum could pass 2^64."""
    m = np.uint64(modulus)
    return (values + hashes % m) % m


def _hash(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 over `values + key`, modulo 2^64."""
    mixed = values + np.uint64(key)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(_SHIFTS[-1]))


def _hash_one(value: int) -> int:
    mixed = (value + _GOLDEN) & _MASK
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        mixed = ((mixed ^ (mixed >> shift)) * multiplier) & _MASK
    return mixed ^ (mixed >> _SHIFTS[-1])
