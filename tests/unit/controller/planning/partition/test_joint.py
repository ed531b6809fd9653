"""A partition with its experts: hosts of the ranks that share them, and both as one layout."""

from dataclasses import replace

import pytest

from pacekeeper.controller.planning.experts.problem import Floors, Prices
from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.joint import PlacementRequest, plan_jointly
from pacekeeper.controller.planning.partition.layout_codec import layout_of, partition_of
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import ExpertReplica, ShardRun
from support.partitions import even_partition, model_of, problem_of

MODEL = model_of(4, attention=8, expert_s=3.0)
HOME = even_partition(
    MODEL, data=4, stages=2, tensor=1, rows=32, micro_batches=4, shares_experts=True
)
REQUEST = PlacementRequest(
    loads=((400.0, 100.0, 100.0, 40.0),) * 4,
    slots_per_rank=3,
    floors=Floors(nodes=1),
    prices=Prices(restart_s=0.0),
)


def test_experts_stand_on_the_ranks_of_their_stage_and_slow_ones_compute_less() -> None:
    problem = problem_of(MODEL, HOME, slow={1: 0.5})
    joint = plan_jointly(problem, REQUEST)
    check_partition(joint.plan.partition, problem)
    groups = joint.plan.partition.expert_groups()
    rows = dict.fromkeys(range(8), 0.0)
    for layer, experts in enumerate(joint.experts):
        ranks = groups[0, int(layer >= joint.plan.partition.pipelines[0].cuts[0])]
        for load, hosts in zip(REQUEST.loads[layer], experts, strict=True):
            assert {host.rank for host in hosts} <= set(ranks)
            assert sum(host.share for host in hosts) == pytest.approx(1.0)
            for host in hosts:
                rows[host.rank] += host.share * load
    assert rows[1] == pytest.approx(0.5 * rows[0], rel=0.05)


def test_unevenness_of_the_experts_is_in_the_price() -> None:
    problem = problem_of(MODEL, HOME)
    even = plan_jointly(problem, REQUEST)
    assert even.unevenness == pytest.approx(1.0, abs=0.01)
    # One slot for each expert: the rank of the first one has 400 of 640 rows, 2.5 times its part.
    scarce = plan_jointly(problem, replace(REQUEST, slots_per_rank=1))
    assert scarce.unevenness == pytest.approx(2.5)
    assert scarce.plan.step_s > 1.5 * even.plan.step_s
    assert scarce.plan.fluid_s == pytest.approx(even.plan.fluid_s)


@pytest.mark.parametrize(("in_other_rack", "racks"), [(2, 2), (1, 1)])
def test_experts_stand_in_two_racks_where_those_of_a_stage_have_room(
    in_other_rack: int, racks: int
) -> None:
    """Every device is a node; of each stage's four one or two stand in the other rack."""
    problem = problem_of(MODEL, HOME)
    own = tuple(replace(device, node=device.rank) for device in problem.devices)
    groups = HOME.expert_groups().values()
    rack_of = {rank: int(at < in_other_rack) for ranks in groups for at, rank in enumerate(ranks)}
    request = replace(
        REQUEST,
        rack_of=rack_of,
        floors=Floors(nodes=2, racks=2, is_strict=False),
        slots_per_rank=2,
        rack_failure_probability=0.01,
        prices=Prices(restart_s=600.0),
    )
    joint = plan_jointly(replace(problem, devices=own), request)
    on = [len({rack_of[host.rank] for host in hosts}) for of in joint.experts for hosts in of]
    assert min(on) == racks


def test_loads_are_of_the_models_layers() -> None:
    with pytest.raises(ValueError, match="loads of 3 layers"):
        plan_jointly(problem_of(MODEL, HOME), replace(REQUEST, loads=REQUEST.loads[:3]))


def test_a_plan_is_a_layout() -> None:
    problem = problem_of(MODEL, HOME, slow={1: 0.5})
    joint = plan_jointly(problem, REQUEST)
    partition = joint.plan.partition
    layout = layout_of(partition, joint.experts, generation=2, speeds=((1, 0.5),))
    assert decode_layout(encode_layout(layout)) == layout
    assert [span.stop for span in layout.spans] == list(partition.pipelines[0].cuts)
    assert layout.rows_of(128) == {
        pipeline.cells[0].ranks[0]: pipeline.rows for pipeline in partition.pipelines
    }


def test_a_layout_has_cuts_for_each_pipeline_and_runs_for_both_kinds() -> None:
    dense = model_of(4, attention=4, mlp=8)
    even = even_partition(dense, data=2, stages=2, tensor=2, rows=8, micro_batches=4)
    first, second = (replace(pipeline, expert_group=None) for pipeline in even.pipelines)
    one, two = second.cells
    moved = (replace(one, end_layer=3), replace(two, first_layer=3))
    partition = Partition(pipelines=(first, replace(second, cells=moved)))
    layout = layout_of(partition, ((),) * 4, generation=1)
    assert [pipeline.ends for pipeline in layout.pipelines] == [(2, 4), (3, 4)]
    assert (layout.num_attention_shards, layout.num_mlp_shards) == (4, 8)
    assert partition_of(layout, num_rows=16, num_microbatches=4) == partition
    with_experts = replace(layout, experts=(((ExpertReplica(0, 1.0),),), (), (), ()))
    with pytest.raises(ValueError, match="pipelines share experts"):
        partition_of(with_experts, num_rows=8, num_microbatches=4)


def test_a_rank_may_have_shards_of_one_kind_only() -> None:
    cell = StageShard(
        first_layer=0,
        end_layer=1,
        attention=(ShardRun(5, 0, 1), ShardRun(2, 1, 4)),
        mlp=(ShardRun(9, 0, 2), ShardRun(2, 2, 4)),
    )
    pipeline = Pipeline(cells=(cell,), micro_batches=(1, 1))
    layout = layout_of(Partition(pipelines=(pipeline,)), ((),), generation=1)
    (stage,) = layout.pipelines[0].stages
    assert set(stage.attention) == {ShardRun(5, 0, 1), ShardRun(9, 1, 1), ShardRun(2, 1, 4)}
    assert set(stage.mlp) == {ShardRun(5, 0, 0), ShardRun(9, 0, 2), ShardRun(2, 2, 4)}
    with pytest.raises(ValueError, match=r"ranks \[9\]"):
        partition_of(layout, num_rows=2, num_microbatches=2)
    crossed = replace(cell, mlp=(ShardRun(2, 0, 2), ShardRun(5, 2, 4)))
    with pytest.raises(ValueError, match="two orders"):
        layout_of(Partition(pipelines=(replace(pipeline, cells=(crossed,)),)), ((),), generation=1)


def test_pipelines_of_several_expert_groups_have_no_layout() -> None:
    even = even_partition(MODEL, data=2, stages=1, tensor=1, rows=8, micro_batches=4)
    apart = [replace(pipeline, expert_group=at) for at, pipeline in enumerate(even.pipelines)]
    experts = (((ExpertReplica(0, 1.0),),),) * len(MODEL.layers)
    with pytest.raises(ValueError, match="in several groups"):
        layout_of(Partition(pipelines=tuple(apart)), experts, generation=1)
