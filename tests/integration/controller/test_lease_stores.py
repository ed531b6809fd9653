"""etcd and Kubernetes swap a record the same way; two keepers on either agree on one leader."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import pytest

from pacekeeper.controller.ha.backends import open_lease_store
from pacekeeper.controller.ha.http_client import AwayError, exchange
from pacekeeper.controller.ha.lease import ElectionMember, Record, Timing
from pacekeeper.controller.ha.lease_renewer import LeaseRenewer, LeaseStore
from pacekeeper.core.config.controller import LeaseConfig
from pacekeeper.core.errors import ConfigError
from support.controllers import until
from support.etcd import Etcd
from support.fake_kubernetes import FakeKubernetes

RECORD = Record(term=1, holder="a", life="x", address="h:1", duration_s=5.0, copies=("c",))
FAST = Timing(duration_s=1.0, renew_s=0.2, margin_s=0.2)
STEADY = Timing(duration_s=3.0, renew_s=0.2, margin_s=0.2)  # a busy host loses no term


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as process:
        yield process


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes(tmp_path)
    yield server
    server.close()


def of_kubernetes(server: FakeKubernetes, name: str = "controller") -> LeaseConfig:
    said = dict(line.split(" = ") for line in server.settings.splitlines())
    told = {key: value.strip('"') for key, value in said.items()}
    return LeaseConfig(
        url=f"k8s://pacekeeper/{name}",
        api=told["api"],
        ca=told["ca"],
        token_file=told["token_file"],
    )


@pytest.fixture(params=["etcd", "k8s"])
def config(request: pytest.FixtureRequest) -> LeaseConfig:
    if request.param == "k8s":
        return of_kubernetes(request.getfixturevalue("kubernetes"))
    etcd: Etcd = request.getfixturevalue("etcd")
    return LeaseConfig(url=f"{etcd.url}/{request.node.name}")


def test_one_of_two_writes_from_one_version_is_done(config: LeaseConfig) -> None:
    one, other = open_lease_store(config), open_lease_store(config)
    assert one.read() == (None, "")
    first = one.write(RECORD, "")
    assert first and other.write(replace(RECORD, holder="b"), "") == "", "it is there by now"
    assert one.read() == other.read() == (RECORD, first)
    second = other.write(replace(RECORD, renewals=1), first)
    assert second not in ("", first)
    assert one.read() == (replace(RECORD, renewals=1), second)
    # What was read before the last write is not written from.
    third = one.write(replace(RECORD, renewals=2), second)
    assert _refused(other, replace(RECORD, holder="b"), second)
    assert one.read() == (replace(RECORD, renewals=2), third)


def _refused(store: LeaseStore, record: Record, expected: str) -> bool:
    return store.write(record, expected) == ""


def test_of_two_keepers_one_leads_and_the_other_follows_when_it_leaves(
    config: LeaseConfig,
) -> None:
    keepers = [
        LeaseRenewer(
            ElectionMember(name=name, life=f"{name}1", address=f"{name}:1", timing=STEADY),
            open_lease_store(config),
        )
        for name in ("a", "b")
    ]
    for keeper in keepers:
        keeper.start()
        keeper.set_eligible("")
    try:
        until("one leads", lambda: any(keeper.term() for keeper in keepers))
        leader = next(keeper for keeper in keepers if keeper.term())
        (other,) = [keeper for keeper in keepers if keeper is not leader]
        assert leader.term() == 1 and other.term() is None
        leader.close()
        assert leader.term() is None
        until("the other one leads", other.term)
        assert other.term() == 2
    finally:
        for keeper in keepers:
            keeper.close()
    assert "lease" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    "failure", [HTTPException("no HTTP at all"), KeyError("a mistake of ours")], ids=str
)
def test_a_store_that_fails_in_any_way_is_asked_again(failure: Exception) -> None:
    """A thread that ended of it would leave a controller that never leads again."""

    class Failing:
        def __init__(self) -> None:
            self.record: Record | None = None
            self.left = 2

        def read(self) -> tuple[Record | None, str]:
            self.left -= 1
            if self.left >= 0:
                raise failure
            return self.record, "1" if self.record else ""

        def write(self, record: Record, expected: str) -> str:
            self.record = record
            return "1"

    keeper = LeaseRenewer(
        ElectionMember(name="a", life="a1", address="a:1", timing=FAST), Failing()
    )
    keeper.start()
    keeper.set_eligible("")
    try:
        until("it leads", keeper.term)
    finally:
        keeper.close()


def test_an_answer_that_is_no_http_is_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AwayError):
            exchange("GET", f"http://127.0.0.1:{server.getsockname()[1]}/", None, timeout_s=5.0)
        thread.join()


def test_a_lease_of_another_program_is_left_alone(kubernetes: FakeKubernetes) -> None:
    theirs = {"metadata": {"name": "controller"}, "spec": {"holderIdentity": "scheduler"}}
    kubernetes.put("pacekeeper/controller", theirs)
    with pytest.raises(AwayError, match="held by scheduler"):
        open_lease_store(of_kubernetes(kubernetes)).read()


def test_people_see_who_leads_and_their_labels_stay(kubernetes: FakeKubernetes) -> None:
    store = open_lease_store(of_kubernetes(kubernetes))
    version = store.write(RECORD, "")
    kept = kubernetes.objects["pacekeeper/controller"]
    kept["metadata"]["labels"] = {"team": "x"}
    assert store.read() == (RECORD, version)
    assert store.write(replace(RECORD, term=7), version)
    kept = kubernetes.objects["pacekeeper/controller"]
    assert kept["metadata"]["labels"] == {"team": "x"}
    assert kept["spec"]["holderIdentity"] == "a"
    assert (kept["spec"]["leaseTransitions"], kept["spec"]["leaseDurationSeconds"]) == (7, 5)


def test_a_token_of_no_use_is_said(kubernetes: FakeKubernetes) -> None:
    kubernetes.token_file.write_text("another")
    with pytest.raises(AwayError, match="HTTP 401: Unauthorized"):
        open_lease_store(of_kubernetes(kubernetes)).read()
    kubernetes.token_file.unlink()
    with pytest.raises(AwayError, match="No such file"):
        open_lease_store(of_kubernetes(kubernetes)).read()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://127.0.0.1/key", "expected HOST:PORT"),
        ("etcd://127.0.0.1:2379", "names no key"),
        ("etcd://10.0.0.1:2379/key", "not encrypted"),
        ("k8s://pacekeeper", "a namespace and a Lease"),
        ("k8s://pacekeeper/UPPER", "a namespace and a Lease"),
    ],
)
def test_a_url_of_no_use_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_lease_store(LeaseConfig(url=url))
