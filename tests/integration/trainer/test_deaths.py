"""Deaths at any moment: survivors go on in the step they were in, and the losses stay the same.

Jobs compute in float64 and are compared with one process that nothing happens to.
"""

import random
import signal
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engine_jobs import logged, write_data
from support.exact_jobs import assert_losses, exact_job, undisturbed
from support.examples import stress
from support.fleet import Fleet
from support.sabotage import BadGradient, Hasty, Moment, OtherNode, Sabotage

pytest.importorskip("transformers")


def others(*victims: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(4) if rank not in victims)


@pytest.mark.parametrize(
    ("victims", "num_nodes"), [((0,), 2), stress((1, 2, 3), 1), stress((0,), 1)]
)
def test_any_rank_may_be_killed_at_any_moment(
    tmp_path: Path, victims: tuple[int, ...], num_nodes: int
) -> None:
    """Rank 0 leads, and its node has the first store."""
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    draw = random.Random(seed)
    victim, step = draw.choice(victims), draw.randint(0, 18)
    per_node = 4 // num_nodes
    with Fleet(
        directory=tmp_path,
        config=exact_job(tmp_path),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
    ) as fleet:
        fleet.await_step(step, victim)
        fleet.signal(victim, signal.SIGKILL)
        assert fleet.codes() == [0] * num_nodes
        survivors = others(victim)
        fleet.assert_exact(survivors)
        for rank in survivors:
            assert fleet.generations(rank) == [1, 2]
            assert len(fleet.redone(rank)) <= 1
        node_of = {rank: rank // per_node for rank in range(4)}
        spread = start_layout([4, 4], range(4), 2, node_of if num_nodes > 1 else {})
        for node in range(num_nodes):
            assert fleet.layout(1, node) == spread
            layout = fleet.layout(2, node)
            assert layout.ranks == survivors
            assert all(len(replicas) == 2 for layer in layout.experts for replicas in layer)
        # The log of the job is whole, whoever writes it.
        assert_losses(logged(fleet.run_dir), fleet.config, 0, fleet.config.steps)


def test_two_at_once_and_then_down_to_a_single_rank(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, replicas=3)) as fleet:
        fleet.await_step(5, 2)
        fleet.signal(0, signal.SIGKILL)
        fleet.signal(3, signal.SIGKILL)
        fleet.await_(lambda: len(fleet.events(2, "regroup")) >= 1)
        fleet.await_step(fleet.steps(2)[-1]["step"] + 3, 2)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        fleet.assert_exact((2,))
        # The notice of the second death may come late.
        assert fleet.generations(2)[-1] == fleet.layout(1).generation + len(
            fleet.events(2, "regroup")
        )


@pytest.mark.parametrize(("node", "num_nodes"), [(1, 2), stress(0, 3)])
def test_a_whole_node_may_go(tmp_path: Path, node: int, num_nodes: int) -> None:
    """Killed with its launcher: nobody is left to say that its ranks are dead, or keeps its store.

    Two replicas suffice, since they are on two nodes. Those that are left are half with the lowest
    rank, or more than half. The timeout is longer than the test may take: it is not by waiting that
    it is noticed.
    """
    config, per_node = exact_job(tmp_path, peer_timeout_s=600.0), 4 // num_nodes
    with Fleet(
        directory=tmp_path, config=config, num_nodes=num_nodes, ranks_per_node=per_node
    ) as fleet:
        survivors = tuple(rank for rank in fleet.ranks if rank // per_node != node)
        fleet.await_step(7, survivors[0])
        fleet.launchers[node].kill()
        rest = [launcher for n, launcher in enumerate(fleet.launchers) if n != node]
        fleet.await_(lambda: all(launcher.code() == 0 for launcher in rest))
        fleet.assert_exact(survivors)
        assert fleet.generations(survivors[0]) == [1, 2]


def test_half_without_the_lowest_rank_ends_and_says_why(tmp_path: Path) -> None:
    """For all they know, the others are only out of sight, and train on."""
    config = exact_job(tmp_path, replicas=4, peer_timeout_s=600.0)
    body = Hasty(quorum_wait_s=3.0)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2, body=body
    ) as fleet:
        fleet.await_step(7, 2)
        fleet.launchers[0].kill()
        fleet.await_(lambda: fleet.launchers[1].code() is not None)
        assert fleet.launchers[1].code() == ExitCode.NO_QUORUM
        for rank in (2, 3):
            assert fleet.events(rank, "regroup") == []
            assert_losses(fleet.steps(rank), config, 0, len(fleet.steps(rank)))


@pytest.mark.parametrize("moment", [Moment.AT_START, Moment.IN_RESUME])
def test_a_death_before_the_first_step(tmp_path: Path, moment: Moment) -> None:
    """The first group is not formed, or it stands and nothing was compared in it."""
    body = Sabotage(moment=moment, victims=(0,))
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, steps=8), body=body) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((1, 2, 3))
        assert fleet.generations(1) == [2]
        assert fleet.layout(2).ranks == (1, 2, 3)


