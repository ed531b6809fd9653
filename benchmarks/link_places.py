"""Which places does a probe of pairs name, of random slow places in random fabrics?

`python -m benchmarks.link_places`; two minutes. A fabric has 2 to 6 nodes of 1 to 4 ranks, whose
pairs inside nodes are four times as fast. One place of it is slow, of a random kind, or two places
are. The probe measures all pairs, or those of its first rounds; pairs have a past, or are compared
with their peers. Noise is that of `benchmarks.link_faults`. The truth is which measured pairs use
a place: places that the same pairs use cannot be told apart.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.link_faults import BETWEEN_S_PER_BYTE, INSIDE_S_PER_BYTE, recorded_noise, show
from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.core.telemetry.pair_probe import Pair, rounds_of
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.links.pair_rates import LinkVerdict, PairHistory, PairRates, judge_pairs

TWO = {"two pairs": PlaceKind.PAIR, "port and pair": PlaceKind.PORT}  # and a pair elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fabric, the pairs that a probe measured, and its slow places with their slowdown."""

    node_of: Mapping[int, str]
    measured: tuple[Pair, ...]
    slow: Mapping[LinkPlace, float]

    def users(self) -> dict[LinkPlace, frozenset[Pair]]:
        """Return the measured pairs that use each place."""
        measured = frozenset(self.measured)
        return {place: pairs & measured for place, pairs in pairs_through(self.node_of).items()}

    def traits(self) -> set[str]:
        """Return what is special about the case."""
        users, num_nodes = self.users(), len({*self.node_of.values()})
        told = {
            "two nodes": num_nodes == 2,
            "all pairs slow": {*self.measured} in [users[place] for place in self.slow],
            "one port per node": num_nodes == len(self.node_of),
            "look-alikes": any(len(group) > 1 for group in expected(self)),
        }
        return {trait for trait, holds in told.items() if holds}


def pairs_through(node_of: Mapping[int, str]) -> dict[LinkPlace, frozenset[Pair]]:
    """Return the pairs that use each place of a fabric of two nodes or more."""
    pairs = set(combinations(sorted(node_of), 2))
    inside = {(a, b) for a, b in pairs if node_of[a] == node_of[b]}
    found = {LinkPlace(kind=PlaceKind.FABRIC): pairs - inside}
    if inside:
        found[LinkPlace(kind=PlaceKind.ALL)] = pairs
    for a, b in pairs:
        nodes = tuple(sorted({node_of[a], node_of[b]}))
        found[LinkPlace(kind=PlaceKind.PAIR, ranks=(a, b), nodes=nodes)] = {(a, b)}
    for rank, node in node_of.items():
        port = LinkPlace(kind=PlaceKind.PORT, ranks=(rank,), nodes=(node,))
        found[port] = {pair for pair in pairs if rank in pair}
    ranks = {node: tuple(r for r in node_of if node_of[r] == node) for node in node_of.values()}
    for node, own in ranks.items():
        if len(own) > 1:
            link = LinkPlace(kind=PlaceKind.NODE, ranks=own, nodes=(node,))
            found[link] = {pair for pair in pairs - inside if {*pair} & {*own}}
    for two in combinations(sorted(ranks), 2):
        if (between := {*ranks[two[0]], *ranks[two[1]]}) and len(between) > 2:
            link = LinkPlace(kind=PlaceKind.NODE_PAIR, nodes=two)
            found[link] = {pair for pair in pairs - inside if {*pair} <= between}
    return {place: frozenset(through) for place, through in found.items()}


