"""Does the fixed probe bear a finding out? A rank's reading beside its peers' at the same moment.

The work is the same on all ranks, so no model of it is needed and none is asked. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log
from statistics import median

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.records import ProbeRecord

BORNE_OUT = 0.5  # of a slowdown's logarithm: nearer to what was found than to health


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeComparison:
    """A rank's times over the median of `num_peers` others': product, copy, message."""

    gemm: float
    copy: float
    exchange: float
    num_peers: int
    step: int

    @property
    def slowdown(self) -> float:
        """Of the device: a slow product or a slow memory, whichever is worse."""
        return max(self.gemm, self.copy)

    def __str__(self) -> str:
        return (
            f"probe at step {self.step}: product x{self.gemm:.2f}, copy x{self.copy:.2f}, message "
            f"x{self.exchange:.2f} of the median of {self.num_peers} peers"
        )


def compare_probe(
    records: Mapping[int, ProbeRecord], rank: int, slow: Collection[int]
) -> ProbeComparison | None:
    """The reading of `rank`, beside ranks that are not `slow`; None without it or any of these."""
    own = records.get(rank)
    peers = [record for other, record in records.items() if other != rank and other not in slow]
    if own is None or not peers:
        return None
    return ProbeComparison(
        gemm=_ratio(own.gemm_s, [peer.gemm_s for peer in peers]),
        copy=_ratio(own.copy_s, [peer.copy_s for peer in peers]),
        exchange=_ratio(own.exchange_s, [peer.exchange_s for peer in peers]),
        num_peers=len(peers),
        step=own.step,
    )


def tier_of(reading: ProbeComparison, slowdown: float) -> Tier:
    """CONFIRMED where the probe was slow as well, SUSPECTED where it was not: the device is well
    now, and what was slow is something that the probe does not use.
    """
    is_borne_out = log(max(reading.slowdown, 1e-9)) >= BORNE_OUT * log(slowdown)
    return Tier.CONFIRMED if is_borne_out else Tier.SUSPECTED


def _ratio(own_s: float, peers_s: Collection[float]) -> float:
    return own_s / max(median(peers_s), 1e-9)
