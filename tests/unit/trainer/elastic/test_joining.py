"""A node at the door of a job: what it learns, which numbers it takes, when it counts as there."""

import subprocess
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import (
    ConfigError,
    DeniedError,
    ExitCode,
    HostError,
    UnreachableError,
    VersionError,
)
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import (
    DEATHS_KEY,
    STOP_KEY,
    Stores,
    connect_store,
    group_key,
    host_store,
    notice,
)
from pacekeeper.trainer.elastic.agreement.messages import (
    ADMISSION_KEY,
    ASKING_KEY,
    JOB_KEY,
    Candidate,
    JobFacts,
    Report,
    asking_key,
    decode_admission,
    encode_admission,
    encode_asking,
    read_verdict,
    ready_key,
    unknown,
    widened,
    write_verdict,
)
from pacekeeper.trainer.elastic.agreement.quorum import NO_GROUP, Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Ballot, Phase, Progress, Vote
from pacekeeper.trainer.elastic.joining.join_queue import JoinQueue
from pacekeeper.trainer.elastic.joining.node_join import (
    JoinRequest,
    JoinSpec,
    find_job,
    join,
    take_numbers,
)
from pacekeeper.trainer.elastic.launch_spec import NodeSpec, Seat
from pacekeeper.trainer.elastic.launcher import Supervisor
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.elastic.rendezvous import SESSION_KEY, Place, Session

GONE = "127.0.0.1:1"
FACTS = JobFacts(
    run_id=7,
    first_run_id=5,
    generation=3,
    config=EngineConfig(job="test", precision="bfloat16", replicas=3),
    world_size=4,
    addresses=(GONE, "127.0.0.1:2"),
    node_of={0: 0, 1: 0, 2: 1, 3: 1},
    members=(1, 2, 3),
    data_crc=11,
)
TWO = Candidate(node=2, address="127.0.0.1:3", ranks=(4, 5))


def test_what_is_said_of_the_job_comes_through_a_store() -> None:
    assert JobFacts.decode(FACTS.encode()) == FACTS
    assert FACTS.leader_node == 0
    with pytest.raises(VersionError, match="install the same pacekeeper"):
        JobFacts.decode(FACTS.encode().replace('"replicas"', '"copies"'))


def test_an_admission_lets_a_newcomer_know_what_members_know() -> None:
    group = Group.first(1, (0, 1)).followed_by(2, (0, 1), "x").standing().followed_by(3, (1,), "y")
    base = even_layout(ranks=(0, 1), num_layers=1, num_experts=2, replicas=2)
    layout = even_layout(ranks=(0, 1, 4, 5), num_layers=1, num_experts=2, replicas=2, generation=9)
    furthest = Report(
        progress=Progress(ticket=12, phase=Phase.PRE), newest_generation=8, last_loss=2.5, step=11
    )
    text = write_verdict(
        RecoveryPlan(layout=layout), commits={1}, furthest=furthest, newcomers=(TWO,), base=base
    )
    back_group, back_text, facts = decode_admission(encode_admission(group, text, FACTS))
    assert (back_group, back_text, facts) == (group, text, FACTS)
    verdict = read_verdict(back_group, back_text)
    assert verdict == read_verdict(group, text), "the group has one name for all"
    assert (verdict.ticket, verdict.step, verdict.last_loss) == (12, 11, 2.5)
    assert (verdict.newcomers, verdict.base, verdict.layout) == ((TWO,), base, layout)


def test_numbers_that_somebody_had_are_not_let_in() -> None:
    twin = replace(TWO, address="127.0.0.1:9")
    overlapping = Candidate(node=3, address="127.0.0.1:4", ranks=(5, 6))
    third = Candidate(node=4, address="127.0.0.1:5", ranks=(7,))
    assert unknown((TWO, twin, overlapping, third), FACTS.node_of) == (TWO, third)
    assert unknown((TWO,), {9: 2}) == ()
    node_of, stores = widened(FACTS.node_of, FACTS.addresses, (third,))
    assert node_of == {**FACTS.node_of, 7: 4}
    assert stores == (GONE, "127.0.0.1:2", "", "", "127.0.0.1:5")


