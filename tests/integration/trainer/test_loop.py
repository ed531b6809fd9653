"""Deaths at any moment: survivors go on in the step they were in, and the losses stay the same.

The undisturbed run is one process that holds everything; float64, so that 1e-9 can be asked for.
"""

import os
import random
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.layout.shrink import shrink
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.trainer.toy.engine.job_rules import first_layout
from pacekeeper.trainer.toy.engine.single_process import train_alone
from support.examples import stress
from support.fleet import SMALL, Fleet
from support.sabotage import BadGradient, Hasty, Moment, OtherText, Sabotage

FIRST = first_layout(SMALL, 4)


@cache
def undisturbed(config: TrainConfig) -> tuple[float, ...]:
    """The losses of one process that holds everything and that nobody disturbs."""
    return tuple(loss for _, loss, _ in train_alone(config))


def assert_exact(fleet: Fleet, ranks: tuple[int, ...]) -> None:
    """`ranks` committed every step once, with the losses of the undisturbed run."""
    wanted = undisturbed(replace(SMALL, steps=fleet.config.steps))
    for rank in ranks:
        steps = fleet.steps(rank)
        assert [line["step"] for line in steps] == list(range(fleet.config.steps)), rank
        assert [line["loss"] for line in steps] == pytest.approx(wanted, rel=1e-9), rank


def generations(fleet: Fleet, rank: int) -> list[int]:
    """The generation of each step, without repeats."""
    seen = [line["generation"] for line in fleet.steps(rank)]
    return [g for i, g in enumerate(seen) if i == 0 or seen[i - 1] != g]


def others(*victims: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(4) if rank not in victims)


def mirrored(layout: Layout, generation: int) -> Layout:
    """Every expert lives elsewhere: what rank r held is on rank (last - r)."""
    last = layout.ranks[-1]
    experts = tuple(
        tuple(
            tuple(sorted(ExpertReplica(last - h.rank, h.share) for h in hosts)) for hosts in layer
        )
        for layer in layout.experts
    )
    return replace(layout, generation=generation, experts=experts)


