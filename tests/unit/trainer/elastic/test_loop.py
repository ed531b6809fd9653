"""How the loop forms a group: which client of a store it waits with."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.agreement.consensus import Agreement
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, host_store
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.groups.group import PeerLost

if TYPE_CHECKING:
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker


def test_after_a_lost_group_another_client_waits() -> None:
    """A thread that was left may still wait with the first one, which answers nobody else then."""
    server, used = host_store("127.0.0.1", 0), list[Any]()
    stores = Stores((f"127.0.0.1:{server.port}",))
    agreement = Agreement(
        stores=stores, rank=0, node_of={0: 0, 1: 0}, timeout_s=9.0, known_dead=frozenset
    )
    spec = RankSpec(
        config=EngineConfig(steps=1),
        rank=0,
        world_size=2,
        node_of=agreement.node_of,
        stores=stores.addresses,
        ring_dir="",
        run_dir="",
    )

    def form(store: Any, *_: Any) -> None:
        used.append(store)
        if len(used) < 3:
            raise PeerLost("a member is dead")

    layout = SimpleNamespace(ranks=(0, 1))
    rank = SimpleNamespace(spec=spec, group=Group.first(1, (0, 1)), layout=layout, form=form)
    for _ in range(2):
        with pytest.raises(PeerLost):
            loop._form(cast("EngineWorker", rank), stores, agreement)
    loop._form(cast("EngineWorker", rank), stores, agreement)
    loop._form(cast("EngineWorker", rank), stores, agreement)
    assert used[0] is not used[1] is not used[2] is used[3] and not stores.gone