def test_who_has_not_asked_again_is_not_there() -> None:
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    queue, store = JoinQueue(address), connect_store(address)
    assert queue.poll(store) == ()
    store.set(asking_key(2), encode_asking(TWO, 1))
    store.set(ASKING_KEY, "2,2,")
    assert queue.poll(store) == (), "seen once: it may be of long ago"
    store.set(asking_key(2), encode_asking(TWO, 2))
    assert queue.poll(store) == (TWO,)
    assert queue.poll(store) == ()


def test_what_is_asked_in_other_words_keeps_nobody_else_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    queue, store = JoinQueue(address), connect_store(address)
    store.set(asking_key(2), encode_asking(TWO, 1))
    said = ("?", "[]", '{"node": 4}', encode_asking(TWO, 1).replace("[4, 5]", '["4"]'))
    for node, text in enumerate(said, start=3):
        store.set(asking_key(node), text)
    store.set(ASKING_KEY, "6,5,4,3,x,2,")
    assert queue.poll(store) == ()
    store.set(asking_key(2), encode_asking(TWO, 2))
    assert queue.poll(store) == (TWO,)
    for node in range(3, 7):
        assert caplog.text.count(f"node={node} that wants to join is not heard") == 1


def test_all_open_the_group_if_the_leader_knows_of_nodes_that_wait() -> None:
    vote = Vote(
        ticket=3, generation=1, is_finite=True, is_stopping=False, ready_generation=0, ready_crc=0
    )
    assert not Ballot(votes=(vote, vote)).opens
    assert Ballot(votes=(replace(vote, is_awaited=True), vote)).opens


SESSION = Session(run_id=7, device="cpu", places=(Place(address="127.0.0.1:1", nonce=1),))


def publish(address: str, key: JobKey = UNSIGNED) -> None:
    """Write into a store what a node that joins looks for."""
    connect_store(address, key=key).set(SESSION_KEY, SESSION.encode())
    connect_store(address, key=SESSION.key(key)).set(JOB_KEY, FACTS.encode())


def test_any_live_store_of_the_job_is_a_way_in() -> None:
    server, stranger = host_store("127.0.0.1", 0), host_store("127.0.0.1", 0)
    live, other = f"127.0.0.1:{server.port}", f"127.0.0.1:{stranger.port}"
    publish(live)
    assert find_job((GONE, other, live)) == (FACTS, live, SESSION)
    with pytest.raises(UnreachableError, match=f"no job is running at {GONE}, {other}"):
        find_job((GONE, other))


@pytest.mark.parametrize("wrong", [JobKey(b"the secret of another"), UNSIGNED])
def test_without_the_secret_of_the_job_nothing_of_it_is_known(
    tmp_path: Path, wrong: JobKey
) -> None:
    server, rings = host_store("127.0.0.1", 0), tmp_path / "rings"
    address = f"127.0.0.1:{server.port}"
    publish(address, JobKey(b"the secret of a job"))
    spec = JoinSpec(addresses=(address,), ranks_per_node=1, ring_dir=str(rings), key=wrong)
    with pytest.raises(DeniedError, match=r"'session' is not signed .* --secret-file"):
        join(spec)
    assert not rings.exists()


def test_strangers_that_ask_are_refused_and_keep_nobody_else_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server: Any = host_store("127.0.0.1", 0)
    address, key = f"127.0.0.1:{server.port}", JobKey(b"the secret of a job")
    queue, store = JoinQueue(address, key), connect_store(address, key=key)
    store.append(ASKING_KEY, "2,3,")
    for beat in (1, 2, 2):
        store.set(asking_key(2), encode_asking(TWO, beat))
        connect_store(address).set(asking_key(3), encode_asking(replace(TWO, node=3), beat))
        found = queue.poll(store)
        assert found == ((TWO,) if beat == 2 and not queue.waiting else ())
        queue.waiting = found
    store.set(asking_key(2), encode_asking(TWO, 1))
    assert queue.poll(store) == (), "an earlier message, written again"
    assert caplog.text.count("node=3 that wants to join is not heard: a message at key") == 1


