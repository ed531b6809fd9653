"""Verdict of a probe of pairs: which pairs are slower than usual, and the places that explain it.

Usual is a pair's own past; without one, what the faster pairs of its kind took in the same probe:
pairs inside nodes and between nodes are never compared. So a fabric that is uneven, but steady, is
no fault. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log, nan, sqrt

import numpy as np

from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.core.telemetry.pair_probe import Pair, crossing_load, rounds_of
from pacekeeper.core.telemetry.records import PairRecord
from pacekeeper.predictor.links.places import (
    GroupReading,
    SlowPlace,
    find_slow_places,
    places_of,
    ranks_of_nodes,
)

MIN_SLOWDOWN = 1.25  # of a pair
BORNE_OUT = 0.5  # of a suspected slowdown's logarithm: nearer to it than to health
PEERS_QUANTILE = 0.25  # of a kind's pairs: faults may slow most of them
LEAST_PEERS = 3  # pairs of a kind that can be compared
NOISE_SIGMAS = 4.0
NEWEST_WEIGHT = 0.3  # of a probe in a pair's past
_LOW, _HIGH, _BETWEEN = 0.05, 0.25, 0.970  # quantiles, and the sigmas between them


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """Measurements of a probe. `s_per_byte`: of each pair, by the slower of its ranks."""

    step: int
    ranks: tuple[int, ...]
    s_per_byte: Mapping[Pair, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkVerdict:
    """The result of a probe of pairs.

    Attributes:
        step: The step after which it ran.
        num_pairs: Pairs that could be compared.
        num_without_past: Those of them that were compared with their peers.
        places: The slow places, the one that explains most first; empty: none.
        num_unexplained: Slow pairs that no place explains.
        bytes_per_s: In each direction, of the middle pair that the first place explains; NaN
            without one.
        usual_bytes_per_s: What that pair usually has.
    """

    step: int
    num_pairs: int
    num_without_past: int = 0
    places: tuple[SlowPlace, ...] = ()
    num_unexplained: int = 0
    bytes_per_s: float = nan
    usual_bytes_per_s: float = nan

    def __str__(self) -> str:
        begin = f"probe of {self.num_pairs} pairs at step {self.step}: "
        if not self.num_pairs:
            return begin + "no pair has a past or enough peers to compare with"
        found = [f"{place} in {place.num_groups} pairs" for place in self.places]
        if found:
            found[0] += (
                f", {self.bytes_per_s * 1e-6:.3g} MB/s instead of "
                f"{self.usual_bytes_per_s * 1e-6:.3g}"
            )
        if self.num_unexplained:
            found.append(f"{self.num_unexplained} slow pairs that no single place explains")
        if self.num_without_past and not found:
            found.append(
                f"none is slow; {self.num_without_past} without a past were compared with their "
                "peers, which does not show what slows all of them"
            )
        return begin + ("; ".join(found) if found else "all at their usual rates")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairHistory:
    """The usual seconds for each byte of pairs, from probes in which they were not slow."""

    s_per_byte: Mapping[Pair, float] = field(default_factory=dict)

    def covers(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks have been in a probe."""
        return set(ranks) <= {rank for pair in self.s_per_byte for rank in pair}

    def learn(self, rates: PairRates) -> "PairHistory":
        """Return the history with the pairs of a probe that ran while no link was suspected."""
        known = dict(self.s_per_byte)
        for pair, new in rates.s_per_byte.items():
            old = known.get(pair, new)
            known[pair] = exp((1.0 - NEWEST_WEIGHT) * log(old) + NEWEST_WEIGHT * log(new))
        return PairHistory(s_per_byte=known)

    def without(self, ranks: Iterable[int]) -> "PairHistory":
        """Return the history without pairs of ranks that may be on other devices now."""
        gone = set(ranks)
        kept = {pair: s for pair, s in self.s_per_byte.items() if not gone.intersection(pair)}
        return PairHistory(s_per_byte=kept)


def rates_of(records: Iterable[PairRecord], ranks: tuple[int, ...]) -> PairRates | None:
    """Return what a probe measured; None if no pair was.

    Args:
        records: Of both ranks of a pair, or one.
        ranks: The ranks of the probe; records of others are ignored.
    """
    known, step = set(ranks), 0
    found: dict[Pair, float] = {}
    for record in records:
        pair = min(record.rank, record.peer), max(record.rank, record.peer)
        if pair[0] == pair[1] or not known.issuperset(pair):
            continue
        if record.num_bytes > 0 and record.exchange_s > 0.0:
            found[pair] = max(found.get(pair, 0.0), record.exchange_s / record.num_bytes)
            step = max(step, record.step)
    return PairRates(step=step, ranks=ranks, s_per_byte=found) if found else None


