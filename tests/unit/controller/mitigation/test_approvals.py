"""Plans that need a person's word: proposed, answered once, stale when what they are for ends."""

from dataclasses import replace

import pytest

from pacekeeper.controller.mitigation.approvals import find_proposal
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import (
    DecisionMade,
    OfferPlan,
    RequestDecision,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveProposal,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import shrink
from support.machine_driver import (
    FIRST,
    FLOOR,
    JOB,
    NODE_OF,
    QUICK,
    UNIX_OFFSET_S,
    WARM,
    Driver,
    applied,
    attachment,
    exited,
    started,
    step,
    train,
)
from support.proposed import STANDS_S, asking, opened, train_until_proposed
from support.scrapes import value


def ended(driver: Driver, proposal: Proposal) -> Proposal:
    known = find_proposal(driver.state, proposal.proposal_id)
    assert known is not None
    return known


def test_a_plan_is_proposed_and_not_offered() -> None:
    driver = asking()
    proposal = opened(driver)
    assert driver.job.plan.desired is None and driver.job.layouts.newest_generation == 1
    assert (proposal.proposal_id, proposal.job, proposal.answer) == (1, JOB, ProposalState.WAITING)
    assert (proposal.decision.level, proposal.base) == (MitigationLevel.BATCH_SHARES, FIRST)
    assert proposal.slow == driver.job.detection.evidence.slow and list(proposal.slow) == [2]
    assert proposal.expires_unix_s == proposal.made_unix_s + STANDS_S
    (incident,) = driver.job.open_incidents
    assert proposal.incident_ids == (incident.incident_id,)
    assert incident.actions[-1].startswith("proposal 1, to be approved within 15 min: rank 2 ")


def test_while_a_person_is_asked_nothing_else_is_decided() -> None:
    driver = asking()
    before = opened(driver)
    for number in range(driver.job.progress.step + 1, driver.job.progress.step + 10):
        driver.report(*step(number, slow=2))
        assert not driver.all_said(RequestDecision)
        driver.tick()
        assert not driver.all_said(RequestDecision)
    assert opened(driver) == before


def test_what_is_approved_is_priced_again_and_offered_as_it_was_proposed() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.hear(1, is_approved=True, operator="ada@desk")
    (question,) = driver.all_said(RequestDecision)
    assert question.view.approved == proposal.decision
    answers = [(c.proposal.answer, c.proposal.operator) for c in driver.all_said(SaveProposal)]
    assert answers == [(ProposalState.APPROVED, "ada@desk"), (ProposalState.OFFERED, "ada@desk")]
    (offer,) = driver.all_said(OfferPlan)
    assert (offer.layout, offer.base_generation) == (proposal.plan, 1)
    (stored,) = driver.all_said(SaveDecision)
    assert stored.decision.reason.startswith("approved, and priced again: a step from ")
    assert driver.job.plan.desired == proposal.plan
    assert driver.job.plan.open_proposal is None
    (incident,) = driver.job.open_incidents
    assert incident.actions[-1] == "proposal 1 approved by ada@desk"
    driver.report(*applied(proposal.plan))
    assert driver.job.layouts.current == proposal.plan


def test_the_plan_is_stored_with_the_answer_that_it_was_offered() -> None:
    driver = asking()
    driver.is_deciding = False
    driver.hear(1, is_approved=True)
    (question,) = driver.all_said(RequestDecision)
    driver.answer(question)
    assert [c.proposal.answer for c in driver.all_said(SaveProposal)] == [ProposalState.OFFERED]
    assert len(driver.all_said(SaveJob)) == len(driver.all_said(OfferPlan)) == 1


def test_a_second_word_changes_nothing() -> None:
    driver = asking()
    driver.hear(1, is_approved=True)
    after = driver.state
    for is_approved in (True, False):
        driver.hear(1, is_approved=is_approved, operator="bob")
        assert (driver.state, driver.said) == (after, ())
    driver.hear(7, is_approved=True)
    assert (driver.state, driver.said) == (after, ())


def test_a_second_word_on_what_is_being_priced_changes_nothing_either() -> None:
    driver = asking()
    driver.is_deciding = False
    driver.hear(1, is_approved=True)
    after = driver.state
    for is_approved in (True, False):
        driver.hear(1, is_approved=is_approved, operator="bob")
        assert (driver.state, driver.said) == (after, ())
    assert opened(driver).operator == "ada"


def test_a_denied_kind_waits_as_long_as_a_proposal_stands_then_twice_as_long() -> None:
    driver = asking()
    waits_s = []
    for _ in range(4):
        proposal = opened(driver)
        assert proposal.decision.level is MitigationLevel.BATCH_SHARES
        driver.hear(proposal.proposal_id, is_approved=False, reason="not today")
        denied = ended(driver, proposal)
        assert (denied.answer, denied.operator, denied.note) == (
            ProposalState.DENIED,
            "ada",
            "not today",
        )
        refusal = driver.job.plan.refusals[MitigationLevel.BATCH_SHARES]
        waits_s.append(refusal.until_s - driver.now_s)
        train_until_proposed(driver)  # the next best
        other = opened(driver)
        assert other.decision.level is MitigationLevel.TOKEN_SHARES
        assert " more: denied by ada" in other.decision.reason
        driver.hear(other.proposal_id, is_approved=False)
        driver.now_s = refusal.until_s
        train_until_proposed(driver)
    assert waits_s == pytest.approx([900, 1800, 3600, 3600])
    assert driver.job.plan.desired is None


def test_a_denied_plan_is_told_on_its_incident() -> None:
    driver = asking()
    driver.hear(1, is_approved=False, reason="a release is on")
    saved, *_ = driver.all_said(SaveIncident)
    assert saved.incident.actions[-1] == "proposal 1 denied by ada: a release is on"
    assert "proposal=1 denied by ada: a release is on" in driver.texts


def test_one_that_nobody_answers_expires_and_what_still_pays_is_proposed_anew() -> None:
    driver = asking()
    first = opened(driver)
    driver.now_s = first.made_unix_s - UNIX_OFFSET_S + STANDS_S - 0.1
    driver.hear(9, is_approved=True)
    assert opened(driver) == first
    driver.now_s += 0.2
    driver.hear(1, is_approved=True)
    expired = ended(driver, first)
    assert (expired.answer, expired.operator) == (ProposalState.EXPIRED, "")
    assert expired.note == "not approved within 15 min"
    train_until_proposed(driver)
    assert opened(driver).proposal_id == 2
    assert driver.job.plan.desired is None


def test_one_expires_on_a_tick_and_an_approval_that_is_priced_too_late_is_worth_nothing() -> None:
    driver = asking()
    first = opened(driver)
    driver.is_deciding = False
    driver.hear(1, is_approved=True)
    (question,) = driver.all_said(RequestDecision)
    driver.now_s += STANDS_S
    driver.answer(question)
    assert ended(driver, first).answer is ProposalState.EXPIRED
    assert driver.job.plan.desired is None and not driver.all_said(OfferPlan)


def test_a_layout_of_the_survivors_makes_it_stale() -> None:
    driver = asking()
    proposal = opened(driver)
    survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    driver.report(exited(1), *applied(survivors), layouts=[survivors])
    driver.hear(1, is_approved=True)
    stale = ended(driver, proposal)
    assert stale.answer is ProposalState.STALE and "died" in stale.note
    assert driver.job.plan.desired is None


def test_a_layout_that_came_first_makes_it_stale() -> None:
    driver = asking()
    proposal = opened(driver)
    theirs = replace(FIRST, generation=2)
    driver.report(layouts=[theirs])  # written, and run by nobody yet
    driver.tick()
    assert ended(driver, proposal).note == "generation 2 came first"
    driver.report(*applied(theirs))
    assert driver.job.layouts.current == theirs


def test_a_rank_that_is_well_again_makes_it_stale() -> None:
    driver = asking()
    proposal = opened(driver)
    train(driver, driver.job.progress.step + 1, driver.job.progress.step + 30)
    driver.tick()
    stale = ended(driver, proposal)
    assert stale.answer is ProposalState.STALE
    assert "ranks 2" in stale.note


def test_another_slow_rank_makes_it_stale() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.is_deciding = False
    while len(driver.job.detection.evidence.slow) < 2:
        number = driver.job.progress.step + 1
        both = [
            record if record.rank != 0 else worse
            for record, worse in zip(step(number, slow=2), step(number, slow=0), strict=True)
        ]
        driver.report(*both)
        assert driver.job.progress.step < 80, "it is never found"
    driver.hear(1, is_approved=True)
    stale = ended(driver, proposal)
    assert stale.answer is ProposalState.STALE and "ranks 0 " in stale.note


def test_a_job_that_is_started_anew_makes_it_stale_though_the_generation_is_the_same() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.report(attached=[attachment(rank, pid=900 + rank) for rank in range(4)])
    assert ended(driver, proposal).note == "the job was started anew"
    driver.report(*applied(FIRST), layouts=[FIRST])
    driver.hear(1, is_approved=True)
    assert driver.job.plan.desired is None


def test_a_job_that_ends_makes_it_stale() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.report(*(exited(rank, signal=0) for rank in range(4)))
    driver.tick()
    assert ended(driver, proposal).note == "the job ended"


def test_what_pays_no_more_is_not_offered_and_says_why() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.is_deciding = False
    driver.hear(1, is_approved=True)
    (question,) = driver.all_said(RequestDecision)
    nothing = Decision(level=MitigationLevel.NOTHING, layout=None, reason="it gains 0.1 s")
    driver.event(DecisionMade(job=JOB, asked=question.asked, decision=nothing))
    stale = ended(driver, proposal)
    assert (stale.answer, stale.note, stale.operator) == (
        ProposalState.STALE,
        "it gains 0.1 s",
        "ada",
    )
    assert driver.job.plan.desired is None


def test_where_it_could_not_be_priced_it_is_stale_and_not_asked_for_ever() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.is_deciding = False
    driver.hear(1, is_approved=True)
    (question,) = driver.all_said(RequestDecision)
    driver.event(DecisionMade(job=JOB, asked=question.asked, decision=None))
    assert ended(driver, proposal).note == "it could not be priced again"


def test_an_answer_to_what_was_asked_before_is_not_taken_for_the_approved_plan() -> None:
    driver = asking()
    driver.is_deciding = False
    state = driver.state
    job = replace(driver.job, plan=replace(driver.job.plan, asked=5, asked_on=None))
    driver.state = replace(state, jobs={JOB: job}, num_asked=5)
    driver.hear(1, is_approved=True)
    (question,) = driver.all_said(RequestDecision)
    assert question.asked == 6
    other = replace(opened(driver).decision, level=MitigationLevel.TOKEN_SHARES)
    driver.event(DecisionMade(job=JOB, asked=5, decision=other))
    assert driver.said == ()
    assert opened(driver).answer is ProposalState.APPROVED


@pytest.mark.parametrize("is_approved", [False, True], ids=["waiting", "approved"])
def test_it_outlives_the_controller(is_approved: bool) -> None:
    driver = asking()
    proposal = opened(driver)
    driver.is_deciding = False
    if is_approved:
        driver.hear(1, is_approved=True)
    driver.start_again()
    driver.tick()
    assert driver.job.plan.open_proposal is not None, "nobody is there yet, and nothing is over"
    driver.is_deciding = True
    driver.attach_again(FIRST)
    if not is_approved:
        driver.report(*step(driver.job.progress.step + 1, slow=2))
        driver.hear(1, is_approved=True)
    for number in range(driver.job.progress.step + 1, driver.job.progress.step + 4):
        driver.report(*step(number, slow=2))
    assert driver.job.plan.desired == proposal.plan
    assert ended(driver, proposal).answer is ProposalState.OFFERED


def test_a_controller_that_is_started_in_another_mode_asks_nobody() -> None:
    driver = asking()
    proposal = opened(driver)
    driver.start_again()
    driver.config = QUICK
    driver.tick()
    stale = ended(driver, proposal)
    assert (stale.answer, stale.note) == (ProposalState.STALE, "plans are not proposed in mode act")


def test_shares_are_taken_at_once_and_what_moves_state_is_proposed_on_top() -> None:
    alone = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1, domain_of=NODE_OF)
    config = replace(QUICK, policy=PolicyConfig(mode="approve", min_hosts=1))
    driver = started(config, alone)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 12, slow=2)
    plan, decision = driver.job.plan.desired, driver.job.plan.last_decision
    assert plan is not None and decision is not None, "shares need nobody's word"
    assert (decision.level, decision.moved_bytes) == (MitigationLevel.BATCH_SHARES, 0)
    assert driver.job.plan.proposals == ()
    driver.report(*applied(plan))
    for number in range(driver.job.progress.step + 1, driver.job.progress.step + 20):
        driver.report(*step(number, generation=2, slow=2))
        assert driver.job.plan.desired is None, "nothing is moved without a word"
    proposal = opened(driver)
    assert proposal.decision.level is MitigationLevel.MOVE_REPLICAS and proposal.base == plan
    driver.hear(proposal.proposal_id, is_approved=True)
    assert driver.job.plan.desired == proposal.plan


def test_one_that_waits_is_a_gauge() -> None:
    metrics = ControllerMetrics()

    def shown(driver: Driver) -> float | None:
        metrics.update(driver.state)
        return value(metrics, "job_proposals_waiting", job_name=JOB)

    driver = asking()
    assert shown(driver) == 1
    driver.hear(1, is_approved=True)
    assert shown(driver) == 0
