"""How the loop forms a group: what leaving it must not take along."""

from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.distributed.interruptible_gloo import open_sockets
from pacekeeper.trainer.distributed.kv_store import Stores, host_store
from pacekeeper.trainer.elastic.consensus import Agreement
from pacekeeper.trainer.elastic.quorum import Group
from pacekeeper.trainer.toy.engine import train_loop


def test_connections_to_stores_are_no_part_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is first asked while a group forms outlives the leaving of it."""
    server, formed = host_store("127.0.0.1", 0), dict[str, Any]()
    stores = Stores((f"127.0.0.1:{server.port}",))
    agreement = Agreement(
        stores=stores, rank=0, node_of={0: 0, 1: 0}, timeout_s=9.0, known_dead=frozenset
    )
    group = Group.first(1, (0, 1))
    rank: Any = SimpleNamespace(
        spec=SimpleNamespace(rank=0, node_of=agreement.node_of, config=TrainConfig()),
        group=group,
        layout=SimpleNamespace(ranks=(0, 1)),
        join=lambda fabric: None,
    )

    def fabric(**given: Any) -> None:
        before = open_sockets()
        stores.read(0, "key")
        formed.update(given, wires=open_sockets() - before)

    monkeypatch.setattr(train_loop, "InterruptibleProcessGroup", fabric)
    train_loop._join(rank, stores, agreement, group)
    told = [wire for wire in formed["wires"] if formed["is_strange"](wire)]
    assert told, "the question was the first to that store"