def judge_pairs(
    rates: PairRates, history: PairHistory, node_of: Mapping[int, str], *, suspected: float
) -> LinkVerdict:
    """Compare pairs with their past or their peers, and name the places of those that are slow.

    Args:
        rates: What the probe measured.
        history: The pairs' past.
        node_of: The node of every rank of the probe.
        suspected: The slowdown of transfers that the probe is to locate.
    """
    node_of = {rank: node_of[rank] for rank in rates.ranks}
    usual, blind_to = _usual(rates, history, node_of)
    ratios = {pair: rates.s_per_byte[pair] / usual[pair] for pair in usual}
    if not ratios:
        return LinkVerdict(step=rates.step, num_pairs=0)
    beyond_noise = max(MIN_SLOWDOWN, exp(NOISE_SIGMAS * _sigma(ratios)))
    slow_from = max(beyond_noise, exp(BORNE_OUT * log(max(1.0, suspected))))
    readings = [
        GroupReading(ranks=pair, slowdown=ratio, blind_to=blind_to.get(pair, frozenset()))
        for pair, ratio in ratios.items()
    ]
    places, num_unexplained = find_slow_places(readings, node_of, slow_from=slow_from)
    if places:  # what was suspected, hence also what is less slow beside it
        more, num_left = find_slow_places(readings, node_of, slow_from=beyond_noise)
        if {one.candidates for one in places} <= {one.candidates for one in more}:
            places, num_unexplained = more, num_left
    verdict = LinkVerdict(
        step=rates.step,
        num_pairs=len(ratios),
        num_without_past=len(blind_to),
        places=places,
        num_unexplained=num_unexplained,
    )
    if not places:
        return verdict
    nodes = ranks_of_nodes(node_of)
    seeing = [p for p in ratios if places[0].candidates[0] in places_of(p, node_of, nodes)]
    at = min(seeing, key=lambda pair: abs(log(ratios[pair] / places[0].slowdown)))
    return replace(
        verdict, bytes_per_s=1.0 / rates.s_per_byte[at], usual_bytes_per_s=1.0 / usual[at]
    )


def slow_ranks(
    verdict: LinkVerdict, charted: Mapping[int, float], ranks: Iterable[int]
) -> dict[int, float]:
    """Return the slowdown of each rank's link for the planner, after a probe.

    A slow port or node is the link of its ranks. The ranks of a slow pair are as slow as their own
    transfers were, which go to others as well. A pair of nodes, and a place that cannot be told
    from others, leave what the transfers of ranks showed. No layout avoids the fabric or all links.

    Args:
        verdict: What the probe showed.
        charted: The slowdown of each rank whose own transfers were slow.
        ranks: All ranks of the job.
    """
    found: dict[int, float] = {}
    all_ranks = tuple(ranks)
    for slow in verdict.places:
        place = slow.place
        if place is None or place.kind is PlaceKind.NODE_PAIR:
            found |= {rank: s for rank, s in charted.items() if rank not in found}
        elif place.kind in (PlaceKind.PORT, PlaceKind.NODE):
            found |= {rank: max(slow.slowdown, found.get(rank, 1.0)) for rank in place.ranks}
        elif place.kind is PlaceKind.PAIR:
            # One of its exchanges in turn with each other rank is slow.
            part = 1.0 + (slow.slowdown - 1.0) / max(1, len(all_ranks) - 1)
            found |= {r: max(charted.get(r, part), found.get(r, 1.0)) for r in place.ranks}
    return found


def _usual(
    rates: PairRates, history: PairHistory, node_of: Mapping[int, str]
) -> tuple[dict[Pair, float], dict[Pair, frozenset[LinkPlace]]]:
    """Return the usual seconds for each byte of each pair that has a past or enough peers.

    And for those without a past, the places that would have slowed what is usual of their peers.
    """
    found = {p: history.s_per_byte[p] for p in rates.s_per_byte if p in history.s_per_byte}
    blind_to: dict[Pair, frozenset[LinkPlace]] = {}
    kinds, nodes = crossing_load(rounds_of(rates.ranks), node_of), ranks_of_nodes(node_of)
    by_kind: dict[tuple[bool, int], list[Pair]] = {}
    for pair in rates.s_per_byte:
        by_kind.setdefault(kinds[pair], []).append(pair)
    for peers in by_kind.values():
        new = [pair for pair in peers if pair not in found]
        if not new or len(peers) < LEAST_PEERS:
            continue
        at = int(PEERS_QUANTILE * (len(peers) - 1))
        seen = Counter(place for pair in peers for place in places_of(pair, node_of, nodes))
        blind = frozenset(place for place, count in seen.items() if count >= len(peers) - at)
        found |= dict.fromkeys(new, sorted(rates.s_per_byte[pair] for pair in peers)[at])
        blind_to |= dict.fromkeys(new, blind)
    return found, blind_to


def _sigma(ratios: Mapping[Pair, float]) -> float:
    """Return one sigma of log ratios, from their faster or slower quarter, whichever agrees more.

    A slow place divides at most one of them. The sigma is larger by the error of so few values;
    zero for fewer than 8, whose quantiles are chance.
    """
    values = np.log(list(ratios.values()))
    if len(values) < 8:
        return 0.0
    fast, slow = np.quantile(values, (_LOW, _HIGH)), np.quantile(values, (1 - _HIGH, 1 - _LOW))
    return float(min(np.ptp(fast), np.ptp(slow))) / _BETWEEN * (1.0 + 2.0 / sqrt(len(values)))
