"""Explains an incident from its stored timeline: slowdown with interval, phases and gain.

A value without enough data stays unknown: an interval needs `FEWEST_FOR_INTERVAL` steps, a gain
needs steps before and after a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, isfinite, nan, sqrt

from pacekeeper.controller.observability.timeline import (
    IncidentRow,
    IncidentTimeline,
    Note,
    PlanNote,
)
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.telemetry.sign_of_life import RankStack

FEWEST_FOR_INTERVAL = 6  # below, not even smallest and largest hold the median with 95 %
BEFORE, DURING, AFTER = "before", "during", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownInterval:
    """Observed over expected time of the rank: the median of `num_values`, and its 95 % interval by
    their order (None: too few).
    """

    slowdown: float
    low: float | None
    high: float | None
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps in a row under one layout, before, during or after the incident; medians of them."""

    when: str
    generation: int
    first_step: int
    num_steps: int
    step_s: float
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """An incident with all that was kept of it. `gain_ratio`: of the step as it was with the fault
    under the first layout, what the last layout during it takes less; None: not measured.
    """

    incident: Incident
    interval: SlowdownInterval | None
    phases: tuple[Phase, ...]
    gain_ratio: float | None
    rows: tuple[IncidentRow, ...]
    plans: tuple[PlanNote, ...]
    notes: tuple[Note, ...]
    stacks: tuple[RankStack, ...]


def explain(incident: Incident, timeline: IncidentTimeline | None) -> Explanation:
    """`course` None: nothing was kept of it (any more)."""
    rows = tuple(timeline.rows) if timeline is not None else ()
    during = [row for row in rows if _when(row, incident) == DURING]
    phases = phases_of(rows, incident)
    return Explanation(
        incident=incident,
        interval=slowdown_interval(
            [row.observed_s / row.expected_s for row in during if _is_told(row)]
        ),
        phases=phases,
        gain_ratio=_gain(phases),
        rows=rows,
        plans=tuple(timeline.plans) if timeline is not None else (),
        notes=tuple(timeline.notes) if timeline is not None else (),
        stacks=tuple(timeline.stacks) if timeline is not None else (),
    )


def slowdown_interval(ratios: Sequence[float]) -> SlowdownInterval | None:
    """The median and the interval that holds that of all steps in 19 of 20 cases: between two of
    the values in order, n/2 -+ 0.98 sqrt(n) (Conover, Practical Nonparametric Statistics, 3.2).
    """
    values = sorted(value for value in ratios if isfinite(value))
    count = len(values)
    if not count:
        return None
    low = high = None
    if count >= FEWEST_FOR_INTERVAL:
        first = max(0, floor(count / 2 - 0.98 * sqrt(count)) - 1)
        low, high = values[first], values[count - 1 - first]
    return SlowdownInterval(slowdown=_median(values), low=low, high=high, num_values=count)


def phases_of(rows: Sequence[IncidentRow], incident: Incident) -> tuple[Phase, ...]:
    """The course cut where the incident begins and ends, and where another layout came."""
    phases = []
    for (when, generation), group in groupby(
        rows, key=lambda row: (_when(row, incident), row.generation)
    ):
        found = list(group)
        ratios = [row.observed_s / row.expected_s for row in found if _is_told(row)]
        phases.append(
            Phase(
                when=when,
                generation=generation,
                first_step=found[0].step,
                num_steps=sum(row.num_steps for row in found),
                step_s=_median(sorted(row.step_s for row in found)),
                slowdown=_median(sorted(ratios)) if ratios else nan,
            )
        )
    return tuple(phases)


def _gain(phases: Sequence[Phase]) -> float | None:
    during = [phase for phase in phases if phase.when == DURING]
    if len(during) < 2 or during[0].step_s <= 0.0:
        return None
    return 1.0 - during[-1].step_s / during[0].step_s


def _when(row: IncidentRow, incident: Incident) -> str:
    if row.step < incident.finding.onset_step:
        return BEFORE
    is_over = incident.closed_unix_s is not None and row.unix_s > incident.closed_unix_s
    return AFTER if is_over else DURING


def _is_told(row: IncidentRow) -> bool:
    return row.expected_s > 0.0 and isfinite(row.observed_s)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0
