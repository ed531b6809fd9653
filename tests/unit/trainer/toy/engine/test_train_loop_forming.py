"""How the loop forms a group: what leaving it must not take along."""

from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.distributed.interruptible_gloo import open_sockets
from pacekeeper.trainer.distributed.kv_store import Stores, host_store
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.agreement.consensus import Agreement
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.toy.engine import worker
from pacekeeper.trainer.toy.engine.worker import Rank


def test_connections_to_stores_are_no_part_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is first asked while a group forms outlives the leaving of it."""
    server, formed = host_store("127.0.0.1", 0), dict[str, Any]()
    stores = Stores((f"127.0.0.1:{server.port}",))
    agreement = Agreement(
        stores=stores, rank=0, node_of={0: 0, 1: 0}, timeout_s=9.0, known_dead=frozenset
    )
    spec = RankSpec(
        config=TrainConfig(steps=1),
        rank=0,
        world_size=2,
        node_of=agreement.node_of,
        stores=stores.addresses,
        ring_dir="",
        run_dir="",
    )
    rank = Rank.__new__(Rank)
    rank.spec, rank.group = spec, Group.first(1, (0, 1))
    rank.layout = SimpleNamespace(ranks=(0, 1))  # type: ignore[assignment]
    rank.transfers = None

    def fabric(**given: Any) -> SimpleNamespace:
        before = open_sockets()
        stores.read(0, "key")
        formed.update(given, wires=open_sockets() - before)
        return SimpleNamespace()

    monkeypatch.setattr(worker, "InterruptibleProcessGroup", fabric)
    loop._form(rank, stores, agreement)
    told = [wire for wire in formed["wires"] if formed["is_strange"](wire)]
    assert told, "the question was the first to that store"
