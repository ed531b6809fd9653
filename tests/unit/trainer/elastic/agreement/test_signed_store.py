"""Stores whose values are signed: what strangers write there, and what torch does with them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pacekeeper.core.errors import DeniedError
from pacekeeper.trainer.elastic.agreement.consensus import Agreement
from pacekeeper.trainer.elastic.agreement.job_key import JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, connect_store, host_store, notice
from pacekeeper.trainer.elastic.agreement.messages import Report
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.former import make_former
from pacekeeper.trainer.groups.waiting import WaitLimits

KEY = JobKey(b"a secret of a job").of_session("run 2")
OTHER = JobKey(b"a secret of a job").of_session("run 1")
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def server() -> Iterator[Any]:
    """A store as torch has it: also what any process that reaches it may do."""
    yield host_store("127.0.0.1", 0)


def address_of(server: TCPStore) -> str:
    return f"127.0.0.1:{server.port}"


def test_members_read_what_members_wrote(server: TCPStore) -> None:
    one = connect_store(address_of(server), key=KEY)
    other = connect_store(address_of(server), key=KEY, prefix="")
    one.set("a", b"\xff")
    one.append("b", "1,")
    other.append("b", "2,")
    assert (other.get("a"), one.get("b")) == (b"\xff", b"1,2,")
    assert one.compare_set("c", "", "mine") == other.compare_set("c", "", "yours") == b"mine"
    assert one.check(["a", "b", "c"]) and not one.check(["a", "d"])
    assert one.delete_key("a") and not other.check(["a"])
    assert (one.add("n", 1), other.add("n", 2)) == (1, 3)


def test_names_of_a_prefix_are_apart(server: TCPStore) -> None:
    plain, below = (connect_store(address_of(server), key=KEY, prefix=p) for p in ("", "x"))
    below.set("a", "1")
    assert plain.get("x/a") == b"1" and not plain.check(["a"])
    below.unsigned.set("b", "2")
    assert PrefixStore("x", server).get("b") == b"2"


@pytest.mark.parametrize("forge", ["plain", "another key", "earlier run", "garbage added", "empty"])
def test_a_forged_value_is_an_error_and_its_node_is_not_gone(server: Any, forge: str) -> None:
    mine = connect_store(address_of(server), key=KEY)
    mine.append("deaths", notice(0, "first"))
    match forge:
        case "plain":
            server.set("deaths", notice(1, "first"))
        case "another key":
            mine.set("finished", notice(1, "first"))
            server.set("deaths", server.get("finished"))
        case "earlier run":
            connect_store(address_of(server), key=OTHER).append("deaths", notice(1, "first"))
        case "garbage added":
            server.append("deaths", notice(1, "first"))
        case "empty":
            server.set("deaths", "")
    stores = Stores((address_of(server),), key=KEY)
    for read in (stores.read, stores.try_get):
        with pytest.raises(DeniedError, match="'deaths' is not signed"):
            read(0, "deaths")
    assert not stores.gone
    stores.close()


@pytest.mark.parametrize("forged", ["report/first/1", "verdict/first"])
def test_no_survivor_follows_a_forged_vote(server: Any, forged: str) -> None:
    stores = Stores((address_of(server),), key=KEY)
    agreement = Agreement(
        stores=stores, rank=0, node_of={0: 0, 1: 0}, timeout_s=60.0, known_dead=frozenset
    )
    report = Report(
        progress=Progress(ticket=3, phase=Phase.VOTE), newest_generation=1, last_loss=1.0
    )
    server.set(forged, report.encode())
    with pytest.raises(DeniedError, match=forged):
        agreement.reach(
            group=Group.first(1, (0, 1)), report=report, next_layout=lambda *_: pytest.fail()
        )
    stores.close()


def test_groups_of_torch_meet_in_it(server: TCPStore) -> None:
    def form(rank: int) -> float:
        store = SignedStore(TCPStore("127.0.0.1", server.port, is_master=False), KEY)
        limits = WaitLimits(tick_s=0.05, timeout_s=60.0)
        members = Members(store, "g", rank, (0, 1, 2), is_aborted=lambda: False, limits=limits)
        del store
        formed = make_former(torch.device("cpu")).form(members)
        total = torch.tensor([float(rank)])
        formed.groups.exchange.all_reduce(total).wait()
        formed.abort()
        return float(total)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(form, range(3))) == [3.0] * 3


def test_an_address_of_a_stranger_is_not_called(server: Any) -> None:
    """Else it would be sent what the members compute."""
    store = connect_store(address_of(server), key=KEY)
    connect_store(address_of(server), key=OTHER).set("0/1", "127.0.0.1:1")
    with pytest.raises(DeniedError, match="'0/1' is not signed"):
        dist.ProcessGroupGloo(store, 0, 2, timeout=PATIENCE)
