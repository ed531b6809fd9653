"""The launcher of one node: which ranks are its own, and what its exit code says of their ends."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode, HostError, UnreachableError
from pacekeeper.core.telemetry.shm_ring import SUPERVISOR_RING, decode_header
from pacekeeper.trainer.elastic import launcher, rendezvous
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED
from pacekeeper.trainer.elastic.agreement.kv_store import (
    FINISHED_KEY,
    STOP_KEY,
    group_key,
    host_store,
    notice,
)
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP
from pacekeeper.trainer.elastic.launch_spec import NodeLimits, NodeSpec
from pacekeeper.trainer.elastic.launcher import STOP_SIGNALS, Supervisor, run_ranks, supervise
from pacekeeper.trainer.elastic.loop import rank_main


def spec(directory: Path, **values: object) -> NodeSpec:
    options: dict[str, object] = {
        "node_rank": 0,
        "num_nodes": 1,
        "ranks_per_node": 2,
        "rendezvous": "127.0.0.1:29400",
        "ring_dir": str(directory / "rings"),
        "run_dir": str(directory / "run"),
    }
    return NodeSpec(config=EngineConfig(job="test"), **(options | values))  # type: ignore[arg-type]


def test_a_nodes_ranks_follow_those_of_the_nodes_before_it(tmp_path: Path) -> None:
    node = spec(tmp_path, node_rank=2, num_nodes=4, ranks_per_node=3)
    assert list(node.ranks) == [6, 7, 8]
    assert node.world_size == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nodes": 0}, "at least one node"),
        ({"ranks_per_node": 0}, "one rank per node"),
        ({"ranks_per_node": 4097, "num_nodes": 4}, "16388 ranks: a job has at most 16384"),
        ({"node_rank": 2, "num_nodes": 2}, "node-rank: expected 0 to 1, got 2"),
        ({"node_rank": -1}, "node-rank: expected 0 to 0"),
        ({"rendezvous": "somewhere"}, "rendezvous: expected HOST:PORT with a port from 1"),
        ({"rendezvous": "127.0.0.1:0"}, "rendezvous: expected HOST:PORT with a port from 1"),
    ],
)
def test_impossible_nodes_are_refused(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec(tmp_path, **values)


@pytest.mark.parametrize(
    ("codes", "is_stopped", "verdict"),
    [
        ([0, 0], False, ExitCode.OK),
        ([0, -signal.SIGKILL], False, ExitCode.OK),  # the survivors finished the job
        ([0, ExitCode.INTERNAL], False, ExitCode.OK),
        ([ExitCode.LOST_STATE, ExitCode.LOST_STATE], False, ExitCode.LOST_STATE),
        ([-signal.SIGKILL, ExitCode.LOST_STATE], False, ExitCode.LOST_STATE),
        ([-signal.SIGKILL, -signal.SIGSEGV], False, ExitCode.INTERNAL),
        ([75, 75], False, ExitCode.INTERNAL),  # fenced: no code of the command
        ([ExitCode.NO_QUORUM, 75], False, ExitCode.NO_QUORUM),
        ([-signal.SIGTERM, -signal.SIGTERM], True, ExitCode.OK),  # ended before they could listen
        ([-signal.SIGTERM, -signal.SIGTERM], False, ExitCode.INTERNAL),
        ([-signal.SIGKILL, -signal.SIGTERM], True, ExitCode.INTERNAL),
    ],
)
def test_the_exit_code_says_how_the_ranks_ended(
    tmp_path: Path, codes: list[int], is_stopped: bool, verdict: ExitCode
) -> None:
    node = Supervisor(spec(tmp_path), (), 1, rank_main, UNSIGNED)
    node.codes = dict(enumerate(codes))
    if is_stopped:
        node.ask_to_stop()
    assert node._verdict() is verdict


def test_a_node_without_a_rank_that_finished_says_of_each_how_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Supervisor(spec(tmp_path), (), 1, rank_main, UNSIGNED)
    node.codes = {0: -signal.SIGKILL, 1: 75, **dict.fromkeys(range(2, 12), 1)}
    node.fenced = {0}
    node._verdict()
    assert "no rank of this node finished (code 1): rank 0: signal SIGKILL (fenced)" in caplog.text
    assert "rank 1: exit code 75 (the others went on without it), rank 2: " in caplog.text
    assert caplog.text.rstrip().endswith("rank 7: exit code 1, and 4 more")


def test_the_launcher_tells_the_agent_of_itself(tmp_path: Path) -> None:
    Supervisor(spec(tmp_path, node_rank=1, num_nodes=3), (), 1, rank_main, UNSIGNED)
    ring = tmp_path / "rings" / "test" / SUPERVISOR_RING
    attachment = decode_header(ring.read_bytes())
    assert (attachment.rank, attachment.world_size, attachment.role) == (2, 6, "supervisor")


def test_a_notice_names_the_last_group_if_that_can_be_known(tmp_path: Path) -> None:
    server = host_store("127.0.0.1", 0)
    node = Supervisor(spec(tmp_path), (f"127.0.0.1:{server.port}",), 1, rank_main, UNSIGNED)
    assert node._last_group(0) == FIRST_GROUP
    node.stores.write(0, group_key(0), "2-00ff00ff")
    assert (node._last_group(0), node._last_group(1)) == ("2-00ff00ff", FIRST_GROUP)
    del server
    assert node._last_group(0) == "", "it counts as one that may live"


def test_a_rendezvous_on_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"192\.0\.2\.1:29400"):
        supervise(spec(tmp_path, rendezvous="192.0.2.1:29400"))


def test_nodes_that_do_not_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 0.2)
    with pytest.raises(UnreachableError, match=r"no store at 127\.0\.0\.1:1"):
        supervise(spec(tmp_path, node_rank=1, num_nodes=2, rendezvous="127.0.0.1:1"))
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(UnreachableError, match=rf"nodes \[0, 2\] did not come to {address}"):
        supervise(spec(tmp_path, node_rank=1, num_nodes=3, rendezvous=address))


def test_of_many_nodes_that_do_not_come_a_few_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(
        launcher, "node_limits", lambda: NodeLimits(memory_bytes=None, open_files=None)
    )
    server = host_store("127.0.0.1", 0)
    with pytest.raises(UnreachableError, match=r"nodes \[0, 2, 3, .*, 8\] and 391 more did not"):
        address = f"127.0.0.1:{server.port}"
        supervise(spec(tmp_path, node_rank=1, num_nodes=400, rendezvous=address))


def test_nobody_who_reads_the_rings_is_said_once_and_so_is_an_agent_that_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = Supervisor(spec(tmp_path), (), 1, rank_main, UNSIGNED)
    born_s = time.monotonic()
    for later_s in (0.0, 5.0, 11.0, 12.0):
        node._look_for_agent(born_s + later_s)
    agent = RingCollector(directory=tmp_path / "rings")
    agent.poll(born_s + 20.0)
    for later_s in (20.1, 21.0):
        node._look_for_agent(born_s + later_s)
    node._look_for_agent(born_s + 31.0)
    said = [record.getMessage().partition(" the rings")[0] for record in caplog.records]
    assert said == ["no agent has read", "an agent reads", "no agent has read"]


def test_who_is_to_ignore_hang_ups_does_so(tmp_path: Path) -> None:
    """As `nohup` starts it."""

    class Ended(Supervisor):
        def start(self) -> None:
            signal.raise_signal(signal.SIGHUP)
            assert not self.stop_asked_s
            self.codes = {0: 0}

    usual = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_ranks(Ended(spec(tmp_path), (), 1, rank_main, UNSIGNED)) is ExitCode.OK
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


class Slow:
    """A rank's process that does not end when it is asked to."""

    def __init__(self) -> None:
        self.asked = self.killed = 0

    def terminate(self) -> None:
        self.asked += 1

    def kill(self) -> None:
        self.killed += 1

    def is_alive(self) -> bool:
        return True


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Supervisor, Slow]]:
    """The launcher of node 0 with its own store and a rank in a long step."""
    server = host_store("127.0.0.1", 0)
    node = Supervisor(spec(tmp_path), (f"127.0.0.1:{server.port}",), 1, rank_main, UNSIGNED)
    rank = Slow()
    node.processes[0] = cast(ForkServerProcess, rank)
    yield node, rank
    del server


