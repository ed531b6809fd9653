"""Whoever dies while survivors agree, and whenever: those that live go on in one way."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.errors import LostStateError, NoQuorumError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.elastic.agreement import consensus
from pacekeeper.trainer.elastic.agreement.consensus import Agreement, AllDone, Fenced
from pacekeeper.trainer.elastic.agreement.kv_store import (
    DEATHS_KEY,
    FINISHED_KEY,
    fence_key,
    parse_notices,
)
from pacekeeper.trainer.elastic.agreement.messages import ConsensusDecision, Report
from pacekeeper.trainer.elastic.agreement.quorum import Group, decide_quorum
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from support.examples import examples
from support.fake_stores import FakeCluster, Killed

TICKET = 7
OPEN = Progress(ticket=TICKET, phase=Phase.PRE)
VOTED = Progress(ticket=TICKET, phase=Phase.VOTE)
COMMITTED = Progress(ticket=TICKET + 1, phase=Phase.PRE)


def next_layout(
    commits: bool, dead: frozenset[int], generation: int, members: int = 8
) -> RecoveryPlan:
    del commits
    living = [rank for rank in range(members) if rank not in dead]
    return RecoveryPlan(
        layout=even_layout(
            ranks=living, num_layers=1, num_experts=2, replicas=1, generation=generation
        ),
        restore=("a/checkpoint",) if dead else (),
    )


def reach(
    cluster: FakeCluster,
    reports: dict[int, Progress],
    *,
    timeout_s: float = 60.0,
    known_dead: frozenset[int] = frozenset(),
    dead: frozenset[int] = frozenset(),
    only: int | None = None,
) -> dict[int, ConsensusDecision | Exception]:
    """What each living rank (or `only` one) concludes; killed ones are left out."""
    results: dict[int, ConsensusDecision | Exception] = {}
    members = tuple(sorted(reports))
    for rank in sorted(dead):
        cluster.kill(rank)

    def run(rank: int) -> None:
        mine = Agreement(
            stores=cluster.stores_of(rank),
            rank=rank,
            node_of=cluster.node_of,
            timeout_s=timeout_s,
            known_dead=lambda: known_dead,
        )
        report = Report(progress=reports[rank], newest_generation=3 + rank % 2, last_loss=rank)
        try:
            results[rank] = mine.reach(
                group=Group.first(3, members),
                report=report,
                next_layout=lambda c, d, g: next_layout(c, d, g, len(members)),
            )
        except Killed:
            pass
        except Exception as error:
            results[rank] = error
            cluster.tell_end(rank)

    living = [rank for rank in members if rank not in dead and only in (None, rank)]
    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "everybody comes to an end"
    return results


@st.composite
def clusters(draw: st.DrawFn) -> tuple[FakeCluster, frozenset[int]]:
    """Some ranks are dead at the beginning; others die later, at most two nodes as a whole."""
    num_nodes = draw(st.integers(1, 4))
    ranks_per_node = draw(st.integers(1, 2))
    ranks = range(num_nodes * ranks_per_node)
    dead = draw(st.frozensets(st.sampled_from(ranks), max_size=len(ranks) - 1))
    later = draw(st.dictionaries(st.sampled_from(ranks), st.integers(1, 25)))
    fragile = draw(st.frozensets(st.integers(0, num_nodes - 1), max_size=2))
    cluster = FakeCluster(
        num_nodes=num_nodes, ranks_per_node=ranks_per_node, deaths=later, fragile=fragile
    )
    return cluster, dead


@pytest.fixture(autouse=True, scope="module")
def _hurry() -> Iterator[None]:
    """Nothing that is awaited here comes late: who is no quorum at once never is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "QUORUM_WAIT_S", 0.3)
        yield


