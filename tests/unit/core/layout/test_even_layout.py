"""The layout a job starts with: whole pipelines, on as few nodes as can be."""

import pytest

from pacekeeper.core.layout.even_layout import even_layout, shard_runs
from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.replica_spread import domains_of_ranks


def pipelines(num_ranks: int = 8, nodes: int = 1, **shape: int) -> list[list[tuple[int, ...]]]:
    """[stage][pipeline] -> ranks; ranks of the nodes take turns."""
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=5,
        num_experts=4,
        replicas=2,
        num_virtual_shards=4,
        domain_of={rank: rank % nodes for rank in range(num_ranks)},
        **shape,
    )
    return [[stage.group for stage in of] for of in zip(*layout.mesh, strict=True)]


def test_a_pipeline_is_made_of_ranks_that_follow_each_other() -> None:
    assert pipelines(num_stages=2, tensor_size=2) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def test_a_node_takes_whole_pipelines_with_it() -> None:
    assert pipelines(nodes=2, num_stages=2, tensor_size=2) == [[(0, 2), (1, 3)], [(4, 6), (5, 7)]]


def test_hosts_of_an_expert_run_its_layer_and_stand_on_as_many_nodes_as_can_be() -> None:
    node_of = {rank: rank // 4 for rank in range(8)}
    layout = even_layout(
        ranks=range(8),
        num_layers=5,
        num_experts=4,
        replicas=2,
        num_virtual_shards=4,
        num_stages=2,
        tensor_size=2,
        domain_of=node_of,
    )
    assert layout.spans == (range(0, 3), range(3, 5))
    for layer, experts in enumerate(layout.experts):
        for hosts in experts:
            ranks = {host.rank for host in hosts}
            assert ranks <= set(layout.ranks_of_layer(layer))
            assert len(domains_of_ranks(node_of, ranks)) == 2


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"num_ranks": 6, "num_stages": 2, "tensor_size": 2}, "a multiple of 4 ranks, got 6"),
        ({"num_ranks": 0}, "a multiple of 1 ranks, got 0"),
        ({"num_ranks": 6, "num_stages": 6}, "5 layers do not make 6 stages"),
        ({"num_ranks": 8, "num_stages": 1, "tensor_size": 8}, "4 virtual shards do not make runs"),
        ({"num_ranks": 4, "num_stages": 4}, "2 replicas of an expert need as many ranks, got 1"),
    ],
)
def test_what_makes_no_whole_pipelines_is_refused(shape: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pipelines(**shape)


def test_runs_follow_the_speeds_and_nobody_gets_none() -> None:
    assert shard_runs([3, 1], 8) == (ShardRun(3, 0, 4), ShardRun(1, 4, 8))
    assert shard_runs([3, 1], 8, {1: 0.3}) == (ShardRun(3, 0, 6), ShardRun(1, 6, 8))
    assert shard_runs([3, 1], 4, {1: 0.01}) == (ShardRun(3, 0, 3), ShardRun(1, 3, 4))