def test_a_wish_to_end_is_told_to_all_before_anybody_is_killed(
    slow: tuple[Supervisor, Slow],
) -> None:
    node, rank = slow
    node.ask_to_stop()
    now_s, patience_s = node.stop_asked_s, node.spec.config.peer_timeout_s + launcher.GRACE_S
    for later_s in (0.0, 1.0, patience_s - 0.1):
        node._follow_stop(now_s + later_s)
    assert (rank.asked, rank.killed) == (1, 0), "a step may take as long as its collectives may"
    assert node.stores.read(0, STOP_KEY) == "0,"
    node._follow_stop(now_s + patience_s + 0.1)
    assert rank.killed == 1


def test_who_saves_the_end_of_a_job_that_is_over_is_not_killed_for_being_slow(
    slow: tuple[Supervisor, Slow],
) -> None:
    node, rank = slow
    node.ask_to_stop()
    node.over_s = node.stop_asked_s
    later_s = node.stop_asked_s + node.spec.config.peer_timeout_s + launcher.GRACE_S + 1.0
    node._follow_stop(later_s)
    assert (rank.asked, rank.killed) == (1, 0)
    node.stop_asked_s -= 2.0
    node.ask_to_stop()
    node._follow_stop(later_s)
    assert rank.killed == 1, "asked twice, nobody is waited for"