# A failing example waits for long: it is shown as it was found.
@settings(
    max_examples=examples(150), deadline=None, phases=(Stage.explicit, Stage.reuse, Stage.generate)
)
@given(clusters(), st.data())
def test_the_living_reach_one_verdict(
    drawn: tuple[FakeCluster, frozenset[int]], data: st.DataObject
) -> None:
    cluster, dead = drawn
    ranks = sorted(cluster.node_of)
    states = data.draw(st.sampled_from([[OPEN, VOTED], [VOTED, COMMITTED]]))
    reports = {rank: data.draw(st.sampled_from(states)) for rank in ranks}
    results = reach(cluster, reports, dead=dead)
    living = {r: v for r, v in results.items() if cluster.node_of[r] not in cluster.down}
    verdicts = list(living.values())
    if any(isinstance(v, NoQuorumError) for v in verdicts):
        told = parse_notices(cluster.data[cluster.node_of[min(living)]].get(DEATHS_KEY))
        assert (
            cluster.down
            and not decide_quorum(Group.first(3, tuple(ranks)), living, told).may_continue
        )
        assert all(isinstance(v, NoQuorumError) for v in verdicts), verdicts
        return
    assert all(isinstance(v, ConsensusDecision) for v in verdicts), verdicts
    assert all(v == verdicts[0] for v in verdicts)
    for rank, verdict in living.items():
        assert isinstance(verdict, ConsensusDecision)
        assert rank in verdict.members
        assert verdict.layout.generation > 3
    after = {reports[r].ticket + (r in v.commits) for r, v in living.items()}  # type: ignore[union-attr]
    assert len(after) <= 1, "all stand at one ticket"


def test_a_verdict_that_one_acted_on_outlives_its_leader_and_its_store() -> None:
    rehearsal = FakeCluster(num_nodes=3, ranks_per_node=1, deaths={})
    verdict = reach(rehearsal, {0: COMMITTED, 1: VOTED, 2: VOTED})[0]
    cluster = FakeCluster(num_nodes=3, ranks_per_node=1, deaths={})
    # The leader wrote it into its own node's store and died; rank 1 reads it there in time.
    cluster.data[0]["verdict/first"] = rehearsal.data[0]["verdict/first"]
    assert reach(cluster, {0: COMMITTED, 1: VOTED, 2: VOTED}, only=1) == {1: verdict}
    cluster.down.add(0)
    assert reach(cluster, {0: COMMITTED, 1: VOTED, 2: VOTED}, only=2) == {2: verdict}


def test_the_new_generation_is_newer_than_any_a_survivor_has_seen() -> None:
    cluster = FakeCluster(num_nodes=1, ranks_per_node=3, deaths={})
    results = reach(cluster, dict.fromkeys(range(3), OPEN), dead=frozenset({2}))
    assert {v.layout.generation for v in results.values() if isinstance(v, ConsensusDecision)} == {
        5
    }


def test_those_who_commit_take_loss_and_fate_of_who_committed_first() -> None:
    cluster = FakeCluster(num_nodes=1, ranks_per_node=3, deaths={})
    results = reach(cluster, {0: VOTED, 1: COMMITTED, 2: VOTED})
    for verdict in results.values():
        assert isinstance(verdict, ConsensusDecision)
        assert verdict.commits == {0, 2}
        assert verdict.last_loss == 1.0


def test_a_rank_declared_dead_must_end() -> None:
    cluster = FakeCluster(num_nodes=1, ranks_per_node=3, deaths={})
    results = reach(cluster, dict.fromkeys(range(3), OPEN), known_dead=frozenset({1}))
    assert isinstance(results[1], Fenced)
    assert [
        v.members for r, v in results.items() if r != 1 and isinstance(v, ConsensusDecision)
    ] == [
        (0, 2),
        (0, 2),
    ]


