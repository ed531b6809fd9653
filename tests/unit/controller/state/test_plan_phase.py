"""The phases of a plan: the table itself, what it refuses, and its diagram in the documents."""

import re
from pathlib import Path
from typing import get_args

import pytest

from pacekeeper.controller.state.plan_phase import (
    NAMES,
    TRANSITIONS,
    Offered,
    PhaseName,
    PlanEvent,
    PlanPhase,
    PlanPhaseError,
    Proposed,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from support.job_parts import offered
from support.machine_driver import FIRST

PROPOSED = Proposed(decision=Decision(level=MitigationLevel.BATCH_SHARES, layout=FIRST, reason=""))
ENDS = {PhaseName.REFUSED, PhaseName.WITHDRAWN}
DIAGRAM = Path(__file__).parents[4] / "docs/plan-phases.md"


def test_each_phase_has_a_name_and_is_reached() -> None:
    assert set(NAMES) == set(get_args(PlanPhase))
    assert set(NAMES.values()) == set(PhaseName) == set(TRANSITIONS.values())


def test_each_phase_but_the_last_ones_can_be_left_and_ends() -> None:
    left = {before for before, _ in TRANSITIONS if before is not None}
    assert left == set(PhaseName) - ENDS
    for before in left:
        reached, found = {before}, {before}
        while found:
            found = {after for (at, _), after in TRANSITIONS.items() if at in found} - reached
            reached |= found
        assert reached & ENDS


def test_a_line_of_the_table_gives_the_new_phase() -> None:
    offer = offered(FIRST)
    assert transition(None, PlanEvent.DECIDED, PROPOSED) is PROPOSED
    assert transition(PROPOSED, PlanEvent.OFFERED, offer) is offer


@pytest.mark.parametrize("before", [None, PROPOSED, offered(FIRST)])
@pytest.mark.parametrize("event", list(PlanEvent))
@pytest.mark.parametrize("after", [PROPOSED, offered(FIRST), Withdrawn(cause=WithdrawCause.STALE)])
def test_all_else_is_an_error(
    before: Proposed | Offered | None, event: PlanEvent, after: Proposed | Offered | Withdrawn
) -> None:
    name = None if before is None else NAMES[type(before)]
    if TRANSITIONS.get((name, event)) is NAMES[type(after)]:
        assert transition(before, event, after) is after
        return
    with pytest.raises(PlanPhaseError):
        transition(before, event, after)


def test_the_diagram_is_the_table() -> None:
    lines = re.findall(r"^    (\S+) --> (\w+): (.+)$", DIAGRAM.read_text(), flags=re.M)
    drawn = {
        (None if before == "[*]" else PhaseName(before), PlanEvent(event)): PhaseName(after)
        for before, after, event in lines
    }
    assert drawn == TRANSITIONS and len(lines) == len(drawn)