def drawn(draw: np.random.Generator, faults: str, factors: Sequence[float], whole: bool) -> Case:
    """Return a random case.

    Args:
        draw: Source of randomness.
        faults: "one", or a key of `TWO`.
        factors: Of the slow places in turn.
        whole: Whether all rounds of the probe ran; else half of them or more.
    """
    sizes = draw.integers(1, 5, draw.integers(2, 7))
    if draw.random() < 0.5:
        sizes[:] = sizes[0]
    if faults in TWO and sizes.sum() < 4:
        sizes += 1
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    node_of = dict(enumerate(nodes))
    places = sorted(pairs_through(node_of))
    kinds = sorted({place.kind for place in places})
    kind = TWO[faults] if faults in TWO else kinds[draw.integers(len(kinds))]
    slow = [_one_of(draw, [place for place in places if place.kind is kind])]
    if faults in TWO:
        pairs = [place for place in places if place.kind is PlaceKind.PAIR]
        slow.append(_one_of(draw, [p for p in pairs if not {*p.ranks} & {*slow[0].ranks}]))
    rounds = rounds_of(tuple(node_of))
    num_rounds = len(rounds) if whole else int(draw.integers(len(rounds) // 2, len(rounds))) + 1
    measured = tuple(pair for pairs in rounds[:num_rounds] for pair in pairs)
    return Case(node_of=node_of, measured=measured, slow=dict(zip(slow, factors, strict=False)))


def _one_of(draw: np.random.Generator, places: Sequence[LinkPlace]) -> LinkPlace:
    return places[int(draw.integers(len(places)))]


def verdict_of(
    case: Case, noise: Array, draw: np.random.Generator, *, has_past: bool, suspected: float
) -> LinkVerdict:
    """Return the verdict of a probe. `noise`: log of a transfer's time over the usual one."""
    users = case.users()
    slowdown = {
        pair: float(np.prod([s for place, s in case.slow.items() if pair in users[place]]))
        for pair in case.measured
    }

    def probe(step: int) -> PairRates:
        logs = np.median(draw.choice(noise, (len(case.measured), 3)), axis=1)
        s_per_byte = {}
        for pair, log_ratio in zip(case.measured, logs.tolist(), strict=True):
            is_inside = case.node_of[pair[0]] == case.node_of[pair[1]]
            s_per_byte[pair] = INSIDE_S_PER_BYTE if is_inside else BETWEEN_S_PER_BYTE
            s_per_byte[pair] *= float(np.exp(log_ratio)) * (slowdown[pair] if step else 1.0)
        return PairRates(step=step, ranks=tuple(case.node_of), s_per_byte=s_per_byte)

    history = PairHistory().learn(probe(0)) if has_past else PairHistory()
    return judge_pairs(probe(1), history, case.node_of, suspected=suspected)


def expected(case: Case) -> set[frozenset[LinkPlace]]:
    """Return, for each slow place that a measured pair uses, the places that the same pairs use."""
    users = case.users()
    return {
        frozenset(place for place, pairs in users.items() if pairs == users[slow])
        for slow in case.slow
        if users[slow]
    }


def outcome(case: Case, verdict: LinkVerdict) -> str:
    """Compare a verdict with the truth.

    Returns:
        exact: each slow place with its look-alikes, and nothing else. listed: each slow place among
        others, and nothing else. missed: not all slow places, and nothing else. other: a place that
        is not slow was named without a slow one beside it.
    """
    named = {frozenset(place.candidates) for place in verdict.places}
    if named == expected(case):
        return "exact"
    if not all(group & case.slow.keys() for group in named):
        return "other"
    seen = {slow for slow in case.slow if case.users()[slow]}
    return "listed" if all(any(slow in group for group in named) for slow in seen) else "missed"


def rows(noise: Array, trials: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each number of faults, kind of probe and past."""
    made = []
    cases: list[tuple[str, tuple[float, ...]]] = [("one", (1.5,)), ("one", (4.0,))]
    cases += [(faults, two) for faults in TWO for two in ((2.0, 2.0), (4.0, 3.0), (4.0, 1.5))]
    for faults, factors in cases:
        for has_past in (True, False):
            for whole in (True, False):
                draw, told, traits = np.random.default_rng(seed), Counter[str](), Counter[str]()
                for _ in range(trials):
                    case = drawn(draw, faults, factors, whole)
                    verdict = verdict_of(
                        case, noise, draw, has_past=has_past, suspected=max(factors)
                    )
                    told[outcome(case, verdict)] += 1
                    traits.update(case.traits())
                made.append(
                    {
                        "slow": faults,
                        "factors": " and ".join(f"{factor:g}" for factor in factors),
                        "compared with": "past" if has_past else "peers",
                        "rounds": "all" if whole else "some",
                        "trials": trials,
                        **{name: told[name] for name in ("exact", "listed", "missed", "other")},
                        **{name: traits[name] for name in ("two nodes", "all pairs slow")},
                        **{name: traits[name] for name in ("one port per node", "look-alikes")},
                    }
                )
    return made


def main() -> int:
    """Print a table and one line of JSON; the exit status says whether the bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--trials", type=int, default=500, help="random cases per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise-times", type=float, default=1.0, help="of the recorded noise")
    options = parser.parse_args()
    noise = options.noise_times * recorded_noise(options.data).ravel()
    made = rows(noise, options.trials, options.seed)
    show(Console(width=190), "random places in random fabrics, recorded noise", made)
    one = [row for row in made if row["slow"] == "one"]
    holds = {
        "one place with a past is named, with its look-alikes only": all(
            row["exact"] >= 0.99 * row["trials"] for row in one if row["compared with"] == "past"
        ),
        "one place without a past is named or nothing is": all(row["other"] == 0 for row in one),
    }
    print(json.dumps({"rows": made, "holds": holds}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
