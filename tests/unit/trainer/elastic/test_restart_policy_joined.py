"""Restarts of a job: between two runs, and where nodes have joined."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.elastic import restart_policy
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, connect_store, host_store
from pacekeeper.trainer.elastic.agreement.messages import (
    ADMISSION_KEY,
    JOB_KEY,
    Candidate,
    ConsensusDecision,
    JobFacts,
    decode_admission,
)
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.joining import admission, node_join
from pacekeeper.trainer.elastic.joining.node_join import JoinSpec, join
from pacekeeper.trainer.elastic.launch_spec import NodeSpec, RankSpec
from pacekeeper.trainer.elastic.launcher import STOP_SIGNALS, Supervisor
from pacekeeper.trainer.elastic.rendezvous import SESSION_KEY, Place, Session
from pacekeeper.trainer.elastic.restart_policy import ENDED_KEY, NEXT_KEY, JoinedNodeHooks, Restarts

if TYPE_CHECKING:
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker


PATIENCE_S = 60.0
CONFIG = EngineConfig(job="test", max_restarts=1)


@dataclass(kw_only=True)
class Ended:
    """What is left of a launcher's work."""

    stores: Stores
    run_id: int = 7
    stop_asked_s: float = 0.0
    is_waiting: bool = False


SESSION = Session(run_id=7, device="cpu", places=(Place(address="127.0.0.1:1", nonce=1),))
RUN = SESSION.key(UNSIGNED)


class Node0:
    """The only node that began a job; nodes 1 and 2 joined it."""

    def __init__(self) -> None:
        self.servers = [host_store("127.0.0.1", 0) for _ in range(3)]
        self.addresses = tuple(f"127.0.0.1:{server.port}" for server in self.servers)
        spec = NodeSpec(
            config=CONFIG, node_rank=0, num_nodes=1, ranks_per_node=1, ring_dir="", run_dir="",
            rendezvous=self.addresses[0],
        )  # fmt: skip
        self.restarts = Restarts(spec=spec)
        self.ended = Ended(stores=Stores(self.addresses[:1], key=RUN))
        self.facts = JobFacts(
            run_id=7, first_run_id=0, generation=3, config=CONFIG, world_size=1, data_crc=11,
            addresses=self.addresses, node_of={0: 0, 1: 1, 2: 2}, members=(0, 2),
        )  # fmt: skip

    def say(self, node: int, facts: JobFacts) -> None:
        connect_store(self.addresses[node]).set(SESSION_KEY, SESSION.encode())
        connect_store(self.addresses[node], key=RUN).set(JOB_KEY, facts.encode())

    def end(self) -> None:
        self.restarts.end(self.ended, ExitCode.INTERNAL)


@pytest.fixture
def node0(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node0]:
    monkeypatch.setattr(restart_policy, "back_off_s", lambda number: 0.0)
    monkeypatch.setattr(restart_policy, "_LOOK_PERIOD_S", 0.05)
    monkeypatch.setattr(restart_policy, "_POLL_S", 0.01)
    yield Node0()


