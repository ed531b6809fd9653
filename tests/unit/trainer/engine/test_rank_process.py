"""A rank's place comes from torchrun's variables, its device from what the node has."""

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.engine.launcher import EngineNode
from pacekeeper.trainer.engine.rank_process import (
    RankPlace,
    RunFolders,
    choose_device,
    is_a_rank,
    place_from,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def test_the_place_is_torchruns() -> None:
    assert is_a_rank(TORCHRUN) and not is_a_rank({"MASTER_ADDR": "a"})
    place = RankPlace(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert place_from(TORCHRUN) == place


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"RANK": "x"}, {"WORLD_SIZE": ""}])
def test_a_wrong_place_is_rejected(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        place_from(TORCHRUN | change)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        place_from({key: value for key, value in TORCHRUN.items() if key != name})


def test_devices() -> None:
    assert choose_device("auto", 0, 4) == choose_device("cpu", 8, 4) == "cpu"
    assert choose_device("auto", 4, 4) == choose_device("cuda", 8, 4) == "cuda"
    with pytest.raises(HostError, match="no CUDA device"):
        choose_device("cuda", 0, 1)
    with pytest.raises(HostError, match="2 CUDA devices"):
        choose_device("auto", 2, 3)


def node(**changes: object) -> EngineNode:
    values = {"node_rank": 1, "num_nodes": 2, "ranks_per_node": 4, "rendezvous": "10.0.0.1:29400"}
    folders = RunFolders(ring_dir="r", run_dir="d")
    return EngineNode(config=EngineConfig(), folders=folders, **values | changes)  # type: ignore[arg-type]


def test_a_node_gives_its_ranks_what_torchrun_would() -> None:
    found = node().environment(2)
    assert place_from(found) == RankPlace(rank=6, world_size=8, local_rank=2, local_world_size=4)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29400")


@pytest.mark.parametrize(
    "change",
    [
        {"node_rank": 2},
        {"num_nodes": 0},
        {"ranks_per_node": 0},
        {"ranks_per_node": 100_000},
        {"rendezvous": "nowhere"},
    ],
)
def test_a_node_out_of_the_job_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        node(**change)
