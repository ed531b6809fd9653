"""A rank's place comes from torchrun's variables, its device from what the node has."""

from typing import Any

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.engine.rank_process import (
    RankPlace,
    is_a_rank,
    place_from,
    run_rank,
)
from pacekeeper.trainer.groups.devices import choose_device

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


@pytest.mark.parametrize("setting", [{"snapshot_period_steps": 1}, {"max_restarts": 1}])
def test_what_needs_our_launcher_is_refused_under_torchrun(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        run_rank(EngineConfig(**setting), "r", "d", "", TORCHRUN)
