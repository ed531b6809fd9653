"""Who commits after a failure: nothing that anyone committed is lost, nothing is done twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.trainer.elastic.agreement.two_phase_commit import (
    Ballot,
    Phase,
    Progress,
    Vote,
    resolve,
)


@st.composite
def broken_transactions(draw: st.DrawFn) -> dict[int, Progress]:
    """What survivors report when the transaction `ticket` breaks at any moment of the protocol."""
    ticket = draw(st.integers(0, 50))
    ranks = draw(st.sets(st.integers(0, 20), min_size=1))
    if draw(st.booleans()):  # some got all votes: everybody had reached VOTE
        states = [Progress(ticket=ticket, phase=Phase.VOTE)]
        states += [Progress(ticket=ticket + 1, phase=phase) for phase in (Phase.PRE,)]
    else:  # nobody did
        states = [Progress(ticket=ticket, phase=phase) for phase in Phase]
    return {rank: draw(st.sampled_from(states)) for rank in ranks}


@given(broken_transactions())
def test_all_survivors_stand_at_the_same_ticket_afterwards(reports: dict[int, Progress]) -> None:
    commits = resolve(reports)
    after = {rank: p.ticket + (rank in commits) for rank, p in reports.items()}
    assert len(set(after.values())) == 1
    assert min(after.values()) == max(p.ticket for p in reports.values())


@given(broken_transactions())
def test_only_a_complete_part_is_committed(reports: dict[int, Progress]) -> None:
    for rank in resolve(reports):
        assert reports[rank].phase is Phase.VOTE


@given(broken_transactions())
def test_nobody_commits_unless_somebody_did(reports: dict[int, Progress]) -> None:
    if len({p.ticket for p in reports.values()}) == 1:
        assert resolve(reports) == frozenset()


def test_reports_no_run_can_give_are_refused() -> None:
    ahead = Progress(ticket=5, phase=Phase.PRE)
    with pytest.raises(ValueError, match="rank 1 is at ticket 4"):
        resolve({0: ahead, 1: Progress(ticket=4, phase=Phase.PRE)})
    with pytest.raises(ValueError, match="rank 1 is at ticket 2"):
        resolve({0: ahead, 1: Progress(ticket=2, phase=Phase.VOTE)})


def vote(ready: int = 0, crc: int = 0, finite: bool = True, stopping: bool = False) -> Vote:
    return Vote(
        ticket=3, generation=1, is_finite=finite, is_stopping=stopping, ready_generation=ready,
        ready_crc=crc,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [
        ((vote(2, 9), vote(2, 9)), 2),
        ((vote(2, 9), vote(0)), None),  # not everybody has read it
        ((vote(0), vote(2, 9)), None),  # the leader has not
        ((vote(2, 9), vote(2, 8)), None),  # not the same content
        ((vote(3, 9), vote(2, 9)), None),
        ((vote(1, 9), vote(1, 9)), None),  # already in force
        ((vote(), vote()), None),
    ],
)
def test_a_plan_needs_the_leader_and_everybodys_same_copy(
    votes: tuple[Vote, ...], agreed: int | None
) -> None:
    assert Ballot(votes=votes).agreed_generation == agreed


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_probe_is_run_only_where_every_rank_was_asked_for_the_same_one(asked: list[int]) -> None:
    ballot = Ballot(votes=tuple(replace(vote(), ready_probe=number) for number in asked))
    is_agreed = asked[0] > 0 and all(number == asked[0] for number in asked)
    assert ballot.agreed_probe == (asked[0] if is_agreed else None)


def test_one_bad_gradient_stops_everybodys_update_and_one_request_everybody() -> None:
    assert Ballot(votes=(vote(), vote())).is_applied
    assert not Ballot(votes=(vote(), vote(finite=False))).is_applied
    assert not Ballot(votes=(vote(), vote())).is_stopping
    assert Ballot(votes=(vote(), vote(stopping=True))).is_stopping


def test_votes_on_different_transactions_are_our_own_mistake() -> None:
    other = Vote(
        ticket=4, generation=1, is_finite=True, is_stopping=False, ready_generation=0, ready_crc=0
    )
    with pytest.raises(AssertionError, match="different transactions"):
        Ballot(votes=(vote(), other))