def test_two_launchers_take_different_numbers() -> None:
    server = host_store("127.0.0.1", 0)
    facts = replace(FACTS, addresses=(f"127.0.0.1:{server.port}", GONE))
    assert take_numbers(facts, 3) == (2, 4)
    assert take_numbers(facts, 2) == (3, 7)
    assert take_numbers(facts, 1) == (4, 9)
    with pytest.raises(UnreachableError, match="the store of node 0"):
        take_numbers(FACTS, 1)
    full = replace(
        facts, node_of={**facts.node_of, MAX_RANKS - 1: 1}, addresses=facts.addresses * 9
    )
    with pytest.raises(HostError, match="16384 is the most in one run"):
        take_numbers(full, 1)


def test_a_job_of_another_name_is_not_joined(tmp_path: Path) -> None:
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    publish(address)
    spec = JoinSpec(
        addresses=(address,), ranks_per_node=1, ring_dir=str(tmp_path / "rings"), job="other"
    )
    with pytest.raises(ConfigError, match=r"--job other: the job at .* is named test"):
        join(spec)
    with pytest.raises(ValueError, match="HOST:PORT of at least one node"):
        replace(spec, addresses=())
    with pytest.raises(ValueError, match="join: expected HOST:PORT with a port from 1"):
        replace(spec, addresses=(address, "node0"))
    with pytest.raises(ValueError, match="at least one rank"):
        replace(spec, ranks_per_node=0)


class Waiting:
    """A node that waits at the door of a job whose leader is on node 0, and whose store lives."""

    def __init__(self, directory: Path) -> None:
        self.servers = [host_store("127.0.0.1", 0) for _ in range(2)]
        job, own = (f"127.0.0.1:{server.port}" for server in self.servers)
        self.leader, self.own = connect_store(job), connect_store(own)
        self.facts = replace(FACTS, addresses=(job, GONE))
        self.leader.set(JOB_KEY, self.facts.encode())
        spec = NodeSpec(
            config=FACTS.config, node_rank=2, num_nodes=3, ranks_per_node=2, rendezvous=job,
            ring_dir=str(directory / "rings"), run_dir=str(directory / "run"),
            seat=Seat(first_rank=4, world_size=4, node_of=FACTS.node_of),
        )  # fmt: skip
        self.supervisor = Supervisor(spec, (job, GONE, own), 7, rank_main, UNSIGNED)
        self.door = JoinRequest(self.supervisor, replace(TWO, address=own))

    def poll(self) -> bool:
        self.door._next_s = 0.0  # it is time
        return self.door.poll()


