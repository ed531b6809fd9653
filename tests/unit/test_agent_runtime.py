"""What the agent puts into its spool, and what it says of itself."""

from pathlib import Path

import pytest

from pacekeeper.agent import runtime
from pacekeeper.agent.runtime import Agent
from pacekeeper.core.config import AgentConfig
from support.agents import Node, step


def agent_of(directory: Path) -> tuple[Agent, Node]:
    node = Node(directory, 1)
    config = AgentConfig(ring_dir=str(node.rings), metrics_listen="", spool_batches=3)
    return Agent(config), node


def test_reports_without_news_do_not_push_out_those_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "IDLE_REPORT_S", 0.0)
    agent, node = agent_of(tmp_path)
    node.ring().write(step(0))
    for _ in range(10):
        agent._look()
    assert (len(agent.spool), agent.spool.num_dropped) == (1, 0)
    agent.uplink.is_connected = True
    agent._look()
    assert len(agent.spool) == 2, "silence of a connected node would look like a dead agent"


def test_the_greeting_takes_no_number_of_its_own(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    writer = node.ring()
    for number in range(5):
        writer.write(step(number))
        agent._look()
    greeting = agent.uplink.greeting(agent.spool.settled)
    first = agent.spool.next()
    assert first is not None
    assert (greeting.sequence, first.sequence) == (2, 3), "two were dropped, three wait"
    assert [a.rank for job in greeting.jobs for a in job.attached] == [0]


def test_many_unreadable_files_make_no_endless_report(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    (node.rings / "job").mkdir()
    for number in range(40):
        (node.rings / "job" / f"rank-{number:05d}.ring").write_bytes(b"")
    agent._look()
    told = agent.uplink.greeting(0).health.unreadable
    assert len(told) == runtime.MAX_TOLD_FILES + 1
    assert told[-1] == f"and {40 - runtime.MAX_TOLD_FILES} more"