def test_what_another_launcher_was_asked_is_followed_here(slow: tuple[Supervisor, Slow]) -> None:
    node, rank = slow
    node._follow_stop(5.0)
    assert (rank.asked, node.stop_asked_s) == (0, 0.0)
    node.stores.append(0, STOP_KEY, "1,")
    node._follow_stop(6.0)
    node._follow_stop(7.0)
    assert (rank.asked, rank.killed, node.stop_asked_s) == (1, 0, 6.0)


def test_asked_a_second_time_it_waits_for_nobody(slow: tuple[Supervisor, Slow]) -> None:
    node, rank = slow
    node.ask_to_stop()
    node.ask_to_stop()  # as `timeout` sends it: to the process and to its group
    node._follow_stop(node.stop_asked_s)
    assert (rank.asked, rank.killed) == (1, 0)
    node.stop_asked_s -= 2.0
    node.ask_to_stop()
    node._follow_stop(node.stop_asked_s)
    assert (rank.asked, rank.killed) == (1, 1)


def test_of_those_that_are_late_at_the_end_only_who_is_stopped_is_killed(tmp_path: Path) -> None:
    """Another may still write its last checkpoint."""
    server = host_store("127.0.0.1", 0)
    node = Supervisor(spec(tmp_path), (f"127.0.0.1:{server.port}",), 1, rank_main, UNSIGNED)
    ranks = {rank: subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for rank in (0, 1)}
    try:
        node.processes = cast(dict[int, ForkServerProcess], ranks)
        node._end_the_late(10.0)
        assert not node.over_s, "the others train on"
        node.stores.append(0, FINISHED_KEY, notice(3, FIRST_GROUP))
        ranks[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
        limit_s = node.spec.config.peer_timeout_s
        node._end_the_late(20.0)
        node._end_the_late(20.0 + limit_s)
        assert node.fenced == set()
        node._end_the_late(21.0 + limit_s)
        assert node.fenced == {1}
        assert ranks[1].wait() == -signal.SIGKILL
        assert ranks[0].poll() is None
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()