def test_two_nodes_train_as_one_process_does(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, num_nodes=2, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0, 0]
        assert_exact(fleet, (0, 1, 2, 3))
        spread = first_layout(SMALL, 4, {rank: rank // 2 for rank in range(4)})
        assert fleet.layout(1, node=0) == fleet.layout(1, node=1) == spread


@pytest.mark.parametrize(
    ("victims", "num_nodes"), [((0,), 1), stress((1, 2, 3), 1), stress((0,), 2)]
)
def test_any_rank_may_be_killed_at_any_moment(
    tmp_path: Path, victims: tuple[int, ...], num_nodes: int
) -> None:
    """Rank 0 leads, and its node has the first store."""
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    draw = random.Random(seed)
    victim, step = draw.choice(victims), draw.randint(0, 18)
    with Fleet(directory=tmp_path, num_nodes=num_nodes, ranks_per_node=4 // num_nodes) as fleet:
        fleet.await_step(step, victim)
        fleet.signal(victim, signal.SIGKILL)
        assert fleet.codes() == [0] * num_nodes
        survivors = others(victim)
        assert_exact(fleet, survivors)
        for rank in survivors:
            assert generations(fleet, rank) == [1, 2]
            assert sum(line["is_redone"] for line in fleet.steps(rank)) <= 1
        for node in range(num_nodes):
            layout = fleet.layout(2, node)
            assert layout.ranks == survivors
            assert all(len(hosts) >= 2 for layer in layout.experts for hosts in layer)


def test_one_after_the_other_down_to_a_single_rank(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path) as fleet:
        for step, victim in ((4, 0), (10, 3), (16, 1)):
            fleet.await_step(step, 2)
            fleet.signal(victim, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_exact(fleet, (2,))
        assert generations(fleet, 2) == [1, 2, 3, 4]


def test_two_at_once(tmp_path: Path) -> None:
    config = replace(SMALL, replicas=3)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(7, 0)
        fleet.signal(0, signal.SIGKILL)
        fleet.signal(2, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_exact(fleet, (1, 3))


@pytest.mark.parametrize(("node", "num_nodes"), [(1, 2), stress(0, 3)])
def test_a_whole_node_may_go(tmp_path: Path, node: int, num_nodes: int) -> None:
    """Killed with its launcher: nobody is left to say that its ranks are dead, or keeps its store.

    Two hosts of an expert suffice, since they stand on two nodes. Those that are left are half with
    the lowest rank, or more than half. The timeout is longer than the test may take: it is not by
    waiting that it is noticed.
    """
    config = replace(SMALL, replicas=2, peer_timeout_s=600.0)
    per_node = 4 // num_nodes
    with Fleet(
        directory=tmp_path, config=config, num_nodes=num_nodes, ranks_per_node=per_node
    ) as fleet:
        survivors = tuple(rank for rank in fleet.ranks if rank // per_node != node)
        fleet.await_step(7, survivors[0])
        fleet.launchers[node].kill()
        rest = [launcher for n, launcher in enumerate(fleet.launchers) if n != node]
        fleet.await_(lambda: all(launcher.code() == 0 for launcher in rest))
        assert_exact(fleet, survivors)
        assert generations(fleet, survivors[0]) == [1, 2]


def test_half_without_the_lowest_rank_ends_and_says_why(tmp_path: Path) -> None:
    """For all they know, the others are only out of sight, and train on."""
    config = replace(SMALL, replicas=4, peer_timeout_s=600.0)
    body = Hasty(quorum_wait_s=3.0)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2, body=body
    ) as fleet:
        fleet.await_step(7, 2)
        fleet.launchers[0].kill()
        fleet.await_(lambda: fleet.launchers[1].code() is not None)
        assert fleet.launchers[1].code() == ExitCode.NO_QUORUM
        assert "ranks 2 and 3 are no quorum: 2 of 4" in fleet.launchers[1].output()
        for rank in (2, 3):
            assert fleet.events(rank, "regroup") == []
            assert [line["step"] for line in fleet.steps(rank)] == list(
                range(len(fleet.steps(rank)))
            )


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        stress(Moment.AT_START, 0),
        stress(Moment.IN_STEP_BEFORE_VOTE, 2),
        (Moment.IN_STEP_AFTER_VOTE, 0),
    ],
)
def test_a_death_at_a_chosen_moment(tmp_path: Path, moment: Moment, victim: int) -> None:
    with Fleet(directory=tmp_path, body=Sabotage(moment=moment, victims=(victim,))) as fleet:
        assert fleet.codes() == [0]
        assert_exact(fleet, others(victim))


def test_a_step_that_some_committed_is_committed_by_all_and_not_done_again(tmp_path: Path) -> None:
    body = Sabotage(moment=Moment.IN_STEP_AFTER_VOTE, victims=(3,), doubters=(1,), step=5)
    with Fleet(directory=tmp_path, body=body) as fleet:
        assert fleet.codes() == [0]
        assert_exact(fleet, others(3))
        assert not fleet.steps(1)[5]["is_redone"]


@pytest.mark.parametrize(
    "moment", [stress(Moment.IN_FORMING), Moment.IN_REGROUP_MOVE, stress(Moment.WITH_VERDICT)]
)
def test_a_second_death_while_survivors_regroup(tmp_path: Path, moment: Moment) -> None:
    """Rank 1 leads once rank 0 is dead; three hosts, so that two may die at once."""
    config = replace(SMALL, replicas=3)
    body = Sabotage(moment=moment, victims=(1,))
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_step(5, 3)
        fleet.signal(0, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_exact(fleet, (2, 3))


def test_an_offered_plan_is_followed_by_all_at_the_same_step(tmp_path: Path) -> None:
    new = mirrored(FIRST, 2)
    with Fleet(directory=tmp_path) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(new, base_generation=1)
        assert fleet.codes() == [0]
        assert_exact(fleet, others())
        moves = [fleet.events(rank, "plan")[1:] for rank in range(4)]
        assert [len(events) for events in moves] == [1] * 4
        assert len({events[0]["step"] for events in moves}) == 1
        for rank in range(4):
            assert generations(fleet, rank) == [1, 2]


def test_a_plan_for_another_layout_is_not_followed(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(mirrored(FIRST, 9), base_generation=8)
        assert fleet.codes() == [0]
        assert_exact(fleet, others())
        assert generations(fleet, 0) == [1]


def test_survivors_number_their_layout_after_a_plan_they_have_seen(tmp_path: Path) -> None:
    """A plan made before the death must not come into force under their number."""
    with Fleet(directory=tmp_path) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(mirrored(FIRST, 5), base_generation=4)
        fleet.signal(3, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert generations(fleet, 0) == [1, 6]


@pytest.mark.parametrize(
    ("moment", "victim", "doubters", "is_moved"),
    [
        stress(Moment.IN_MOVE_BEFORE_VOTE, 2, (), False),
        (Moment.IN_MOVE_AFTER_VOTE, 3, (0,), True),  # the leader missed it, the others did it
        stress(Moment.IN_MOVE_AFTER_VOTE, 0, (2,), True),
        (Moment.IN_MOVE_AFTER_VOTE, 1, (0, 2, 3), False),  # only the dead one knew
    ],
)
def test_a_death_in_mid_move_leaves_all_in_the_old_layout_or_all_in_the_new_one(
    tmp_path: Path, moment: Moment, victim: int, doubters: tuple[int, ...], is_moved: bool
) -> None:
    body = Sabotage(moment=moment, victims=(victim,), doubters=doubters)
    with Fleet(directory=tmp_path, body=body) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(mirrored(FIRST, 2), base_generation=1)
        assert fleet.codes() == [0]
        survivors = others(victim)
        assert_exact(fleet, survivors)
        for rank in survivors:
            assert generations(fleet, rank) == [1, 3]
        before = mirrored(FIRST, 2) if is_moved else FIRST
        assert fleet.layout(3) == shrink(before, dead={victim}, generation=3)


def test_a_stopped_rank_is_fenced_and_the_others_go_on(tmp_path: Path) -> None:
    config = replace(SMALL, peer_timeout_s=10.0)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(4, 1)
        fleet.signal(1, signal.SIGSTOP)
        assert fleet.codes() == [0, 0]
        assert_exact(fleet, others(1))
        assert "rank=1 is fenced" in fleet.launchers[0].output()


def test_a_node_that_freezes_as_a_whole_is_left_behind(tmp_path: Path) -> None:
    """Its kernel still takes connections for its store, to which nobody had one before."""
    config = replace(SMALL, peer_timeout_s=10.0)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(4, 1)
        os.kill(fleet.launchers[1].pid, signal.SIGSTOP)
        fleet.signal(1, signal.SIGSTOP)
        fleet.await_(lambda: fleet.launchers[0].code() is not None)
        assert fleet.launchers[0].code() == 0
        assert_exact(fleet, (0,))
        assert "node 1 is gone" in fleet.launchers[0].output()


def test_a_rank_that_the_fleet_declared_dead_is_left_behind(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path) as fleet:
        fleet.await_step(4, 0)
        for rank in others(1):
            fleet.command(rank, shm_ring.CommandSlot(dead_ranks=frozenset({1})))
        path = fleet.ring_path(0).with_name(shm_ring.SUPERVISOR_RING)
        fleet.command_at(path, shm_ring.CommandSlot(dead_ranks=frozenset({1})))
        assert fleet.codes() == [0]
        assert_exact(fleet, others(1))


def test_lost_state_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, config=replace(SMALL, replicas=1)) as fleet:
        fleet.await_step(4, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [ExitCode.LOST_STATE]
        assert "are dead; restart from a checkpoint" in fleet.launchers[0].output()


def test_ranks_with_another_text_to_train_on_do_not_begin(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, body=OtherText(victim=1)) as fleet:
        assert fleet.codes() == [ExitCode.CONFIG]
        assert fleet.launchers[0].output().count("ranks 1 would train on another text") == 4
        assert fleet.steps(0) == []


def test_a_gradient_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, body=BadGradient(victim=1, step=6)) as fleet:
        assert fleet.codes() == [0]
        for rank in range(4):
            assert [event["step"] for event in fleet.events(rank, "skipped")] == [6]
        losses = [[line["loss"] for line in fleet.steps(rank)] for rank in range(4)]
        assert losses[0] == losses[1] == losses[2] == losses[3]
        wanted = undisturbed(SMALL)
        assert losses[0][:7] == pytest.approx(wanted[:7], rel=1e-9)
        assert losses[0][7] != pytest.approx(wanted[7], rel=1e-6), "the update was left out"


def test_a_skipped_step_stays_skipped_for_those_that_missed_the_votes(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, body=BadGradient(victim=3, step=6, doubter=1)) as fleet:
        assert fleet.codes() == [0]
        losses = []
        for rank in others(3):
            assert [event["step"] for event in fleet.events(rank, "skipped")] == [6]
            losses.append([line["loss"] for line in fleet.steps(rank)])
        assert losses[0] == losses[1] == losses[2]


def test_who_misses_the_end_that_others_have_seen_ends_too(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, body=Sabotage(moment=Moment.AT_END, doubters=(0, 2))) as fleet:
        assert fleet.codes() == [0]
        assert_exact(fleet, others())
        assert all(fleet.events(rank, "regroup") == [] for rank in range(4))


def test_a_request_to_end_is_followed_by_the_whole_job_at_one_step(tmp_path: Path) -> None:
    config = replace(SMALL, steps=100_000)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(4, 3)
        fleet.launchers[1].terminate()
        assert fleet.codes() == [0, 0]
        assert len({fleet.steps(rank)[-1]["step"] for rank in range(4)}) == 1


def test_a_request_to_end_that_comes_while_ranks_start_is_followed_after_a_step(
    tmp_path: Path,
) -> None:
    config = replace(SMALL, steps=100_000)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_(lambda: "rank=3 pid=" in fleet.launchers[1].output())
        fleet.launchers[1].terminate()
        assert fleet.codes() == [0, 0]
        assert [len(fleet.steps(rank)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_request_to_end_that_goes_to_every_process_is_followed_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    # As `kill -- -GROUP`, `timeout`, systemd, Slurm and a terminal that closes send it: ranks and
    # their server get it, too.
    config = replace(SMALL, steps=100_000)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(4, 3)
        ranks = [fleet.pid(2), fleet.pid(3)]
        for pid in [*{parent(pid) for pid in ranks}, *ranks, fleet.launchers[1].pid]:
            os.kill(pid, number)
        assert fleet.codes() == [0, 0]
        assert len({fleet.steps(rank)[-1]["step"] for rank in range(4)}) == 1


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