def test_a_step_that_some_committed_is_committed_by_all_and_another_is_done_again(
    tmp_path: Path,
) -> None:
    later = Sabotage(moment=Moment.IN_STEP_BEFORE_VOTE, victims=(0,), step=12)
    body = Sabotage(
        moment=Moment.IN_STEP_AFTER_VOTE, victims=(3,), doubters=(1,), step=5, then=later
    )
    with Fleet(directory=tmp_path, config=exact_job(tmp_path), body=body) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((1, 2))
        assert [fleet.redone(rank) for rank in (1, 2)] == [[12], [12]]


def test_a_death_while_replicas_are_compared_and_one_in_an_evaluation(tmp_path: Path) -> None:
    """The step before them is committed; what was not finished is left out."""
    config = exact_job(
        tmp_path,
        steps=12,
        replica_check_period_steps=4,
        evaluation_data=(str(tmp_path / "tokens.bin"),),
        evaluation_rows=5,
        evaluation_period_steps=4,
    )
    later = Sabotage(moment=Moment.IN_EVALUATION, victims=(0,))
    body = Sabotage(moment=Moment.IN_REPLICA_CHECK, victims=(3,), then=later)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((1, 2))
        for rank in (1, 2):
            assert [line["step"] for line in fleet.events(rank, "regroup")] == [4, 8]
            assert [line["step"] for line in fleet.events(rank, "checked")] == [7, 11]
            assert fleet.redone(rank) == []
        lines = logged(fleet.run_dir)
        assert_losses(lines, config, 0, config.steps)
        assert [line["step"] for line in lines if "evaluation_loss" in line] == [11]


def test_what_was_trained_is_evaluated_though_a_rank_dies_in_that(tmp_path: Path) -> None:
    config = exact_job(
        tmp_path, steps=5, evaluation_data=(str(tmp_path / "tokens.bin"),), evaluation_rows=5
    )
    body = Sabotage(moment=Moment.IN_EVALUATION, victims=(0,))
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0]
        lines = logged(fleet.run_dir)
        assert_losses(lines, config, 0, config.steps)
        assert [line["step"] for line in lines if "evaluation_loss" in line] == [4]


@pytest.mark.parametrize(
    ("moment", "doubters"),
    [
        stress(Moment.IN_FORMING, ()),
        (Moment.IN_REGROUP_MOVE, ()),
        (Moment.IN_MOVE_AFTER_VOTE, (3,)),  # it missed the votes of the move after the death
        stress(Moment.WITH_VERDICT, ()),
    ],
)
def test_a_second_death_while_survivors_regroup(
    tmp_path: Path, moment: Moment, doubters: tuple[int, ...]
) -> None:
    """Rank 1 leads once rank 0 is dead; three replicas, so that two may die at once."""
    body = Sabotage(moment=moment, victims=(1,), doubters=doubters)
    config = exact_job(tmp_path, replicas=3)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_step(5, 3)
        fleet.signal(0, signal.SIGKILL)
        assert fleet.codes() == [0]
        fleet.assert_exact((2, 3))


def test_who_alone_fails_to_connect_meets_the_others_in_the_next_group(tmp_path: Path) -> None:
    body = Sabotage(moment=Moment.IN_CONNECTING, doubters=(2,))
    with Fleet(directory=tmp_path, config=exact_job(tmp_path), body=body) as fleet:
        fleet.await_step(5, 3)
        fleet.signal(0, signal.SIGKILL)
        assert fleet.codes() == [0]
        fleet.assert_exact((1, 2, 3))
        assert {fleet.layout(fleet.generations(rank)[-1]).ranks for rank in (1, 2, 3)} == {
            (1, 2, 3)
        }


def test_who_misses_the_end_that_others_have_seen_ends_too(tmp_path: Path) -> None:
    body = Sabotage(moment=Moment.AT_END, doubters=(0, 2))
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, steps=8), body=body) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact(others())
        assert all(fleet.events(rank, "regroup") == [] for rank in range(4))


def test_lost_state_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    """Also where checkpoints are written, and there is none yet."""
    config = exact_job(
        tmp_path,
        steps=1000,
        replicas=1,
        checkpoint_dir=str(tmp_path / "kept"),
        checkpoint_period_steps=1000,
    )
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(4, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [ExitCode.LOST_STATE]


def test_a_gradient_that_is_not_finite_is_skipped_by_all_and_by_who_missed_the_votes(
    tmp_path: Path,
) -> None:
    body = BadGradient(victim=3, step=6, doubter=1)
    with Fleet(directory=tmp_path, config=exact_job(tmp_path), body=body) as fleet:
        assert fleet.codes() == [0]
        wanted = undisturbed(fleet.config, fleet.config.steps, skipped={6})
        assert wanted[7:] != pytest.approx(undisturbed(fleet.config, 24)[7:], rel=1e-6)
        for rank in others(3):
            assert [event["step"] for event in fleet.events(rank, "skipped")] == [6]
            losses = [line["loss"] for line in fleet.steps(rank)]
            assert len(losses) == 24
            assert losses[:6] + losses[7:] == pytest.approx(wanted[:6] + wanted[7:], rel=1e-9)


def test_ranks_with_other_data_do_not_begin(tmp_path: Path) -> None:
    other = write_data(tmp_path / "other.bin", 3_000)
    body = OtherNode(victims=(1,), settings={"data": (str(other),)})
    with Fleet(directory=tmp_path, config=exact_job(tmp_path), body=body) as fleet:
        assert fleet.codes() == [ExitCode.CONFIG]
        assert fleet.steps(0) == []
