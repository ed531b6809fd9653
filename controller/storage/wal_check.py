"""What a store's write-ahead log holds that SQLite would leave out without a word. Pure.

SQLite reads a log up to the first frame whose sum is wrong: there, it says, the power failed. That
is true of the last transaction only, since none begins before the one before is on the disk. Where
the log goes on behind such a frame it is damaged, and what was acknowledged would be forgotten.
"""

from struct import Struct

import numpy as np
from numpy.typing import NDArray

_HEAD = Struct(">IIII8sII")  # magic, version, size of a page, checkpoints, salts, sums
_FRAME = Struct(">II8sII")  # page, pages after a commit or 0, salts, sums
_MAGIC = 0x377F0682  # the lowest bit: sums are of big-endian words
_SUMMED_BYTES = 8  # of a frame's head, besides its page
_PAGE_BYTES = frozenset(1 << power for power in range(9, 17))
Words = NDArray[np.uint32]


def is_damaged(log: bytes) -> bool:
    """Would SQLite leave transactions out that were on the disk? `log`: the file as it is."""
    if len(log) < _HEAD.size:
        return False
    magic, _, page_bytes, _, salts, *sums = _HEAD.unpack_from(log)
    order = ">" if magic & 1 else "<"
    words = np.frombuffer(log, dtype=f"{order}u4", count=6).astype(np.uint32)
    is_whole = magic | 1 == _MAGIC | 1 and page_bytes in _PAGE_BYTES
    is_whole = is_whole and _sums(np.zeros((1, 2), np.uint32), words[None, :])[0].tolist() == sums
    if not is_whole:  # of a log that had just begun, or all of it is out of reach
        return _has_two_transactions_anyhow(log)
    frames = _frames(log, page_bytes)
    if len(frames) < 2:
        return False
    heads = frames[:, : _FRAME.size]
    is_own = (heads[:, 8:16] == np.frombuffer(salts, np.uint8)).all(axis=1)
    told = np.ascontiguousarray(heads[:, 16:24]).view(">u4").astype(np.uint32)
    before = np.vstack([np.array([sums], np.uint32), told[:-1]])
    summed = np.ascontiguousarray(np.delete(frames, np.s_[_SUMMED_BYTES : _FRAME.size], axis=1))
    is_right = is_own & (_sums(before, summed.view(f"{order}u4")) == told).all(axis=1)
    first_wrong = int(np.argmin(is_right)) if not is_right.all() else len(is_right)
    return _goes_on(heads[first_wrong:], is_own[first_wrong:])


def _goes_on(heads: NDArray[np.uint8], is_own: NDArray[np.bool_]) -> bool:
    """Is there a frame of this log behind the end of a transaction?"""
    ends = np.flatnonzero(is_own & (heads[:, 4:8] != 0).any(axis=1))
    return bool(ends.size) and bool(is_own[ends[0] + 1 :].any())


def _has_two_transactions_anyhow(log: bytes) -> bool:
    """Whatever size its pages have: the head that would say it can not be read."""
    for page_bytes in sorted(_PAGE_BYTES):
        heads = _frames(log, page_bytes)[:, : _FRAME.size]
        if len(heads) > 1:
            is_own = (heads[:, 8:16] == heads[0, 8:16]).all(axis=1)
            if bool(is_own[1]) and _goes_on(heads, is_own):
                return True
    return False


def _frames(log: bytes, page_bytes: int) -> NDArray[np.uint8]:
    """The whole ones [frames, bytes]."""
    size = _FRAME.size + page_bytes
    count = (len(log) - _HEAD.size) // size
    return np.frombuffer(log, np.uint8, count * size, _HEAD.size).reshape(count, size)


def _sums(before: Words, words: NDArray[np.generic]) -> Words:
    """The sums [frames, 2] of words [frames, words], each begun with the sums before it."""
    one, other = before[:, 0].copy(), before[:, 1].copy()
    for i in range(0, words.shape[1], 2):
        one += words[:, i].astype(np.uint32) + other
        other += words[:, i + 1].astype(np.uint32) + one
    return np.stack([one, other], axis=1)