def test_a_silent_rank_is_fenced_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ever says that it died: a process that can not be killed."""
    monkeypatch.setattr(consensus, "FENCE_GRACE_S", 0.1)
    cluster = FakeCluster(num_nodes=2, ranks_per_node=1, deaths={})
    cluster.data[0]["deaths"] = ""
    results: list[ConsensusDecision] = []
    mine = Agreement(
        stores=cluster.stores_of(0), rank=0, node_of=cluster.node_of, timeout_s=0.1,
        known_dead=frozenset,
    )  # fmt: skip
    report = Report(progress=OPEN, newest_generation=1, last_loss=0.0)
    results.append(
        mine.reach(group=Group.first(1, (0, 1)), report=report,
                   next_layout=lambda c, d, g: next_layout(c, d, g, 2))
    )  # fmt: skip
    assert results[0].members == (0,)
    assert cluster.data[1][fence_key(1)] == "silent"
    assert DEATHS_KEY not in cluster.data[1]


def test_who_reported_in_a_store_that_went_has_its_time_to_report_in_the_next_one() -> None:
    """Its launcher tells of the fenced one: the others had been patient already."""
    cluster = FakeCluster(num_nodes=3, ranks_per_node=1, deaths={}, has_fences=True)
    report = Report(progress=OPEN, newest_generation=1, last_loss=0.0, was_silence=True).encode()
    cluster.data[0]["report/first/2"] = report
    results: dict[int, ConsensusDecision | Exception] = {}

    def run() -> None:
        mine = Agreement(
            stores=cluster.stores_of(1), rank=1, node_of=cluster.node_of, timeout_s=12.0,
            known_dead=frozenset,
        )  # fmt: skip
        results[1] = mine.reach(
            group=Group.first(1, (0, 1, 2)),
            report=Report.decode(report),
            next_layout=lambda c, d, g: next_layout(c, d, g, 3),
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not cluster.fenced:
        time.sleep(0.01)
    time.sleep(0.2)  # of two seconds
    cluster.data[1]["report/first/2"] = report
    thread.join(60.0)
    assert cluster.fenced == {0}
    assert isinstance(results[1], ConsensusDecision) and results[1].members == (1, 2)


def test_lost_state_is_everybodys_verdict() -> None:
    cluster = FakeCluster(num_nodes=1, ranks_per_node=2, deaths={})
    errors = []
    for rank in (0, 1):
        mine = Agreement(
            stores=cluster.stores_of(rank), rank=rank, node_of=cluster.node_of, timeout_s=9.0,
            known_dead=frozenset,
        )  # fmt: skip
        other = Report(
            progress=Progress(ticket=0, phase=Phase.PRE), newest_generation=1, last_loss=0.0
        )
        cluster.data[0]["report/first/1"] = other.encode()

        def lost(commits: bool, dead: frozenset[int], generation: int) -> RecoveryPlan:
            raise LostStateError("layer 0 expert 1: all its replicas are dead")

        with pytest.raises(LostStateError, match="layer 0 expert 1") as caught:
            mine.reach(
                group=Group.first(1, (0, 1)),
                report=Report(
                    progress=Progress(ticket=0, phase=Phase.PRE),
                    newest_generation=1,
                    last_loss=0.0,
                ),
                next_layout=lost,
            )
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_an_end_that_a_member_has_seen_ends_the_search() -> None:
    cluster = FakeCluster(num_nodes=2, ranks_per_node=1, deaths={})
    agreements = [
        Agreement(
            stores=cluster.stores_of(rank), rank=rank, node_of=cluster.node_of, timeout_s=9.0,
            known_dead=frozenset,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    group = Group.first(1, (0, 1))
    assert not agreements[0].has_finished_member(group)
    agreements[1].finish(group.followed_by(2, (0, 1), "another side's"))
    assert not agreements[0].has_finished_member(group)
    agreements[1].finish(group)
    assert agreements[0].has_finished_member(group)
    with pytest.raises(AllDone):
        agreements[0].reach(
            group=group,
            report=Report(progress=OPEN, newest_generation=1, last_loss=0.0),
            next_layout=next_layout,
        )


def test_the_first_member_tells_the_launchers_of_all_nodes_that_the_job_is_over() -> None:
    """They end what is frozen; the others tell those that members ask."""
    cluster = FakeCluster(num_nodes=5, ranks_per_node=1, deaths={})
    group = Group.first(1, tuple(range(5)))

    def told_by(rank: int) -> list[int]:
        mine = Agreement(
            stores=cluster.stores_of(rank), rank=rank, node_of=cluster.node_of, timeout_s=9.0,
            known_dead=frozenset,
        )  # fmt: skip
        mine.finish(group)
        return [n for n, d in enumerate(cluster.data) if f"{rank}@" in d.get(FINISHED_KEY, "")]

    assert told_by(4) == [0, 1, 2]
    assert told_by(0) == [0, 1, 2, 3, 4]


def test_a_generation_that_one_has_left_can_not_be_formed() -> None:
    cluster = FakeCluster(num_nodes=1, ranks_per_node=3, deaths={})
    waiting = Agreement(
        stores=cluster.stores_of(0), rank=0, node_of=cluster.node_of, timeout_s=9.0,
        known_dead=frozenset,
    )  # fmt: skip
    group = Group.first(3, (0, 1, 2))
    assert not waiting.is_left(group)
    reach(cluster, dict.fromkeys(range(3), OPEN))
    assert waiting.is_left(group)
    assert not waiting.is_left(group.followed_by(4, (0, 1, 2), "verdict"))
    cluster.kill(2)
    assert waiting.is_left(group.followed_by(4, (0, 1, 2), "verdict"))
