"""Whole stories as transcripts: each event, what the machine said, and what it knows after it.

`pytest tests/golden --update-golden` writes them anew; the diff is the review.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pacekeeper.controller.state.events import (
    Command,
    DeleteOrder,
    Failed,
    ForgetJob,
    ForgetLayouts,
    Log,
    NotifyDeaths,
    NotifySuspects,
    OfferPlan,
    RequestDecision,
    RequestProbe,
    RequestStacks,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    SaveOrder,
    SaveProposal,
    SaveStack,
    SaveStrike,
    StepSummary,
)
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import shrink
from support.machine_driver import (
    FIRST,
    FLOOR,
    JOB,
    Driver,
    applied,
    attachment,
    exited,
    refused,
    step,
)

CONFIG = ControllerConfig(detector=DetectorConfig(warmup_steps=8))


class Transcript:
    """A driver that writes down what happens; steps in which nothing is said are left out."""

    def __init__(self, config: ControllerConfig = CONFIG) -> None:
        self.driver = Driver(config=config)
        self.lines: list[str] = []
        self.number = 0

    def take(self, event: str, happens: Callable[[], None]) -> None:
        happens()
        said = [line for command in self.driver.said if (line := told(command))]
        if said or not event.startswith("step"):
            self.lines += [event, "---", *said, f"= {digest(self.driver)}", ""]

    def start(self) -> None:
        driver = self.driver
        for node, ranks in (("node-0", (0, 1)), ("node-1", (2, 3))):
            self.take(f"agent of {node} attaches", partial(driver.agent, node))
            self.take(
                f"ranks {ranks} of {node} attach, layout 1 is read",
                partial(
                    driver.report, node=node, attached=list(map(attachment, ranks)), layouts=[FIRST]
                ),
            )
        self.run_layout(FIRST)

    def run_layout(self, layout: Layout, *, is_written: bool = False) -> None:
        self.take(
            f"ranks {layout.ranks} run generation {layout.generation}",
            lambda: self.driver.report(*applied(layout), layouts=[layout] if is_written else []),
        )

    def steps(self, count: int, *, slow: int | None = None, generation: int = 1) -> None:
        """Train; stops early where a plan is offered."""
        ranks = (
            self.driver.job.layouts.current.ranks if self.driver.job.layouts.current else range(4)
        )
        for _ in range(count):
            self.driver.now_s += 0.2
            what = "" if slow is None else f", rank {slow} takes 1.6 times as long"
            records = step(self.number, ranks=ranks, generation=generation, slow=slow)
            self.take(
                f"step {self.number} under generation {generation}{what}",
                partial(self.driver.report, *records),
            )
            self.number += 1
            if self.driver.job.plan.desired is not None:
                return

    @property
    def desired(self) -> Layout:
        assert self.driver.job.plan.desired is not None, "a plan is offered"
        return self.driver.job.plan.desired


def told(command: Command) -> str:
    match command:
        case Log(text=text):
            return f"say      {text}"
        case RequestProbe(number=number):
            return f"probe    {number}"
        case RequestStacks(ranks=ranks):
            return f"stacks   {ranks}"
        case SaveStack(incident_id=incident_id, stack=stack):
            return f"store    stack {incident_id} {stack.rank} {stack.source}"
        case SaveOrder(order=order):
            return f"store    order {order.kind} {order.subject}"
        case DeleteOrder(kind=kind, subject=subject):
            return f"store    order {kind} {subject} dropped"
        case SaveStrike(strike=strike):
            return f"store    strike {strike.node}"
        case SaveJob():
            return "store    job"
        case ForgetJob():
            return "store    job forgotten"
        case ForgetLayouts():
            return "store    layouts forgotten"
        case SaveLayout(layout=layout):
            return f"store    layout {layout.generation}"
        case SaveIncident(incident=incident):
            finding = incident.finding
            state = "open" if incident.is_open else "closed"
            return (
                f"store    incident {incident.incident_id}: {finding.kind} of rank {finding.rank}, "
                f"x{finding.slowdown:.1f}, {state}, {len(incident.actions)} actions"
            )
        case SaveDecision(decision=decision):
            return f"store    decision {decision.level}"
        case SaveProposal(proposal=proposal):
            return f"store    proposal {proposal.proposal_id} {proposal.answer}"
        case OfferPlan(layout=layout, base_generation=base, nodes=nodes):
            rows = list(layout.rows_of(32).values())
            return (
                f"offer    plan {layout.generation} on {base} to {', '.join(nodes)}: rows {rows}, "
                f"{shares(layout)}"
            )
        case NotifyDeaths(nodes=nodes, ranks=ranks):
            return f"notify   {', '.join(nodes)}: dead are {list(ranks)}"
        case NotifySuspects(nodes=nodes, ranks=ranks):
            return f"notify   {', '.join(nodes)}: suspect are {list(ranks)}"
        case Failed(what=what, error=error):
            return f"failed   {what}: {error!r}"
        case StepSummary() | RequestDecision():
            return ""


def shares(layout: Layout) -> str:
    """Tokens of each rank over all experts, in percent: even loads make it the work of a rank."""
    at = dict.fromkeys(layout.ranks, 0.0)
    for hosts in layout.experts[0]:
        for host in hosts:
            at[host.rank] += host.share / len(layout.experts[0])
    return "tokens " + " ".join(f"{rank}:{share:.0%}" for rank, share in at.items())


def digest(driver: Driver) -> str:
    job = driver.state.jobs.get(JOB)
    if job is None:
        return "no job"
    numbers = [
        "-" if layout is None else str(layout.generation)
        for layout in (job.layouts.current, job.plan.desired, job.layouts.baseline)
    ]
    return (
        f"layout {numbers[0]} desired {numbers[1]} baseline {numbers[2]} newest "
        f"{job.layouts.newest_generation} step {job.progress.step} "
        f"{job.coverage.state} living {list(job.living)} "
        f"open {[i.incident_id for i in job.open_incidents]}"
    )


def slow_rank_and_way_home() -> Transcript:
    story = Transcript()
    story.start()
    story.steps(12)
    story.steps(12, slow=2)
    story.take("a second goes by", lambda: story.driver.tick(1.1))
    story.run_layout(story.desired)
    story.steps(4, slow=2, generation=2)
    story.steps(30, generation=2)
    story.run_layout(story.desired)
    story.steps(6, generation=3)
    return story


def a_rank_dies() -> Transcript:
    story = Transcript()
    story.start()
    story.steps(12)
    story.take("rank 1 is killed", lambda: story.driver.report(exited(1)))
    story.take("a second goes by", lambda: story.driver.tick(1.1))
    story.run_layout(shrink(FIRST, dead=[1], generation=2, floor=FLOOR), is_written=True)
    story.steps(6, generation=2)
    return story


def the_controller_dies_with_a_plan_under_way() -> Transcript:
    story = Transcript()
    story.start()
    story.steps(12)
    story.steps(12, slow=2)
    plan, driver = story.desired, story.driver
    story.take("the controller is killed and started", driver.start_again)
    story.start()
    story.run_layout(plan)
    story.steps(14, slow=2, generation=2)
    return story


def a_person_denies_a_plan_and_approves_the_next_best() -> Transcript:
    story = Transcript(replace(CONFIG, policy=PolicyConfig(mode="approve", approve="all")))
    story.start()
    story.steps(12)
    story.steps(12, slow=2)
    for is_approved in (False, True):
        proposal = story.driver.job.plan.open_proposal
        assert proposal is not None, "a plan is proposed"
        story.take(
            f"ada {'approves' if is_approved else 'denies'} proposal {proposal.proposal_id}",
            partial(
                story.driver.hear,
                proposal.proposal_id,
                is_approved=is_approved,
                reason="" if is_approved else "not now",
            ),
        )
        if not is_approved:
            story.take("a tick", lambda: story.driver.tick(0.2))
            story.steps(3, slow=2)
    story.run_layout(story.desired)
    story.steps(3, slow=2, generation=2)
    return story


def plan_and_death_cross() -> Transcript:
    story = Transcript()
    story.start()
    story.steps(12)
    story.steps(12, slow=2)
    survivors = shrink(FIRST, dead=[0], generation=2, floor=FLOOR)
    story.take("rank 0 is killed", lambda: story.driver.report(exited(0)))
    story.take("time goes by", lambda: story.driver.tick(0.2))
    story.run_layout(survivors, is_written=True)
    story.steps(8, slow=2, generation=2)
    return story


def a_rank_refuses_the_plan_and_the_next_best() -> Transcript:
    story = Transcript()
    story.start()
    story.steps(12)
    story.steps(12, slow=2)
    for _ in range(2):
        refusal = refused(story.desired, 3, "no room for its rows")
        story.take(
            f"rank 3 refuses plan {story.desired.generation}",
            partial(story.driver.report, refusal),
        )
        story.take("a tick", lambda: story.driver.tick(0.2))
        story.steps(3, slow=2)
    story.take("a minute goes by", lambda: story.driver.tick(60.0))
    story.steps(3, slow=2)
    story.run_layout(story.desired)
    story.steps(6, slow=2, generation=story.driver.job.layouts.newest_generation)
    return story


@pytest.mark.parametrize(
    "tell",
    [
        slow_rank_and_way_home,
        a_rank_dies,
        the_controller_dies_with_a_plan_under_way,
        a_person_denies_a_plan_and_approves_the_next_best,
        plan_and_death_cross,
        a_rank_refuses_the_plan_and_the_next_best,
    ],
    ids=lambda tell: tell.__name__,
)
def test_the_machine_tells_the_same_story(
    tell: Callable[[], Transcript], request: pytest.FixtureRequest
) -> None:
    path = Path(__file__).parent / "transcripts" / f"{tell.__name__}.txt"
    text = "\n".join(tell().lines)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