def test_a_node_asks_when_all_its_ranks_are_ready_and_until_it_is_let_in(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    queue = JoinQueue("")
    assert waiting.poll() and not waiting.leader.check([ASKING_KEY])
    waiting.own.set(ready_key(4), "11")
    assert waiting.poll() and not waiting.leader.check([ASKING_KEY])
    waiting.own.set(ready_key(5), "11")
    seen = [bool(waiting.poll() and queue.poll(waiting.leader)) for _ in range(3)]
    assert seen == [False, True, True]
    waiting.own.set(ADMISSION_KEY, "...")
    assert not waiting.poll()


def test_a_node_gives_up_where_another_took_its_number_or_the_job_is_gone(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.own.set(ready_key(4), "11")
    waiting.own.set(ready_key(5), "11")
    wider = (*waiting.facts.addresses, "127.0.0.1:9")
    waiting.leader.set(JOB_KEY, replace(waiting.facts, addresses=wider).encode())
    with pytest.raises(HostError, match=r"node number 2 went to 127\.0\.0\.1:9 meanwhile"):
        waiting.poll()
    others = {**waiting.facts.node_of, 5: 3, 6: 3}  # by a leader that knew of no claim of ours
    waiting.leader.set(JOB_KEY, replace(waiting.facts, node_of=others).encode())
    with pytest.raises(HostError, match=r"ranks 5 are taken meanwhile"):
        waiting.poll()
    mine = dict.fromkeys((4, 5), 2)
    own = replace(
        waiting.facts,
        addresses=(*waiting.facts.addresses, waiting.supervisor.addresses[2]),
        node_of={**waiting.facts.node_of, **mine},
    )
    waiting.leader.set(JOB_KEY, own.encode())
    assert waiting.poll(), "decided, and not said yet"
    del waiting.servers[0]
    with pytest.raises(UnreachableError, match="the job ended, or is out of reach"):
        waiting.poll()


def test_a_node_with_another_text_to_train_on_does_not_ask(tmp_path: Path) -> None:
    """Two builds of one version of Python may differ in their libraries."""
    waiting = Waiting(tmp_path)
    waiting.own.set(ready_key(4), "11")
    waiting.own.set(ready_key(5), "12")
    with pytest.raises(ConfigError):
        waiting.poll()
    assert not waiting.leader.check([ASKING_KEY])


def test_a_rank_that_ends_before_it_is_let_in_keeps_its_node_out(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.supervisor.codes = {4: int(ExitCode.INTERNAL)}
    assert not waiting.poll()
    assert not waiting.leader.check([ASKING_KEY])


def test_a_newcomer_has_fresh_numbers_and_belongs_to_no_group_at_first(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    node = waiting.supervisor
    assert list(node.spec.ranks) == [4, 5]
    assert node.spec.world_size == 4, "devices are emulated as when the job began"
    assert node.spec.node_of == {**FACTS.node_of, 4: 2, 5: 2}
    assert node._last_group(4) == NO_GROUP


def test_a_launcher_learns_of_nodes_that_joined(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    later = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{later.port}"
    stores = waiting.supervisor.stores
    wider = (*stores.addresses, "", address)
    waiting.own.set(JOB_KEY, replace(FACTS, addresses=wider).encode())
    waiting.supervisor._look_for_nodes(1e9)
    assert stores.addresses == wider
    stores.append_everywhere("deaths", "4@none,")
    assert Stores((address,)).read(0, "deaths") == "4@none,"
    assert stores.gone >= {1, 3}, "of those nobody knows a store"


@pytest.mark.parametrize("end", ["false", "true"])
def test_a_death_is_told_to_a_node_that_joined_a_moment_ago(tmp_path: Path, end: str) -> None:
    """So is a good end of who may have been let in and never heard of it."""
    waiting = Waiting(tmp_path)
    waiting.supervisor._look_for_nodes(1e9)  # and would not look again for a while
    later = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{later.port}"
    wider = (*waiting.supervisor.stores.addresses, address)
    waiting.own.set(JOB_KEY, replace(FACTS, addresses=wider).encode())
    process = subprocess.Popen([end])
    waiting.supervisor.processes[4] = cast(ForkServerProcess, Ended(process))
    waiting.supervisor._ended(4)
    assert Stores((address,)).read(0, DEATHS_KEY) == notice(4, NO_GROUP)
    waiting.own.set(group_key(5), "2-00ff00ff")
    waiting.supervisor.processes[5] = cast(ForkServerProcess, Ended(subprocess.Popen(["true"])))
    waiting.supervisor._ended(5)
    assert Stores((address,)).read(0, DEATHS_KEY) == notice(4, NO_GROUP), "5 finished"


class Ended:
    """As `multiprocessing` shows a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self.exitcode = process.pid, process.wait()

    def join(self) -> None: ...


def test_a_node_that_is_told_to_end_while_it_waits_ends_alone(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.supervisor.ask_to_stop()
    waiting.supervisor._follow_stop(time.monotonic())
    assert not waiting.leader.check([STOP_KEY])
    inside = Waiting(tmp_path)
    inside.own.set(ADMISSION_KEY, "...")
    assert not inside.poll()
    inside.supervisor.ask_to_stop()
    inside.supervisor._follow_stop(time.monotonic())
    assert inside.leader.get(STOP_KEY) == b"2,", "as every launcher of the job"
