"""A launcher refuses ranks that their devices, or this torch, cannot serve before any starts."""

from pathlib import Path

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.elastic import launcher
from pacekeeper.trainer.elastic.launch_spec import NodeSpec
from support.ports import free_port


@pytest.mark.parametrize(
    ("ranks", "can_be_left", "error"), [(2, True, HostError), (1, False, ConfigError)]
)
def test_ranks_on_cuda_need_a_device_each_and_groups_that_can_be_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    can_be_left: bool,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(launcher, "num_devices", lambda: 1)
    monkeypatch.setattr("pacekeeper.trainer.groups.former.can_reconfigure", lambda _: can_be_left)
    spec = NodeSpec(
        config=EngineConfig(device="cuda", model="model", data=("tokens.bin",)),
        node_rank=0,
        num_nodes=1,
        ranks_per_node=ranks,
        rendezvous=f"127.0.0.1:{free_port()}",
        ring_dir=str(tmp_path / "rings"),
        run_dir=str(tmp_path / "run"),
    )
    with pytest.raises(error):
        launcher.supervise(spec)
    assert not (tmp_path / "rings").exists()
