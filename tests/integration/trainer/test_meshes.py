"""Jobs with pipeline stages and tensor groups: plans, deaths and joins, as exact as without."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.layout.layout import ShardRun
from support.exact_jobs import exact_job, saving
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


def test_rows_of_a_slow_stage_go_to_another_pipeline_until_a_rank_dies(tmp_path: Path) -> None:
    """Survivors go on in the same step, with whole rows for each pipeline."""
    config = exact_job(tmp_path, steps=100_000, **STAGES)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        layout = fleet.layout(1)
        for generation, shares in ((2, ((0.5, 0.2), (0.5, 0.8))), (3, ((0.3, 0.9), (0.7, 0.1)))):
            pipelines = tuple(
                replace(one, stage_shares=of)
                for one, of in zip(layout.pipelines, shares, strict=True)
            )
            new = replace(layout, generation=generation, pipelines=pipelines)
            fleet.offer(new, base_generation=generation - 1)
            fleet.await_(lambda: fleet.generations(0)[-1] == generation)  # noqa: B023
            fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
        fleet.signal(2, signal.SIGKILL)
        fleet.await_(lambda: fleet.generations(0)[-1] == 4)
        fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact((0, 1, 3), end=len(fleet.steps(0)))
        assert fleet.layout(4).stage_shares == ()


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