def test_between_two_lives_a_signal_is_not_lost_on_the_one_that_ended(
    node0: Node0, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that meets the others again, for up to a minute, ends as it did the first time."""
    numbers = STOP_SIGNALS
    usual = [signal.getsignal(number) for number in numbers]
    lives: list[int] = []

    def supervise(spec: NodeSpec, body: object, restarts: Restarts) -> ExitCode:
        lives.append(restarts.number)
        assert [signal.getsignal(number) for number in numbers] == usual
        for number in numbers:
            signal.signal(number, lambda *_: None)  # as a life that begins
        restarts.is_wanted = len(lives) == 1
        return ExitCode.INTERNAL

    monkeypatch.setattr(restart_policy, "supervise", supervise)
    try:
        assert restart_policy.supervise_with_restarts(node0.restarts.spec) is ExitCode.INTERNAL
    finally:
        for number, handler in zip(numbers, usual, strict=True):
            signal.signal(number, handler)
    assert lives == [0, 1]


def test_a_wish_to_end_that_comes_when_the_next_life_is_decided_is_heard(
    node0: Node0, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the last one's connections are closed: its launcher has listened for the last time."""
    lives: list[int] = []

    def supervise(spec: NodeSpec, body: object, restarts: Restarts) -> ExitCode:
        lives.append(restarts.number)
        restarts.end(node0.ended, ExitCode.INTERNAL)
        assert restarts.is_wanted or len(lives) > 1
        node0.ended.stop_asked_s = 1.0
        return ExitCode.INTERNAL

    monkeypatch.setattr(restart_policy, "supervise", supervise)
    assert restart_policy.supervise_with_restarts(node0.restarts.spec) is ExitCode.INTERNAL
    assert lives == [0]


def test_a_node_that_joined_is_waited_for_and_its_end_starts_everything_again(
    node0: Node0, caplog: pytest.LogCaptureFixture
) -> None:
    node0.say(0, node0.facts)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(node0.end)
        try:
            await_text(caplog, "nodes [2] train on")
            there = Ended(stores=Stores(node0.addresses, key=RUN))
            JoinedNodeHooks(node=2, first_run_id=0, is_told=True).end(there, ExitCode.INTERNAL)
            waiting.result(PATIENCE_S)
        finally:
            node0.ended.stop_asked_s = 1.0
    assert node0.restarts.is_wanted
    assert "the launchers of nodes" not in caplog.text, "node 1 went long ago, and is not missed"


def test_without_the_launcher_of_one_that_joined_nothing_is_started(
    node0: Node0, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ranks may train on, out of sight."""
    node0.say(0, node0.facts)
    del node0.servers[2]
    node0.end()
    assert not node0.restarts.is_wanted
    assert "the launchers of nodes [2] are gone" in caplog.text


def test_a_node_without_ranks_learns_who_joined_since_and_leads_newcomers_there(
    node0: Node0, caplog: pytest.LogCaptureFixture
) -> None:
    node0.say(0, replace(node0.facts, generation=2, members=(0, 1)))
    node0.say(1, replace(node0.facts, generation=4, members=(1, 2)))
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(node0.end)
        try:
            await_text(caplog, "nodes [1, 2] train on")
            read = Stores(node0.addresses, key=RUN)
            give_up_s = time.monotonic() + PATIENCE_S
            while JobFacts.decode(read.read(0, JOB_KEY) or "").generation != 4:
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
        finally:
            node0.ended.stop_asked_s = 1.0
        waiting.result(PATIENCE_S)
    assert node_join.find_job(node0.addresses[:1])[0].leader_node == 1


def test_without_a_node_that_was_left_behind_the_others_start_again_where_the_lowest_was(
    node0: Node0, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one is lost with the rendezvous; the others had gone on without it."""
    spec = replace(node0.restarts.spec, num_nodes=3)
    facts = replace(node0.facts, members=(1, 2))
    del node0.servers[0]
    both = [Restarts(spec=replace(spec, node_rank=node)) for node in (1, 2)]
    for node in (1, 2):
        node0.say(node, facts)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(one.end, Ended(stores=Stores(node0.addresses, key=RUN)), ExitCode.INTERNAL)
            for one in both
        ]
        for end in ends:
            end.result(PATIENCE_S)
    for place, one in enumerate(both):
        assert one.is_wanted
        assert (one.spec.num_nodes, one.spec.node_rank) == (2, place)
        assert one.spec.rendezvous == node0.addresses[1]
    assert "nodes [0] are left behind" in caplog.text


def test_where_nothing_was_saved_a_restart_says_that_it_begins_anew(
    node0: Node0, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, said in (("", "the job saves no"), (str(tmp_path / "kept"), "no checkpoint is in")):
        config = replace(CONFIG, checkpoint_dir=folder)
        restarts = Restarts(spec=replace(node0.restarts.spec, config=config))
        restarts.end(Ended(stores=Stores(node0.addresses[:1], key=RUN)), ExitCode.INTERNAL)
        assert restarts.is_wanted and f"restart 1 of 1 in 0 s, from step 0: {said}" in caplog.text
        node0.servers[0] = host_store("127.0.0.1", 0)
        node0.addresses = (f"127.0.0.1:{node0.servers[0].port}",)


def test_too_few_launchers_start_nothing_again(
    node0: Node0, caplog: pytest.LogCaptureFixture
) -> None:
    """The others ended, too, and may have started again without this one."""
    node0.restarts = Restarts(spec=replace(node0.restarts.spec, num_nodes=3))
    node0.ended = Ended(stores=Stores(node0.addresses, key=RUN))
    node0.say(0, replace(node0.facts, members=(0, 1, 2)))
    for node in (1, 2):
        node0.ended.stores.append(0, ENDED_KEY, f"{node}@1,")
    del node0.servers[1:]
    node0.end()
    assert not node0.restarts.is_wanted
    assert "the launchers of nodes [1, 2] are gone: too few to start again" in caplog.text


def test_what_the_lowest_launcher_decided_holds_for_all(node0: Node0) -> None:
    """Though it has gone on since, and looks as if it were gone."""
    spec = replace(node0.restarts.spec, num_nodes=3, node_rank=2)
    node0.restarts = Restarts(spec=spec)
    node0.ended = Ended(stores=Stores(node0.addresses, key=RUN))
    node0.say(2, replace(node0.facts, members=(0, 1, 2)))
    for node in (0, 1):
        node0.ended.stores.append(2, ENDED_KEY, f"{node}@1,")
    node0.ended.stores.write(2, NEXT_KEY, "0,2")
    del node0.servers[:2]
    node0.end()
    assert node0.restarts.is_wanted
    place = node0.restarts.spec
    assert (place.num_nodes, place.node_rank) == (2, 1)
    assert place.rendezvous == spec.rendezvous


def await_text(caplog: pytest.LogCaptureFixture, text: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while text not in caplog.text:
        assert time.monotonic() < give_up_s, caplog.text
        time.sleep(0.01)


def test_who_was_never_let_in_has_no_end_to_tell(node0: Node0) -> None:
    for is_told, is_waiting in ((True, True), (False, False)):
        there = Ended(stores=Stores(node0.addresses, key=RUN), is_waiting=is_waiting)
        JoinedNodeHooks(node=2, first_run_id=0, is_told=is_told).end(there, ExitCode.INTERNAL)
    assert Stores(node0.addresses, key=RUN).read(0, ENDED_KEY) is None


def test_a_newcomer_knows_in_which_life_the_job_began(
    node0: Node0, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go back to what the lives since then have saved, as the others may."""
    node0.say(0, replace(node0.facts, first_run_id=5))
    seen: list[JoinedNodeHooks] = []

    def run(supervisor: Supervisor, restarts: JoinedNodeHooks) -> ExitCode:
        seen.append(restarts)
        return ExitCode.OK

    monkeypatch.setattr(node_join, "run_ranks", run)
    spec = JoinSpec(
        addresses=node0.addresses[:1], ranks_per_node=1, ring_dir=str(tmp_path / "rings")
    )
    assert join(spec) is ExitCode.OK
    assert seen == [JoinedNodeHooks(node=3, first_run_id=5, is_told=True)]


def member(address: str, config: EngineConfig) -> "EngineWorker":
    """What the door needs of the only rank of a job that another is about to join."""
    spec = RankSpec(
        config=config, rank=0, world_size=1, node_of={0: 0}, stores=(address,), ring_dir="",
        run_dir="", run_id=7, first_run_id=5,
    )  # fmt: skip
    rank = SimpleNamespace(
        spec=spec,
        group=Group.first(1, (0,)),
        join_queue=object(),
        data_crc=11,
    )
    return cast("EngineWorker", rank)


def test_what_members_say_of_the_job_is_enough_to_do_as_they_do(node0: Node0) -> None:
    config = replace(
        CONFIG,
        checkpoint_dir="kept",
        resume="../old/0000000000001-g0001-step00000002",
        model="model",
        data=("a.bin", "/data/b.bin"),
    )
    rank, stores = member(node0.addresses[0], config), Stores(node0.addresses[:1], key=RUN)
    admission.publish_job_facts(rank, stores)
    facts = JobFacts.decode(stores.read(0, JOB_KEY) or "")
    assert (facts.run_id, facts.first_run_id, facts.generation, facts.data_crc) == (7, 5, 1, 11)
    assert facts.members == (0,)
    assert facts.config.checkpoint_dir == os.path.abspath("kept"), (
        "a launcher has its own directory"
    )
    assert facts.config.resume == os.path.abspath(config.resume)
    assert isinstance(facts.config, EngineConfig)
    assert facts.config.model == os.path.abspath("model")
    assert facts.config.data == (os.path.abspath("a.bin"), "/data/b.bin")
    far = replace(CONFIG, checkpoint_dir="s3://kept", model="/data/model")
    admission.publish_job_facts(member(node0.addresses[0], far), stores)
    assert JobFacts.decode(stores.read(0, JOB_KEY) or "").config == far


def test_who_is_about_to_come_in_counts_before_the_group_stands(node0: Node0) -> None:
    """Its ranks may be all that is left of the job, if the others die in the next moment."""
    rank, stores = member(node0.addresses[0], CONFIG), Stores(node0.addresses[:1], key=RUN)
    layout = even_layout(ranks=(0, 1), num_layers=1, num_experts=2, replicas=2, generation=2)
    verdict = ConsensusDecision(
        group=rank.group.followed_by(2, (0, 1), "x"), layout=layout, restore=(), base=layout,
        commits=frozenset(), last_loss=1.0, was_applied=True, ticket=1, step=1, text="x",
        newcomers=(Candidate(node=1, address=node0.addresses[1], ranks=(1,)),),
    )  # fmt: skip
    admission.admit(rank, stores, verdict)
    facts = JobFacts.decode(stores.read(0, JOB_KEY) or "")
    assert (facts.generation, facts.members, facts.node_of) == (2, (0, 1), {0: 0, 1: 1})
    _, _, told = decode_admission(Stores(node0.addresses, key=RUN).read(1, ADMISSION_KEY) or "")
    assert told == facts
