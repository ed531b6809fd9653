"""Token buckets: how much one caller may ask, in the long run and at once. Pure; time is told."""

from dataclasses import dataclass, field

REPORT_BYTES = 8 << 10  # a larger report counts as several


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`per_s` in the long run, `at_once` after a rest."""

    per_s: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is left of one caller's allowance at a moment; below 0 it is owed."""

    left: float
    at_s: float


def full_bucket(limit: Limit, now_s: float) -> Bucket:
    """The bucket of who was never heard of."""
    return Bucket(float(limit.at_once), now_s)


def try_take(bucket: Bucket, limit: Limit, now_s: float) -> tuple[Bucket, bool]:
    """One more, where there is one left: what remains, and whether it was granted.

    What is refused takes nothing, so that who keeps asking is let in at the limit's pace.
    """
    left = _refilled(bucket, limit, now_s)
    if left < 1.0:
        return Bucket(left, now_s), False
    return Bucket(left - 1.0, now_s), True


def charge(bucket: Bucket, limit: Limit, now_s: float, cost: float = 1.0) -> tuple[Bucket, float]:
    """So much more in any case: what remains, and the seconds to wait before it may be used."""
    left = _refilled(bucket, limit, now_s) - cost
    return Bucket(left, now_s), max(0.0, -left / limit.per_s)


def report_cost(size_bytes: int) -> float:
    """How many reports one of this size counts as: a few large ones are as much to read as many."""
    return max(1.0, size_bytes / REPORT_BYTES)


def _refilled(bucket: Bucket, limit: Limit, now_s: float) -> float:
    # A clock that goes back gives nothing and takes nothing.
    earned = max(0.0, now_s - bucket.at_s) * limit.per_s
    return min(float(limit.at_once), bucket.left + earned)


@dataclass(slots=True, eq=False, kw_only=True)
class RateLimiter:
    """The buckets of those who called last; who was forgotten begins anew with a full one."""

    limit: Limit
    capacity: int = 65536
    _of: dict[str, Bucket] = field(default_factory=dict)

    def is_granted(self, caller: str, now_s: float) -> bool:
        """Is one more call of this caller within its limit?"""
        bucket = self._of.pop(caller, None) or full_bucket(self.limit, now_s)
        bucket, granted = try_take(bucket, self.limit, now_s)
        self._of[caller] = bucket  # the newest last
        if len(self._of) > self.capacity:
            del self._of[next(iter(self._of))]
        return granted


@dataclass(slots=True, eq=False)
class LogRateLimiter:
    """Lines that callers can bring about: few of each, few of all, and the rest is counted."""

    of_each: Limit = Limit(per_s=0.1, at_once=20)
    of_all: Limit = Limit(per_s=1.0, at_once=1000)
    _each: RateLimiter = field(init=False)
    _all: RateLimiter = field(init=False)
    _left_out: int = 0

    def __post_init__(self) -> None:
        self._each, self._all = RateLimiter(limit=self.of_each), RateLimiter(limit=self.of_all)

    def suffix(self, caller: str, now_s: float) -> str | None:
        """What to write behind this line; None: it is not written."""
        # A caller beyond its own limit takes nothing of what all have.
        if not (self._each.is_granted(caller, now_s) and self._all.is_granted("", now_s)):
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return f" ({left_out} lines like this were left out before)" if left_out else ""
