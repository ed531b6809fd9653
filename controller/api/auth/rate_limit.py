"""Token buckets: rate limits of calls, reports and log lines. Pure; the caller passes the time."""

from dataclasses import dataclass, field

REPORT_BYTES = 8 << 10  # a larger report counts as several


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A sustained rate `per_s` with bursts of `at_once`."""

    per_s: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tokens left at `at_s`; negative after `charge`d costs above the allowance."""

    left: float
    at_s: float


def full_bucket(limit: Limit, now_s: float) -> Bucket:
    """The bucket of a new caller."""
    return Bucket(float(limit.at_once), now_s)


def try_take(bucket: Bucket, limit: Limit, now_s: float) -> tuple[Bucket, bool]:
    """Take one token if there is one. A rejected attempt costs nothing.

    Returns:
        The bucket afterwards, and whether a token was taken.
    """
    left = _refilled(bucket, limit, now_s)
    if left < 1.0:
        return Bucket(left, now_s), False
    return Bucket(left - 1.0, now_s), True


def charge(bucket: Bucket, limit: Limit, now_s: float, cost: float = 1.0) -> tuple[Bucket, float]:
    """Take `cost` tokens, also more than there are.

    Returns:
        The bucket afterwards, and the seconds until it is positive again.
    """
    left = _refilled(bucket, limit, now_s) - cost
    return Bucket(left, now_s), max(0.0, -left / limit.per_s)


def report_cost(size_bytes: int) -> float:
    """The number of reports that one of `size_bytes` counts as, for its cost to read."""
    return max(1.0, size_bytes / REPORT_BYTES)


def _refilled(bucket: Bucket, limit: Limit, now_s: float) -> float:
    # A clock that goes back changes nothing.
    earned = max(0.0, now_s - bucket.at_s) * limit.per_s
    return min(float(limit.at_once), bucket.left + earned)


@dataclass(slots=True, eq=False, kw_only=True)
class RateLimiter:
    """One bucket per caller; the least recent callers beyond `capacity` are forgotten."""

    limit: Limit
    capacity: int = 65536
    _of: dict[str, Bucket] = field(default_factory=dict)

    def is_granted(self, caller: str, now_s: float) -> bool:
        """Take a token of this caller; whether it had one."""
        bucket = self._of.pop(caller, None) or full_bucket(self.limit, now_s)
        bucket, granted = try_take(bucket, self.limit, now_s)
        self._of[caller] = bucket  # the newest last
        if len(self._of) > self.capacity:
            del self._of[next(iter(self._of))]
        return granted


@dataclass(slots=True, eq=False)
class LogRateLimiter:
    """Rate limiter for log lines, per caller and in total; counts the suppressed ones."""

    of_each: Limit = Limit(per_s=0.1, at_once=20)
    of_all: Limit = Limit(per_s=1.0, at_once=1000)
    _each: RateLimiter = field(init=False)
    _all: RateLimiter = field(init=False)
    _suppressed: int = 0

    def __post_init__(self) -> None:
        self._each, self._all = RateLimiter(limit=self.of_each), RateLimiter(limit=self.of_all)

    def suffix(self, caller: str, now_s: float) -> str | None:
        """The suffix of a log line about `caller`; None: the line is suppressed."""
        # A caller beyond its own limit does not use up the total.
        if not (self._each.is_granted(caller, now_s) and self._all.is_granted("", now_s)):
            self._suppressed += 1
            return None
        suppressed, self._suppressed = self._suppressed, 0
        return f" ({suppressed} similar lines were suppressed before)" if suppressed else ""
