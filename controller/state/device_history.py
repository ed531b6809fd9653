"""History of devices and nodes over all jobs. Pure.

A finding of kind device or link adds a strike (node, device, job, slowdown, time); strikes of one
job within an hour are one. A node with several strikes within a window is a lemon. Both are hints:
they appear in the reason of a new finding, set the order in which state is saved, and count in the
planner as a higher failure probability. No threshold of the detector uses them, so that a history
cannot cause a false alarm. Failed ranks add no strike: a job that is killed ends on every node.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper.core.incidents.findings import FindingKind

DAY_S = 86_400.0
KEEP_S = 90 * DAY_S
KEPT_STRIKES = 16  # of one node, the newest
KEPT_NODES = 4096  # struck last
LEMON_STRIKES, LEMON_S = 3, 14 * DAY_S
SAME_FAULT_S = 3600.0  # within one job: what comes and goes is one strike
ACCUSING = frozenset({FindingKind.DEVICE, FindingKind.LINK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A finding of one job on one device; `device_uuid` is empty where the rank named none."""

    incident_id: int
    node: str
    device_uuid: str
    job: str
    kind: FindingKind
    slowdown: float
    unix_s: float


Strikes = Mapping[str, tuple[Strike, ...]]
"""By node, oldest first. The node that was struck last is the last."""


def add_strike(known: Strikes, strike: Strike) -> Strikes:
    """Add a strike and drop old ones; returns `known` itself where the strike is a repetition."""
    own = known.get(strike.node, ())
    if any(_is_same_trouble(old, strike) for old in own):
        return known
    kept = dict(known)
    kept.pop(strike.node, None)
    kept[strike.node] = (*_fresh(own, strike.unix_s), strike)[-KEPT_STRIKES:]
    # From the oldest: a scan of all nodes at each strike takes minutes when a store is loaded.
    while len(kept) > KEPT_NODES or not _fresh(kept[next(iter(kept))], strike.unix_s):
        del kept[next(iter(kept))]
    return kept


def is_lemon(known: Strikes, node: str, unix_s: float) -> bool:
    """Whether the node had at least `LEMON_STRIKES` strikes within the last `LEMON_S`."""
    return sum(unix_s - one.unix_s <= LEMON_S for one in known.get(node, ())) >= LEMON_STRIKES


def lemons(known: Strikes, unix_s: float) -> frozenset[str]:
    """Return the nodes that are lemons."""
    return frozenset(node for node in known if is_lemon(known, node, unix_s))


def hint(known: Strikes, node: str, device_uuid: str, job: str, unix_s: float) -> str:
    """Return what other jobs found of this device, for operators; empty without a record."""
    found = [
        one
        for one in _fresh(known.get(node, ()), unix_s)
        if one.job != job and device_uuid in ("", one.device_uuid)
    ]
    if not found:
        return ""
    what = "this device" if device_uuid else "this node"
    told = f"{what} was found slow before: {strike_text(found[-1], unix_s)}"
    more = len(found) - 1
    told += f", and {more} more time{'s' if more > 1 else ''}" if more else ""
    return told + (f"; {node} is a lemon" if is_lemon(known, node, unix_s) else "")


def newest_first(known: Strikes, node: str, unix_s: float) -> tuple[Strike, ...]:
    """Return the strikes of a node of the last `KEEP_S`, newest first."""
    return _fresh(known.get(node, ()), unix_s)[::-1]


def history(known: Strikes, node: str, unix_s: float) -> list[str]:
    """One line for each strike of a node, newest first."""
    return [strike_text(one, unix_s) for one in newest_first(known, node, unix_s)]


def strike_text(strike: Strike, unix_s: float) -> str:
    """Describe one strike in one line."""
    where = f" ({strike.device_uuid})" if strike.device_uuid else ""
    days = max(0.0, unix_s - strike.unix_s) / DAY_S
    return f"slowdown {strike.slowdown:.2f} in job {strike.job}{where}, {days:.1f} days ago"


def _fresh(strikes: tuple[Strike, ...], unix_s: float) -> tuple[Strike, ...]:
    return tuple(one for one in strikes if unix_s - one.unix_s <= KEEP_S)


def _is_same_trouble(old: Strike, new: Strike) -> bool:
    is_same_place = (old.job, old.device_uuid) == (new.job, new.device_uuid)
    is_close = abs(new.unix_s - old.unix_s) < SAME_FAULT_S
    return old.incident_id == new.incident_id or (is_same_place and is_close)
