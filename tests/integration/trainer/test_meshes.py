"""Jobs with pipeline stages and tensor groups: plans, deaths and joins, as exact as without."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.layout.layout import Layout, ShardRun
from support.exact_jobs import assert_losses, exact_job, saved, saving
from support.fleet import Fleet

pytest.importorskip("transformers")
STAGES = {"num_stages": 2, "tensor_size": 1, "rows_per_step": 8}
GROUPS = {"num_stages": 1, "tensor_size": 2, "rows_per_step": 8}


@pytest.mark.parametrize("mesh", [STAGES, GROUPS | {"schedule": "zero_bubble"}])
def test_a_rank_dies_and_the_others_go_on_in_the_same_step(
    tmp_path: Path, mesh: dict[str, int]
) -> None:
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, steps=14, **mesh)) as fleet:
        fleet.await_step(4, 1)
        fleet.signal(2, signal.SIGKILL)
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact((0, 1, 3))
        assert fleet.layout(2).ranks == (0, 1, 3)


def test_a_plan_moves_heads_and_columns_between_steps(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, **GROUPS)) as fleet:
        fleet.await_step(2, 0)
        home = fleet.layout(1)
        pipelines = []
        for pipeline in home.pipelines:
            (stage,) = pipeline.stages
            first, second = stage.group
            runs = (ShardRun(first, 0, 3), ShardRun(second, 3, stage.attention[-1].end))
            end = stage.mlp[-1].end
            mlp = (ShardRun(first, 0, end - 1), ShardRun(second, end - 1, end))
            moved = replace(stage, attention=runs, mlp=mlp)
            pipelines.append(replace(pipeline, stages=(moved,)))
        new = replace(home, generation=2, pipelines=tuple(pipelines))
        fleet.offer(new, base_generation=1)
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact(fleet.ranks)
        assert fleet.generations(0) == [1, 2]


SHARES = ((0.5, 0.2), (0.5, 0.8)), ((0.3, 0.9), (0.7, 0.1))  # of rows, by pipeline and stage


def follow_shares(fleet: Fleet, layout: Layout, shares: tuple[tuple[float, ...], ...]) -> Layout:
    """Offer a plan with these shares, and wait until the job has trained with it."""
    pipelines = tuple(
        replace(one, stage_shares=of) for one, of in zip(layout.pipelines, shares, strict=True)
    )
    new = replace(layout, generation=layout.generation + 1, pipelines=pipelines)
    fleet.offer(new, base_generation=layout.generation)
    fleet.await_(lambda: fleet.generations(0)[-1] == new.generation)
    await_more_steps(fleet)
    return new


def await_more_steps(fleet: Fleet) -> None:
    fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)


def end(fleet: Fleet) -> None:
    fleet.launchers[0].terminate()
    assert set(fleet.codes()) == {0}, fleet.launchers[0].output()


def test_rows_of_a_slow_stage_go_to_another_pipeline_until_a_rank_dies(tmp_path: Path) -> None:
    """Survivors go on in the same step, with whole rows for each pipeline."""
    config = exact_job(tmp_path, steps=100_000, **STAGES)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        first = follow_shares(fleet, fleet.layout(1), SHARES[0])
        follow_shares(fleet, first, SHARES[1])
        fleet.signal(2, signal.SIGKILL)
        fleet.await_(lambda: fleet.generations(0)[-1] == 4)
        await_more_steps(fleet)
        end(fleet)
        fleet.assert_exact((0, 1, 3), end=len(fleet.steps(0)))
        assert fleet.layout(4).stage_shares == ()


@pytest.mark.parametrize("newcomers", [1, 2])
def test_ranks_join_while_rows_differ_by_stage(tmp_path: Path, newcomers: int) -> None:
    """One stands by, two are a pipeline more; plans of shares go on then."""
    slow = {"emulate": True, "emulated_step_s": 0.1, "emulated_noise": False}
    config = exact_job(tmp_path, steps=100_000, **slow, **STAGES)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        follow_shares(fleet, fleet.layout(1), SHARES[0])
        fleet.join(ranks_per_node=newcomers)
        fleet.await_(lambda: fleet.generations(0)[-1] == 3)
        await_more_steps(fleet)
        grown = fleet.layout(3)
        assert grown.ranks == tuple(range(4 + newcomers))
        assert grown.stage_shares == ()
        shares = SHARES[1] if newcomers == 1 else ((0.2, 0.6), (0.3, 0.0), (0.5, 0.4))
        follow_shares(fleet, grown, shares)
        end(fleet)
        last = fleet.steps(0)[-1]["step"]
        fleet.assert_exact(fleet.ranks, end=last + 1)
        for rank in grown.ranks[4:]:
            steps = fleet.steps(rank)
            assert_losses(steps, config, steps[0]["step"], last + 1)


def test_a_job_is_resumed_from_a_checkpoint_of_rows_that_differ_by_stage(tmp_path: Path) -> None:
    """On the layout of a start, and then with other rows at each stage again."""
    config = saving(exact_job(tmp_path, steps=100_000, **STAGES))
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        follow_shares(fleet, fleet.layout(1), SHARES[0])
        began = fleet.steps(0)[-1]["step"]
        fleet.await_(lambda: bool(saved(config)) and saved(config)[0].step > began)
        for rank in fleet.ranks:
            fleet.signal(rank, signal.SIGKILL)
        fleet.await_(lambda: fleet.launchers[0].code() is not None)
    (again := tmp_path / "again").mkdir()
    with Fleet(directory=again, config=config) as fleet:
        fleet.await_step(began + 2, 0)
        first = fleet.steps(0)[0]["step"]
        assert first >= began
        follow_shares(fleet, fleet.layout(fleet.generations(0)[-1]), SHARES[1])
        end(fleet)
        for rank in fleet.ranks:
            fleet.assert_exact((rank,), first=first, end=fleet.steps(0)[-1]["step"] + 1)


def test_a_job_with_stages_resumes_as_one_with_tensor_groups(tmp_path: Path) -> None:
    """With optimizer state on two ranks first, on all holders then."""
    shards = {"attention_shards": 4, "mlp_shards": 4}
    config = saving(exact_job(tmp_path, steps=8, shard_optimizer_state=True, **shards, **STAGES))
    with Fleet(directory=tmp_path, config=config) as fleet:
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact(fleet.ranks)
    other = replace(config, steps=12, num_stages=1, tensor_size=2, shard_optimizer_state=False)
    (again := tmp_path / "again").mkdir()
    with Fleet(directory=again, config=other) as fleet:
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact(fleet.ranks, first=8)
