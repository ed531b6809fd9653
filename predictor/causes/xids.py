"""What an Xid means for the speed of a device. Pure.

The codes are of NVIDIA's "GPU Deployment and Management", Xid catalog. What the catalog gives the
application for (graphics exceptions, page faults) names nobody's hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.evidence import CauseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What is broken, how sure that would explain a slow rank at most, and in words."""

    kind: CauseKind
    most: Tier
    words: str


def _memory(words: str, most: Tier = Tier.PROBABLE) -> Meaning:
    return Meaning(kind=CauseKind.MEMORY_ERRORS, most=most, words=words)


def _driver(words: str, most: Tier = Tier.PROBABLE) -> Meaning:
    return Meaning(kind=CauseKind.DRIVER, most=most, words=words)


XIDS: Mapping[int, Meaning] = {
    13: _driver("a graphics exception, mostly of the application", Tier.SUSPECTED),
    31: _driver("a page fault, mostly of the application", Tier.SUSPECTED),
    43: _driver("a channel that stopped, mostly by the application", Tier.SUSPECTED),
    45: _driver("a channel that was cleaned up", Tier.SUSPECTED),
    48: _memory("an uncorrectable memory error"),
    61: _driver("a microcontroller that stopped"),
    62: _driver("a microcontroller that halted"),
    63: _memory("a memory row that was marked for replacement", Tier.SUSPECTED),
    64: _memory("a memory row that could not be replaced"),
    74: Meaning(kind=CauseKind.NVLINK, most=Tier.PROBABLE, words="an NVLink error"),
    79: Meaning(kind=CauseKind.LOST, most=Tier.CONFIRMED, words="the device fell off its bus"),
    92: _memory("many corrected memory errors"),
    94: _memory("an uncorrectable memory error that was contained"),
    95: _memory("an uncorrectable memory error that was not contained"),
    119: _driver("a GSP that does not answer"),
    120: _driver("an error of the GSP"),
}


def meaning(xid: int) -> Meaning:
    """Of a code that is not known: something happened."""
    return XIDS.get(xid) or _driver("see NVIDIA's catalog", Tier.SUSPECTED)
