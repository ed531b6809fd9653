"""What is said of an incident rests on its rows: an interval needs values, a gain two layouts."""

from math import nan
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.controller.observability.explain import (
    AFTER,
    BEFORE,
    DURING,
    FEWEST_FOR_INTERVAL,
    explain,
    slowdown_interval,
)
from pacekeeper.controller.observability.timeline import IncidentRow, IncidentTimeline
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier


def row(step: int, *, generation: int = 1, step_s: float = 0.1, slow: float = 1.0) -> IncidentRow:
    return IncidentRow(
        step=step,
        unix_s=float(step),
        num_steps=1,
        generation=generation,
        step_s=step_s,
        observed_s=0.1 * slow,
        expected_s=0.1,
        peers_slowdown=1.0,
    )


def incident(*, closed_unix_s: float | None = None) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=2,
        slowdown=1.6,
        onset_step=10,
        step=12,
        reason="slow",
    )
    return Incident(
        incident_id=7, job="moe", finding=finding, opened_unix_s=12.0, closed_unix_s=closed_unix_s
    )


ROWS = [
    *(row(step) for step in range(10)),
    *(row(step, step_s=0.2, slow=1.6) for step in range(10, 20)),
    *(row(step, step_s=0.15, slow=1.6, generation=2) for step in range(20, 30)),
    *(row(step, generation=2) for step in range(30, 34)),
]
COURSE = IncidentTimeline(incident_id=7, job="moe", rank=2, rows=ROWS)


def test_the_course_is_cut_at_onset_layout_and_end() -> None:
    found = explain(incident(closed_unix_s=29.5), COURSE).phases
    assert [(p.when, p.generation, p.first_step, p.num_steps, p.step_s) for p in found] == [
        (BEFORE, 1, 0, 10, 0.1),
        (DURING, 1, 10, 10, 0.2),
        (DURING, 2, 20, 10, 0.15),
        (AFTER, 2, 30, 4, 0.1),
    ]
    assert [round(p.slowdown, 6) for p in found] == [1.0, 1.6, 1.6, 1.0]


def test_the_slowdown_is_that_of_the_steps_between_onset_and_end() -> None:
    found = explain(incident(closed_unix_s=29.5), COURSE).interval
    assert found is not None
    assert found.slowdown == pytest.approx(1.6) and found.num_values == 20


def test_the_gain_is_measured_between_the_first_and_the_last_layout_of_the_incident() -> None:
    assert explain(incident(closed_unix_s=29.5), COURSE).gain_ratio == pytest.approx(0.25)
    only_one = IncidentTimeline(incident_id=7, job="moe", rank=2, rows=ROWS[:20])
    assert explain(incident(), only_one).gain_ratio is None


def test_of_what_was_not_kept_nothing_is_said() -> None:
    found = explain(incident(), None)
    assert (found.interval, found.phases, found.gain_ratio, found.rows) == (None, (), None, ())


def test_values_that_are_not_known_count_for_nothing() -> None:
    assert slowdown_interval([nan, nan]) is None
    found = slowdown_interval([nan, 2.0])
    assert found is not None and (found.slowdown, found.num_values) == (2.0, 1)


def test_few_values_have_no_interval() -> None:
    few = slowdown_interval([1.0] * (FEWEST_FOR_INTERVAL - 1))
    enough = slowdown_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert few is not None and few.low is None and few.high is None
    assert enough is not None and (enough.low, enough.slowdown, enough.high) == (1.0, 3.5, 6.0)


@pytest.mark.parametrize("count", [FEWEST_FOR_INTERVAL, 9, 20, 61, 200])
def test_the_interval_holds_the_median_in_nineteen_of_twenty_cases(count: int) -> None:
    draws = np.random.default_rng(count).lognormal(0.0, 0.3, size=(600, count))
    held = [
        m for m in (slowdown_interval(list(values)) for values in draws) if m and m.low and m.high
    ]
    ratio = sum(m.low <= 1.0 <= m.high for m in held if m.low and m.high) / len(held)
    assert len(held) == 600 and ratio >= 0.925
    widths = [m.high - m.low for m in held if m.low and m.high]
    of_normal = 2 * 1.96 * 1.2533 * 0.3 / count**0.5
    assert count < 20 or np.median(widths) < 1.5 * of_normal, "and is no wider than it must be"


@pytest.mark.parametrize("number", [7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_number_that_no_incident_has_is_none_however_large(number: int, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store.sqlite")
    assert TimelineWriter(store=store).explain(State(), number) is None
    store.close()
