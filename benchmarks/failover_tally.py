"""Adds up what `benchmarks.failover_time` found, and holds it against its bars."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.failover_faults import KINDS
from benchmarks.failover_fleet import LIVE, KnownIncident

if TYPE_CHECKING:
    from benchmarks.failover_time import Run

DURATION_S = 2.0  # of the lease
BAR_S, MEDIAN_S = DURATION_S + 1.5, DURATION_S + 0.5
SERVES_BAR_S, COMMANDS_BAR_S = 5.0 * DURATION_S, 10.0 * DURATION_S
# Figures that have to be 0.
ZERO = (
    *("lost_incidents", "doubled_incidents", "plans_told_twice"),
    *("commands_of_earlier_terms", "terms_with_two_leaders", "faults_without_effect"),
)


@dataclass(slots=True, kw_only=True)
class Times:
    """Of one fault, in seconds. `leads_s` is None where the leader went on."""

    leads_s: float | None
    serves_s: float
    commands_s: float


@dataclass(slots=True, kw_only=True)
class Tally:
    """What several fleets add up to.

    Attributes:
        asked: How many faults were asked for.
        times: The times of each kind of fault, by the fleet's name and the kind's.
        left_out: Kinds of faults that this host cannot do.
    """

    asked: int
    times: dict[str, list[Times]] = field(default_factory=dict)
    sums: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    takeovers: list[Times] = field(default_factory=list)

    def add(self, run: "Run", stored: list[KnownIncident], name: str) -> None:
        """One fleet, at its end."""
        deaths = Counter(one.job for one in stored if one.job != LIVE and one.kind == "death")
        lost = [one for one in run.listed if one not in stored]
        untold = run.lost_ranks - set(deaths)
        ranks = run.ranks
        for kind in KINDS:
            if kind.name in run.times:
                self.times[f"{name}: {kind.name}"] = run.times[kind.name]
        lasting = {kind.name for kind in KINDS if kind.is_lasting}
        self.takeovers += [
            one for kind, times in run.times.items() if kind in lasting for one in times
        ]
        self.left_out += run.left_out
        self.sums.update(
            faults=sum(map(len, run.times.values())),
            faults_without_effect=len(run.without_effect),
            lost_ranks=len(run.lost_ranks),
            incidents=len(stored),
            lost_incidents=len(lost) + len(untold),
            doubled_incidents=sum(deaths.values()) - len(deaths),
            plans_applied=len(ranks.in_force) - 1,
            plans_told_twice=len(ranks.doubled) + (ranks.in_force != sorted(set(ranks.in_force))),
            commands_of_earlier_terms=len(ranks.regressed),
            terms=len(run.terms.seen),
            terms_with_two_leaders=len(run.terms.doubled),
        )
        self.wrong += [f"lost {one}" for one in lost] + [f"untold {one}" for one in sorted(untold)]
        self.wrong += ranks.doubled + ranks.regressed
        self.wrong += [f"no effect: {one}" for one in run.without_effect]

    def figures(self) -> dict[str, Any]:
        """The figures, and whether they are within the bars."""
        leads = [one.leads_s for one in self.takeovers if one.leads_s is not None]
        every = [x.leads_s for of in self.times.values() for x in of if x.leads_s is not None]
        median_s, max_s = _rounded(statistics.median, leads), _rounded(max, every)
        found: dict[str, Any] = {
            **self.sums,
            "takeovers": len(self.takeovers),
            "changes_of_leader": len(every),
            "leads_median_s": median_s,
            "leads_max_s": max_s,
            "late_changes": sum(one > BAR_S for one in every),
            "serves_median_s": _rounded(statistics.median, [x.serves_s for x in self.takeovers]),
            "serves_max_s": _rounded(max, [x.serves_s for of in self.times.values() for x in of]),
            "commands_median_s": _rounded(
                statistics.median, [x.commands_s for x in self.takeovers]
            ),
            "commands_max_s": _rounded(
                max, [x.commands_s for of in self.times.values() for x in of]
            ),
            "left_out": self.left_out,
            "wrong": self.wrong[:5],
        }
        found["passed"] = (
            self.sums["faults"] == self.asked
            and not self.left_out
            and not any(self.sums[name] for name in ZERO)
            and self.sums["plans_applied"] > 0
            and len(leads) > 0
            and found["serves_max_s"] <= SERVES_BAR_S
            and found["commands_max_s"] <= COMMANDS_BAR_S
            and max_s <= BAR_S
            and median_s <= MEDIAN_S
        )
        return found

    def show(self, found: dict[str, Any]) -> None:
        """For people."""
        print(f"{'fault':53s} {'count':>5s} {'leads s':>16s} {'serves s':>16s} {'commands s':>16s}")
        for kind, times in self.times.items():
            leads = [one.leads_s for one in times if one.leads_s is not None]
            columns = (
                _range(leads) if leads else "leader goes on",
                _range([one.serves_s for one in times]),
                _range([one.commands_s for one in times]),
            )
            print(f"{kind:53s} {len(times):5d} " + " ".join(f"{one:>16s}" for one in columns))
        print(f"kinds of faults left out: {len(self.left_out)}{_listed(self.left_out)}")
        print(
            "faults {faults}, without effect {faults_without_effect}; ranks lost {lost_ranks}, "
            "incidents {incidents}: lost {lost_incidents}, doubled {doubled_incidents}; plans "
            "applied {plans_applied}, told twice {plans_told_twice}; commands of earlier terms "
            "{commands_of_earlier_terms}; terms {terms}, with two leaders "
            "{terms_with_two_leaders}".format(**found)
        )


def _rounded(of: Callable[[list[float]], float], values: list[float]) -> float:
    return round(of(values or [0.0]), 2)


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (max {max(values):.1f})"


def _listed(names: list[str]) -> str:
    return f": {', '.join(names)}" if names else ""
