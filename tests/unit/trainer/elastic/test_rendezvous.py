"""Launchers meet only with those that would train the same, each in a place of its own."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, DeniedError, UnreachableError
from pacekeeper.trainer.elastic import rendezvous
from pacekeeper.trainer.elastic.agreement import kv_store
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import connect_store, host_store
from pacekeeper.trainer.elastic.launch_spec import NodeSpec
from pacekeeper.trainer.elastic.rendezvous import (
    SESSION_KEY,
    Place,
    Session,
    Terms,
    meet,
    newest_run_id,
)

KEY = JobKey(b"the secret of a job")
TERMS: Terms = {"job": "a", "seed": 1, "num-nodes": 2}
HOST = """
import time
from pacekeeper.trainer.elastic.agreement.kv_store import host_store
server = host_store("127.0.0.1", 0)
print(server.port, flush=True)
time.sleep(600.0)
"""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a store that node 0 hosts; nobody waits long in it."""
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 60.0)
    server = host_store("127.0.0.1", 0)
    yield f"127.0.0.1:{server.port}"
    del server


def come(
    address: str,
    node_rank: int,
    terms: Terms = TERMS,
    own: str | None = None,
    after_run_id: int = 0,
    key: JobKey = KEY,
) -> Session:
    return meet(
        address,
        node_rank=node_rank,
        num_nodes=2,
        own=own or f"127.0.0.{node_rank + 1}:5",
        device="cpu",
        terms=terms,
        after_run_id=after_run_id,
        key=key,
    )


def test_launchers_on_the_same_terms_know_each_other_and_the_life(address: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first: Future[Session] = pool.submit(come, address, 0)
        second = come(address, 1)
        assert first.result() == second
    assert second.addresses == ("127.0.0.1:5", "127.0.0.2:5")
    assert second.run_id > 0


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (dict(TERMS, job="b"), "job 'a' meets at .*, not 'b'; each job needs a --rendezvous"),
        (dict(TERMS, seed=2), "seed: node 0 has 1, this node 2; all launchers"),
        (dict(TERMS, extra=3), "extra: node 0 has None, this node 3"),
        ({"job": "a", "num-nodes": 2}, "seed: node 0 has 1, this node None"),
    ],
)
def test_who_would_train_something_else_is_refused_and_takes_no_place(
    address: str, terms: Terms, message: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first: Future[Session] = pool.submit(come, address, 0)
        with pytest.raises(ConfigError, match=message):
            come(address, 1, terms)
        assert not connect_store(address).check(["store/1"])
        come(address, 1)
        first.result()


def test_a_second_launcher_does_not_take_the_place_of_the_first(address: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first: Future[Session] = pool.submit(come, address, 0)
        met = come(address, 1)
        with pytest.raises(ConfigError, match=r"node-rank 1: taken by .* 127\.0\.0\.2:5"):
            come(address, 1, own="127.0.0.9:9")
        assert first.result() == met
        assert b"127.0.0.2:5" in connect_store(address, key=KEY).get("store/1")


@pytest.mark.parametrize("wrong", [JobKey(b"the secret of another"), UNSIGNED])
def test_who_has_another_secret_or_none_is_refused_and_takes_no_place(
    address: str, wrong: JobKey
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first: Future[Session] = pool.submit(come, address, 0)
        with pytest.raises(DeniedError, match=r"'terms' is not signed .* the same --secret-file"):
            come(address, 1, key=wrong)
        assert not connect_store(address).check(["store/1"])
        assert come(address, 1) == first.result()


def test_each_run_has_a_key_of_its_own(address: str) -> None:
    session = Session(run_id=5, device="cpu", places=(Place(address="h:1", nonce=1),))
    others = [replace(session, run_id=6), replace(session, places=(Place(address="h:1", nonce=2),))]
    keys = [one.key(KEY) for one in (session, *others)] + [session.key(UNSIGNED), KEY]
    assert len({key.secret for key in keys}) == len(keys)


def test_what_node_0_said_in_an_earlier_run_is_not_followed(address: str) -> None:
    """A stranger that recorded it writes it again, in a store of its own or in node 0's."""
    with ThreadPoolExecutor(1) as pool:
        first: Future[Session] = pool.submit(come, address, 0)
        come(address, 1)
        first.result()
    recorder: Any = TCPStore("127.0.0.1", int(address.rpartition(":")[2]), is_master=False)
    replayed: Any = host_store("127.0.0.1", 0)
    for name in ("terms", "store/0", SESSION_KEY):
        replayed.set(name, recorder.get(name))
    with pytest.raises(DeniedError, match="of another run: this node is not in it"):
        come(f"127.0.0.1:{replayed.port}", 1)


def test_where_no_job_is_nobody_is_waited_for_for_ever(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 0.2)
    with pytest.raises(UnreachableError, match=r"nodes \[0\] did not come"):
        come(address, 1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_first_node_that_leaves_or_freezes_while_it_waits_for_others_is_said(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "ANSWER_TIMEOUT_S", 2.0)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    address = f"127.0.0.1:{int(host.stdout.readline())}"
    connect_store(address, key=KEY).set("terms", json.dumps(dict(TERMS)))
    with ThreadPoolExecutor(1) as pool:
        try:
            second: Future[Session] = pool.submit(come, address, 1)
            place = connect_store(address)
            while not place.check(["store/1"]):
                assert not second.done()
            host.send_signal(end)
            with pytest.raises(
                UnreachableError, match=r"node 0 left the rendezvous .*, or is froz"
            ):
                second.result(60.0)
        finally:
            host.kill()
            host.wait()


def test_a_life_comes_after_all_that_have_saved_whatever_the_clock_says(
    tmp_path: Path, address: str
) -> None:
    """A clock that was set back must not make the newest checkpoint the oldest one."""
    config = EngineConfig(job="a", checkpoint_dir=str(tmp_path))
    assert newest_run_id(config) == newest_run_id(EngineConfig(job="a")) == 0
    later = (time.time_ns() // 1_000_000) + 10**9
    for run_id in (5, later):
        (tmp_path / "a" / CheckpointId(run_id=run_id, generation=1, step=4).name).mkdir(
            parents=True
        )
    assert newest_run_id(config) == later
    with ThreadPoolExecutor(1) as pool:
        second: Future[Session] = pool.submit(come, address, 1)
        assert come(address, 0, after_run_id=later).run_id == second.result().run_id == later + 1


def test_the_terms_are_all_that_decides_what_is_trained() -> None:
    def terms(config: EngineConfig, ranks_per_node: int = 2) -> Terms:
        return NodeSpec(
            config=config,
            node_rank=0,
            num_nodes=2,
            ranks_per_node=ranks_per_node,
            rendezvous="127.0.0.1:29400",
            ring_dir="here",
            run_dir="there",
        ).terms

    base = EngineConfig(job="a")
    for elsewhere in (replace(base, device="cpu"), replace(base, model="m", data=("a.bin",))):
        assert terms(elsewhere) == terms(base), "node 0 chooses, and places are those of a node"
    others = [terms(replace(base, seed=1)), terms(replace(base, steps=9)), terms(base, 3)]
    assert all(other != terms(base) for other in others)
