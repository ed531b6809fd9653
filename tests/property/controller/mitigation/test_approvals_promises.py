"""Whatever happens in whatever order: a plan is offered once, in time, approved, on its layout."""

from dataclasses import dataclass, field, replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import (
    DecisionMade,
    OfferPlan,
    RequestDecision,
    SaveProposal,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import shrink
from support.examples import examples
from support.machine_driver import (
    FLOOR,
    QUICK,
    UNIX_OFFSET_S,
    WARM,
    Driver,
    applied,
    exited,
    refused,
    started,
    step,
    train,
)

ASKED = replace(QUICK, policy=PolicyConfig(mode="approve", approve="all", approve_within_s=100.0))

moves = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.sampled_from([1, 4, 12]), st.booleans()),
        st.tuples(st.just("tick"), st.sampled_from([0.2, 30.0, 120.0]), st.booleans()),
        st.tuples(
            st.just("word"), st.sampled_from([0, 0, 1]), st.sampled_from([True, True, False])
        ),
        st.tuples(st.just("word"), st.just(0), st.just(True)),
        st.tuples(
            st.sampled_from(["take", "refuse", "die", "restart", "decide"]),
            st.just(0),
            st.just(True),
        ),
    ),
    min_size=1,
    max_size=20,
)


@cache
def warm() -> Driver:
    driver = started(ASKED)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 6, slow=2)
    return driver


@dataclass(kw_only=True)
class Watched:
    """A driver, and what must never happen."""

    driver: Driver
    answers: bool = True
    asked: list[RequestDecision] = field(default_factory=list)
    known: dict[int, Proposal] = field(default_factory=dict)
    approved: set[int] = field(default_factory=set)
    offered: dict[int, Layout] = field(default_factory=dict)

    def look(self) -> None:
        """After each event. Whoever prices what was approved finds that it pays, sooner or later:
        only the machine stands between an old plan and the ranks.
        """
        self.check()
        self.asked += self.driver.all_said(RequestDecision)
        while self.answers and self.asked:
            question = self.asked.pop(0)
            decision = question.view.approved or decide(question.view, ASKED.policy)
            answer = DecisionMade(job=question.job, asked=question.asked, decision=decision)
            self.driver.event(answer)
            self.check()
            self.asked += self.driver.all_said(RequestDecision)

    def check(self) -> None:
        """What was said holds what is promised."""
        driver = self.driver
        unix_s = driver.now_s + UNIX_OFFSET_S
        for saved in driver.all_said(SaveProposal):
            proposal = saved.proposal
            before = self.known.get(proposal.proposal_id)
            assert before is None or not before.answer.is_final, "what is over stays over"
            if proposal.answer is ProposalState.APPROVED:
                assert proposal.operator == "ada"
                self.approved.add(proposal.proposal_id)
            self.known[proposal.proposal_id] = proposal
        for offer in driver.all_said(OfferPlan):
            made = [
                number
                for number, proposal in self.known.items()
                if proposal.answer is ProposalState.OFFERED and proposal.plan == offer.layout
            ]
            assert made, "nothing is offered that nobody approved"
            number = made[-1]
            assert number in self.approved
            if self.offered.get(number) is None:
                proposal = self.known[number]
                assert unix_s < proposal.expires_unix_s
                assert driver.job.layouts.current == proposal.base
                assert proposal.slow.keys() == driver.job.detection.evidence.slow.keys()
                assert not set(proposal.plan.ranks) & set(driver.job.dead)
                self.offered[number] = offer.layout
        final = [p for p in self.known.values() if p.answer is ProposalState.OFFERED]
        assert len(final) == len(self.offered)
        assert sum(proposal.is_open for proposal in driver.job.plan.proposals) <= 1
        for proposal in driver.job.plan.proposals[:-1]:
            assert proposal.answer.is_final


def happen(watched: Watched, what: str, number: float, flag: bool) -> None:
    driver = watched.driver
    driver.said = ()
    layout = driver.job.layouts.current
    assert layout is not None
    match what:
        case "steps":
            slow = 2 if flag and 2 in layout.ranks else None
            for _ in range(int(number)):
                driver.now_s += 0.2
                records = step(
                    driver.job.progress.step + 1,
                    ranks=layout.ranks,
                    generation=layout.generation,
                    slow=slow,
                )
                driver.report(*records)
                watched.look()
            return
        case "tick":
            driver.tick(number)
        case "word":
            newest = driver.state.next_proposal_id - 1
            driver.hear(newest - int(number), is_approved=flag)
        case "take" if driver.job.plan.desired is not None:
            driver.report(*applied(driver.job.plan.desired))
        case "refuse" if driver.job.plan.desired is not None:
            driver.report(refused(driver.job.plan.desired, layout.ranks[0], "can not"))
        case "die" if len(layout.ranks) == 4:
            newest = max(driver.job.layouts.newest_generation, layout.generation)
            dead = 1 if 1 in layout.ranks else layout.ranks[0]
            survivors = shrink(layout, dead=[dead], generation=newest + 1, floor=FLOOR)
            driver.report(exited(dead))
            watched.look()
            driver.report(*applied(survivors), layouts=[survivors])
        case "restart":
            driver.start_again()
            driver.tick()
            watched.look()
            driver.attach_again(layout)
        case "decide":
            watched.answers = not watched.answers
    watched.look()


@settings(max_examples=examples(120), deadline=None)
@given(moves)
def test_a_plan_is_offered_once_in_time_approved_and_on_its_own_layout(
    story: list[tuple[str, float, bool]],
) -> None:
    watched = Watched(driver=replace(warm(), said=(), is_deciding=False))
    proposal = watched.driver.job.plan.open_proposal
    if proposal is not None:
        watched.known[proposal.proposal_id] = proposal
    for what, number, flag in story:
        happen(watched, what, number, flag)
