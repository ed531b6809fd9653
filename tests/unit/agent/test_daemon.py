"""What the agent puts into its spool, and what it says of itself."""

from pathlib import Path

import pytest

from pacekeeper.agent import daemon
from pacekeeper.agent.daemon import Agent
from pacekeeper.agent.rings import collector
from pacekeeper.agent.uplink import pacing
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import RankExitRecord
from pacekeeper.core.telemetry.shm_ring import SUPERVISOR_RING
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import Node, agent_of, step


@pytest.fixture(autouse=True)
def _reports_at_each_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(pacing, "MIN_GAP_S", 0.0)


def test_reports_without_news_do_not_push_out_those_with(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    node.ring().write(step(0))
    for _ in range(10):
        agent._poll()
    assert (len(agent.spool), agent.spool.num_dropped) == (1, 0)
    agent.uplink.is_connected = True
    agent._poll()
    assert len(agent.spool) == 2, "silence of a connected node would look like a dead agent"


def test_a_report_tells_what_the_kernel_says(tmp_path: Path) -> None:
    agent, _ = agent_of(tmp_path)
    report = agent.uplink.resync_report(0)
    assert report.HasField("host") and report.host.num_cores >= 1


def test_the_greeting_takes_no_number_of_its_own(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    writer = node.ring()
    for number in range(5):
        writer.write(step(number))
        agent._poll()
    greeting = agent.uplink.resync_report(agent.spool.settled_sequence)
    first = agent.spool.next_unsent()
    assert first is not None
    assert (greeting.sequence, first.sequence) == (2, 3), "two were dropped, three wait"
    assert [a.rank for job in greeting.jobs for a in job.attached] == [0]


def test_many_unreadable_files_make_no_endless_report(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    (node.rings / "job").mkdir()
    for number in range(40):
        (node.rings / "job" / f"rank-{number:05d}.ring").write_bytes(b"")
    agent._poll()
    told = agent.uplink.resync_report(0).health.unreadable
    assert len(told) == daemon.MAX_LISTED_FILES + 1
    assert told[-1] == f"and {40 - daemon.MAX_LISTED_FILES} more"


def ended_job(node: Node) -> None:
    """One rank, and a supervisor that saw it end."""
    node.ring(pid=7)
    attachment = Attachment(job="job", rank=0, world_size=4, pid=6, role="supervisor")
    ring = Ring.create(node.rings, attachment, file_name=SUPERVISOR_RING)
    ring.write(RankExitRecord(rank=0, pid=7, exit_code=0, signal=0))


def sent(agent: Agent) -> int:
    """Everything that waits goes to the controller, which has not acknowledged it yet."""
    while agent.spool.next_unsent() is not None:
        pass
    return agent.spool.last_sequence


def test_rings_of_an_ended_job_are_held_until_the_controller_has_all_they_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "RELEASE_DELAY_S", -1.0)
    agent, node = agent_of(tmp_path)
    ended_job(node)
    agent._poll()
    sequence = sent(agent)
    agent._poll()
    assert agent.collector.num_rings == 2
    agent.spool.acknowledge(sequence)
    agent._poll()
    assert agent.collector.num_rings == 0


def test_where_reports_were_given_up_the_end_is_told_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, node = agent_of(tmp_path)
    ended_job(node)
    agent._poll()
    for number in range(5):  # another job's reports push the first one out
        node.ring(job=f"other-{number}")
        agent._poll()
    assert agent.spool.num_dropped
    monkeypatch.setattr(collector, "RELEASE_DELAY_S", -1.0)
    agent._poll()
    agent.spool.acknowledge(sent(agent) - 1)
    agent._poll()
    assert agent.collector.num_rings == 2 + 5
    last = agent.uplink.spool._reports[-1][0]
    assert [(job.job, list(job.rank_exits.rank)) for job in last.jobs] == [("job", [0])]
    agent.spool.acknowledge(sent(agent))
    agent._poll()
    assert agent.collector.num_rings == 5
