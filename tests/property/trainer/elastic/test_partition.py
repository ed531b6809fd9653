"""The whole agreement over a broken network: sides that lose each other never both stand again."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.errors import NoQuorumError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.elastic.agreement import consensus
from pacekeeper.trainer.elastic.agreement.consensus import Agreement, Fenced
from pacekeeper.trainer.elastic.agreement.messages import Report
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from support.examples import examples
from support.fake_stores import FakeCluster, Killed

MAX_ROUNDS = 8


@pytest.fixture(autouse=True, scope="module")
def _hurry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "QUORUM_WAIT_S", 0.3)
        patch.setattr(consensus, "GRACE_S", 0.1)
        patch.setattr(consensus, "FENCE_GRACE_S", 0.1)
        yield


@dataclass(kw_only=True)
class Job:
    """Ranks as threads that regroup as trainer/elastic/loop.py does, until they stand or
    must end."""

    cluster: FakeCluster
    timeout_s: float
    here: dict[str, set[int]] = field(default_factory=dict)  # by group: who came to form it
    stood: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    ends: dict[int, Group | Exception] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, group: Group, absent: frozenset[int] = frozenset()) -> None:
        """Everybody has left `group`; the `absent` live and never say a word."""
        awake = [rank for rank in group.members if rank not in absent]
        threads = [threading.Thread(target=self._rank, args=(r, group), daemon=True) for r in awake]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "everybody comes to an end"

    def line(self, name: str) -> list[str]:
        """A group and those before it, the first one first."""
        return [*(self.line(self.parents[name]) if name in self.parents else []), name]

    def _rank(self, rank: int, group: Group) -> None:
        mine = Agreement(
            stores=self.cluster.stores_of(rank),
            rank=rank,
            node_of=self.cluster.node_of,
            timeout_s=self.timeout_s,
            known_dead=frozenset,
        )
        try:
            for _ in range(MAX_ROUNDS):
                report = Report(
                    progress=Progress(ticket=0, phase=Phase.PRE),
                    newest_generation=group.generation,
                    last_loss=0.0,
                    was_silence=True,
                )
                verdict = mine.reach(group=group, report=report, next_layout=_next_layout(group))
                self.parents[verdict.group.name] = group.name
                group = verdict.group
                mine.belong_to(group)
                if self._forms(rank, mine, group):
                    self.ends[rank] = group.standing()
                    return
        except Killed:
            pass
        except Exception as error:
            self.ends[rank] = error
            self.cluster.tell_end(rank)

    def _forms(self, rank: int, mine: Agreement, group: Group) -> bool:
        """As a fabric does: it stands once all members have come, however long ago."""
        with self.lock:
            self.here.setdefault(group.name, set()).add(rank)
            if self.here[group.name] == set(group.members):
                self.stood.append(group.name)
        give_up_s = time.monotonic() + self.timeout_s
        while group.name not in self.stood:
            if mine.is_left(group) or time.monotonic() > give_up_s:
                return False
            time.sleep(0.002)
        return True


def _next_layout(group: Group):  # type: ignore[no-untyped-def]
    def layout(commits: bool, dead: frozenset[int], generation: int) -> RecoveryPlan:
        living = [rank for rank in group.members if rank not in dead]
        return RecoveryPlan(
            layout=even_layout(
                ranks=living, num_layers=1, num_experts=2, replicas=1, generation=generation
            )
        )

    return layout


def sides_of(*sides: set[int]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(side) for side in sides)


@st.composite
def broken(draw: st.DrawFn) -> FakeCluster:
    """Nodes that lose each other, each rank at a moment of its own; some reach two sides."""
    num_nodes = draw(st.integers(2, 5))
    ranks_per_node = draw(st.integers(1, 2))
    ranks = range(num_nodes * ranks_per_node)
    nodes = st.integers(0, num_nodes - 1)
    sides = tuple(draw(st.lists(st.frozensets(nodes, min_size=1), min_size=1, max_size=3)))
    sides += tuple(frozenset({node}) for node in range(num_nodes))
    return FakeCluster(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        deaths=draw(st.dictionaries(st.sampled_from(ranks), st.integers(1, 60), max_size=3)),
        fragile=draw(st.frozensets(nodes, max_size=1)),
        sides=sides,
        cuts={rank: draw(st.integers(0, 40)) for rank in ranks},
        has_fences=draw(st.booleans()),
    )


# A failing example waits for long: it is shown as it was found.
@settings(
    max_examples=examples(40), deadline=None, phases=(Stage.explicit, Stage.reuse, Stage.generate)
)
@given(broken())
def test_groups_that_stand_follow_one_another(cluster: FakeCluster) -> None:
    """A group may stand and be left at once; what stands next follows it, never goes beside it.

    A rank may see late that a group stood which the others have left: lines count, not moments.
    """
    job = Job(cluster=cluster, timeout_s=0.3)
    job.run(Group.first(1, tuple(sorted(cluster.node_of))))
    lines = sorted((job.line(name) for name in job.stood), key=len)
    for earlier, later in pairwise(lines):
        assert later[: len(earlier)] == earlier, f"{earlier[-1]} and {later[-1]} both went on"


@pytest.mark.parametrize(
    ("sides", "winners"),
    [
        (sides_of({0, 1}, {2, 3}), {0, 1}),
        (sides_of({0, 3}, {1, 2}), {0, 3}),
        (sides_of({0}, {1, 2, 3}), {1, 2, 3}),
        (sides_of({0, 1, 2}, {3}), {0, 1, 2}),
        (sides_of({0}, {1, 2}, {3}), set()),
        (sides_of({0}, {1}, {2}, {3}), set()),
    ],
    ids=str,
)
def test_one_side_goes_on_and_the_others_end_with_the_reason(
    sides: tuple[frozenset[int], ...], winners: set[int]
) -> None:
    cluster = FakeCluster(num_nodes=4, ranks_per_node=1, deaths={}, sides=sides)
    job = Job(cluster=cluster, timeout_s=60.0)
    job.run(Group.first(1, (0, 1, 2, 3)))
    assert {rank for rank, end in job.ends.items() if isinstance(end, Group)} == winners
    for rank in {0, 1, 2, 3} - winners:
        end = job.ends[rank]
        assert isinstance(end, NoQuorumError)
        assert "no quorum" in end.what and "mend the network" in end.remedy


def test_the_dead_that_a_supervisor_confirms_are_not_missed() -> None:
    cluster = FakeCluster(num_nodes=2, ranks_per_node=2, deaths={})
    for rank in (0, 1, 2):
        cluster.kill(rank)
    job = Job(cluster=cluster, timeout_s=60.0)
    job.run(Group.first(1, (0, 1, 2, 3)), absent=frozenset({0, 1, 2}))
    end = job.ends[3]
    assert isinstance(end, Group) and end.members == (3,)


def test_the_dead_of_a_side_that_went_on_without_these_still_count() -> None:
    """0, 1 and 2 went on; then 0 and 1 died, and that news alone crosses the gap."""
    sides = sides_of({0, 1, 2}, {3, 4})
    cluster = FakeCluster(num_nodes=5, ranks_per_node=1, deaths={}, sides=sides)
    first = Group.first(1, (0, 1, 2, 3, 4))
    job = Job(cluster=cluster, timeout_s=0.3)
    job.run(first, absent=frozenset({3, 4}))
    theirs = job.ends[2]
    assert isinstance(theirs, Group) and theirs.members == (0, 1, 2)
    cluster.sides = ()
    cluster.kill(0)
    cluster.kill(1)
    cluster.sides = sides
    job.run(first, absent=frozenset({0, 1, 2}))
    assert isinstance(job.ends[3], NoQuorumError) and isinstance(job.ends[4], NoQuorumError)
    job.run(theirs, absent=frozenset({0, 1, 3, 4}))
    end = job.ends[2]
    assert isinstance(end, Group) and end.members == (2,)


def test_a_frozen_majority_is_fenced_and_then_not_missed() -> None:
    cluster = FakeCluster(num_nodes=2, ranks_per_node=2, deaths={}, has_fences=True)
    job = Job(cluster=cluster, timeout_s=0.3)
    job.run(Group.first(1, (0, 1, 2, 3)), absent=frozenset({0, 1, 2}))
    end = job.ends[3]
    assert isinstance(end, Group) and end.members == (3,)


def test_who_could_not_go_on_even_then_fences_nobody() -> None:
    """0 and 1 are silent, 3 and 4 out of sight: 2 alone is no quorum even if 0 and 1 are killed."""
    cluster = FakeCluster(
        num_nodes=5, ranks_per_node=1, deaths={}, sides=sides_of({0, 1, 2}), has_fences=True
    )
    job = Job(cluster=cluster, timeout_s=0.3)
    job.run(Group.first(1, (0, 1, 2, 3, 4)), absent=frozenset({0, 1, 3, 4}))
    assert isinstance(job.ends[2], NoQuorumError)
    assert cluster.fenced == set()


def test_a_leader_that_falls_silent_after_its_report_is_replaced() -> None:
    """Frozen after its report: the next rank's turn comes, it fences the first and leads."""
    cluster = FakeCluster(num_nodes=1, ranks_per_node=3, deaths={}, has_fences=True)
    cluster.data[0]["report/first/0"] = Report(
        progress=Progress(ticket=0, phase=Phase.PRE),
        newest_generation=1,
        last_loss=0.0,
        was_silence=True,
    ).encode()
    job = Job(cluster=cluster, timeout_s=0.3)
    job.run(Group.first(1, (0, 1, 2)), absent=frozenset({0}))
    assert cluster.fenced == {0}
    ends = [job.ends[rank] for rank in (1, 2)]
    assert [end.members for end in ends if isinstance(end, Group)] == [(1, 2), (1, 2)]


def test_a_rank_that_has_lost_its_own_nodes_store_must_end() -> None:
    cluster = FakeCluster(num_nodes=2, ranks_per_node=1, deaths={}, sides=sides_of({0}))
    mine = Agreement(
        stores=cluster.stores_of(1),
        rank=1,
        node_of=cluster.node_of,
        timeout_s=1.0,
        known_dead=frozenset,
    )
    with pytest.raises(Fenced, match="lost the store of its own node"):
        mine.belong_to(Group.first(1, (0, 1)))
