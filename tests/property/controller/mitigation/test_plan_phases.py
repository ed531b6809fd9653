"""Random events move plans only along the table of transitions, and along each of its lines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from pacekeeper.controller.mitigation.verification import JUDGED_STEPS
from pacekeeper.controller.state import plan_phase
from pacekeeper.controller.state.events import DecisionMade, Failed, RequestDecision
from pacekeeper.controller.state.plan_phase import TRANSITIONS, InForce, PhaseName, PlanEvent
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.telemetry.records import Record, StepRecord
from support.machine_driver import JOB, QUICK, WARM, Driver, applied, refused, started, step, train

Line = tuple[PhaseName | None, PlanEvent]
STORIES, MOVES = 60, 40
LEAST_DRAWN = 2
EAGER = PolicyConfig(mode="act", min_steps_between_plans=1)
SILENT = replace(EAGER, mode="observe")
CAREFUL = replace(EAGER, mode="approve", approve="all", approve_within_s=100.0)


class CountedTable(dict[Line, PhaseName]):
    """The table, counting each line that is looked up."""

    def __init__(self, lines: Mapping[Line, PhaseName]) -> None:
        super().__init__(lines)
        self.drawn: Counter[Line] = Counter()

    def get(self, line: Line, default: object = None) -> PhaseName | None:  # type: ignore[override]
        self.drawn[line] += 1
        return super().get(line)


def decision_on(view: PlanningSnapshot, random: Random) -> Decision:
    """Any plan that the policy could decide on, priced at random."""
    if view.approved is not None:
        return view.approved
    level = random.choice(
        [MitigationLevel.BATCH_SHARES, MitigationLevel.BATCH_SHARES, MitigationLevel.MOVE_REPLICAS]
    )
    if view.history.failed is not None:
        level = MitigationLevel.ROLL_BACK
    return Decision(
        level=level,
        layout=replace(view.layout, generation=view.next_generation),
        reason="at random",
        current_step_s=1.0,
        planned_step_s=random.choice([0.3, 0.9, 1.1]),
        unconfirmed=(2,) if random.random() < 0.2 else (),
    )


def lasting(duration_s: float, records: list[Record]) -> list[Record]:
    return [
        replace(record, duration_s=duration_s) if isinstance(record, StepRecord) else record
        for record in records
    ]


def move(driver: Driver, random: Random) -> None:
    """Let something happen to the job."""
    plan, layout = driver.job.plan.desired, driver.job.layouts.current
    assert layout is not None
    kinds = ["steps", "steps", "tick", "late", "word", "word"]
    if plan is not None:
        kinds += ["some", "some", "some", "all", "all", "refuse"]
    match random.choice(kinds):
        case "steps":
            duration_s = random.choice([0.1, 2.0, 2.0])
            is_judged = isinstance(driver.job.plan.current, InForce)
            for _ in range(JUDGED_STEPS + 1 if is_judged else 1):
                driver.now_s += 0.2
                number = driver.job.progress.step + 1
                records = step(number, generation=layout.generation, slow=2)
                driver.report(*lasting(duration_s, records))
                answer(driver, random)
        case "tick":
            driver.tick(0.5)
        case "late":
            driver.tick(120.0)
        case "word":
            driver.hear(driver.state.next_proposal_id - 1, is_approved=random.random() < 0.7)
        case "some" if plan is not None:
            driver.report(*applied(plan, plan.ranks[:1]))
        case "all" if plan is not None:
            driver.report(*applied(plan))
        case "refuse" if plan is not None:
            driver.report(refused(plan, random.choice(plan.ranks), "no room"))
    answer(driver, random)


def answer(driver: Driver, random: Random) -> None:
    """Answer what is asked of the planner, until nothing more is."""
    while True:
        assert not driver.all_said(Failed)
        questions = driver.all_said(RequestDecision)
        if not questions:
            return
        (question,) = questions
        decision = decision_on(question.view, random)
        driver.event(DecisionMade(job=question.job, asked=question.asked, decision=decision))


def test_every_transition_is_of_the_table_and_each_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = CountedTable(TRANSITIONS)
    monkeypatch.setattr(plan_phase, "TRANSITIONS", table)
    warm = started(QUICK)
    train(warm, 0, WARM)
    train(warm, WARM, WARM + 6, slow=2)
    ranks = {
        rank: replace(known, attachment=replace(known.attachment, can_probe=True))
        for rank, known in warm.job.ranks.items()
    }
    warm.state = replace(warm.state, jobs={JOB: replace(warm.job, ranks=ranks)})
    for number in range(STORIES):
        random = Random(number)
        policy = random.choice([EAGER, EAGER, EAGER, CAREFUL, CAREFUL, CAREFUL, SILENT])
        driver = replace(warm, said=(), is_deciding=False, config=replace(QUICK, policy=policy))
        for _ in range(MOVES):
            move(driver, random)
    assert table.drawn.keys() <= TRANSITIONS.keys()
    rare = {line: table.drawn[line] for line in TRANSITIONS if table.drawn[line] < LEAST_DRAWN}
    assert not rare
