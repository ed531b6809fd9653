"""Two controllers, a real PostgreSQL: whoever is killed or frozen, nothing acknowledged is lost,
and a former leader sends nothing any more.
"""

import re
import signal
import time
from pathlib import Path

import grpc
import httpx2
import psycopg
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.storage.postgres import PostgresDatabase
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import control_pb2, status_pb2
from pacekeeper.protos.convert import reports
from pacekeeper.protos.stale_reads import READS
from support.commands import pacekeeper
from support.controllers import (
    PATIENCE_S,
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    killed,
    until,
    who_died,
)
from support.failover import FAST, Pair, running
from support.ports import free_port

JOB = "train"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LAYOUT = first_layout()


def hello(incarnation: str, highest_term: int = 0) -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=reports.PROTOCOL_VERSION,
        product_version="0",
        node="node-0",
        agent_incarnation=incarnation,
        highest_term=highest_term,
    )


def incidents(controller: ControllerProcess | None) -> list[tuple[int, list[int]]]:
    """Their numbers, and who died."""
    assert controller is not None
    told = controller.status.ListIncidents(status_pb2.ListIncidentsRequest(), timeout=30.0)
    return [(incident.incident_id, who_died(incident)) for incident in told.incidents]


def terms(agent: ScriptedAgent) -> set[int]:
    return {message.term for message in list(agent.heard)}


def test_what_a_killed_leader_has_told_the_next_one_knows(
    tmp_path: Path, postgres_url: str
) -> None:
    with running(tmp_path, postgres_url) as (pair, leader):
        agent = ScriptedAgent(pair.addresses[leader], hello("a"))
        agent.report_and_wait(attached(JOB, LAYOUT))
        agent.report_and_wait(JobReport(job=JOB, records=(killed(1),)))
        assert terms(agent) == {1}
        known = incidents(pair.processes[leader])
        assert known == [(1, [1])]
        pair.kill(leader)

        other = pair.leader(1 - leader)
        assert incidents(pair.processes[other]) == known
        agent = ScriptedAgent(pair.addresses[other], hello("b", highest_term=1))
        agent.report_and_wait(attached(JOB, LAYOUT))
        agent.report_and_wait(JobReport(job=JOB, records=(killed(3),)))
        assert terms(agent) == {2}, "each command has the token of the new leader"
        assert incidents(pair.processes[other]) == [(1, [1, 3])]

        # The one that was killed comes back, stands by, and is next.
        pair.start(leader)
        pair.kill(other)
        assert incidents(pair.processes[pair.leader(leader)]) == [(1, [1, 3])]
        agent.close()


def test_a_frozen_leader_says_nothing_when_it_wakes(tmp_path: Path, postgres_url: str) -> None:
    with running(tmp_path, postgres_url) as (pair, leader):
        agent = ScriptedAgent(pair.addresses[leader], hello("a"))
        agent.report_and_wait(attached(JOB, LAYOUT))
        agent.report_and_wait(JobReport(job=JOB, records=(killed(1),)))  # said again each second
        until("it is told of the death", agent.deaths)
        pair.signal(leader, signal.SIGSTOP)
        other = pair.leader(1 - leader)
        sequence = agent.report(JobReport(job=JOB, records=(killed(2),)))
        num_heard = len(agent.heard)
        pair.signal(leader, signal.SIGCONT)
        code, words = agent.wait_for_end()
        assert code is grpc.StatusCode.UNAVAILABLE, words
        late = agent.heard[num_heard:]
        assert not any(message.HasField("notify_deaths") for message in late), late
        told = [message.acknowledge.sequence for message in agent.heard]
        assert max(told) < sequence, "what only the past leader has is not acknowledged"
        until("it stands by", lambda: pair.log(leader).count("stands by") == 2)
        until("the other one still leads", lambda: pair.is_leading(other))
        assert not pair.is_leading(leader)


def test_a_standby_names_the_leader_and_follows_at_once_one_that_stops(
    tmp_path: Path, postgres_url: str
) -> None:
    with Pair(tmp_path, postgres_url, FAST.replace("2.5", "60.0")) as pair:
        first = (tmp_path / "c0.toml").read_text().replace("60.0", "2.5")
        (tmp_path / "c0.toml").write_text(first)
        web = f"127.0.0.1:{free_port()}"
        settings = (tmp_path / "c1.toml").read_text()
        (tmp_path / "c1.toml").write_text(f'[controller]\nweb = "{web}"\n{settings}')
        leader = pair.start(0)
        assert pair.leader(0) == 0
        pair.start(1)
        until("it stands by", lambda: "stands by" in pair.log(1))
        agent = ScriptedAgent(pair.addresses[1], hello("a"))
        code, words = agent.wait_for_end()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert pair.apis[0] in words
        said = pacekeeper("status", "--controller", ",".join(pair.apis[::-1]))
        assert (said.returncode, said.stderr) == (ExitCode.OK, "")
        _reads_on_a_standby(pair, web)
        leader.process.terminate()
        assert pair.leader(1) == 1, "long before its 60 s are over"
        until("the new leader serves the page", lambda: page_age(f"http://{web}/") == "")
        assert leader.process.wait(PATIENCE_S) == ExitCode.OK


def _reads_on_a_standby(pair: Pair, web: str) -> None:
    """Commands and pages show the leader's incidents with their age; nothing can be done here."""
    agent = ScriptedAgent(pair.addresses[0], hello("a"))
    agent.report_and_wait(attached(JOB, LAYOUT))
    agent.report_and_wait(JobReport(job=JOB, records=(killed(1),)))
    agent.close()
    assert health(pair.apis[1], "") == NOT_SERVING
    until("it answers reads", lambda: health(pair.apis[1], READS) == SERVING)
    assert health(pair.apis[0], READS) == SERVING
    until("the death is read", lambda: incidents(pair.processes[1]) == [(1, [1])])
    said = pacekeeper("incidents", "--controller", pair.apis[1])
    assert said.returncode == ExitCode.OK and JOB in said.stdout
    assert "stands by" in said.stderr and pair.apis[0] in said.stderr
    said = pacekeeper("incidents", "--controller", pair.apis[0])
    assert (said.returncode, said.stderr) == (ExitCode.OK, "")
    said = pacekeeper("explain", "1", "--controller", pair.apis[1])
    assert said.returncode == ExitCode.OK and "stands by" in said.stderr
    said = pacekeeper("pause", JOB, "--controller", pair.apis[1])
    assert said.returncode == ExitCode.UNREACHABLE and pair.apis[0] in said.stderr
    with httpx2.Client(base_url=f"http://{web}") as browser:
        page = browser.get("/incidents")
        assert page.status_code == 200 and "stands by" in page.text and JOB in page.text
        assert page.headers["age"].isdigit()
        assert "age" in browser.get("/data/incidents/1").headers
        (secret,) = re.findall(r'X-CSRF-Token": "([^"]*)"', page.text)
        order = {"kind": "pause", "subject": JOB, "is_on": "1"}
        refused = browser.post("/act/order", data=order, headers={"x-csrf-token": secret})
        assert refused.status_code == 503 and pair.apis[0] in refused.json()["error"]


def health(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30.0).status)


def page_age(url: str) -> str:
    """The age that the page names, empty where a leader shows it; "none" while nothing listens."""
    try:
        return httpx2.get(url).headers.get("age", "")
    except httpx2.TransportError:
        return "none"


def test_terms_pass_what_an_agent_has_seen(tmp_path: Path, postgres_url: str) -> None:
    """The database lost its last rows: terms would begin below what agents obey."""
    with running(tmp_path, postgres_url) as (pair, leader):
        pair.kill(1 - leader)  # it would believe once, too, if it followed
        agent = ScriptedAgent(pair.addresses[leader], hello("a", highest_term=41))
        assert agent.wait_for_end()[0] is grpc.StatusCode.UNAVAILABLE
        until("a later term", lambda: "leads in term 42" in pair.log(leader))
        agent = until("it is welcome", lambda: welcome(pair, leader, hello("b", highest_term=41)))
        assert min(terms(agent)) > 41
        # Who says so again, or what nobody can have seen, ends nobody's term.
        for seen in (min(terms(agent)) + 1, 1 << 60):
            liar = ScriptedAgent(pair.addresses[pair.leader(leader)], hello("c", highest_term=seen))
            code, words = liar.wait_for_end()
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "ignores the agent's term" in words
        assert agent.error is None and len(terms(agent)) == 1, "the others notice nothing of it"
        agent.close()


def welcome(pair: Pair, leader: int, said: control_pb2.Hello) -> ScriptedAgent | None:
    """An agent that is attached to who leads; None where that one goes just now."""
    agent = ScriptedAgent(pair.addresses[pair.leader(leader)], said)
    until("an answer", lambda: agent.is_welcome or agent.error)
    return agent if agent.is_welcome else None


def test_a_controller_of_an_older_version_stands_by_and_leaves_the_lease_to_others(
    tmp_path: Path, postgres_url: str
) -> None:
    PostgresDatabase.open(postgres_url).close()
    with psycopg.connect(postgres_url) as store:
        store.execute("UPDATE pacekeeper_schema SET version = version + 1")
    with Pair(tmp_path, postgres_url) as pair:
        pair.start(0)
        until("it says so", lambda: "stands by until it is restarted" in pair.log(0))
        until("it stands by again", lambda: pair.log(0).count("stands by\n") == 2)
        with psycopg.connect(postgres_url) as store:  # in place of a newer version's tables
            store.execute("UPDATE pacekeeper_schema SET version = version - 1")
        pair.start(1)
        assert pair.leader(1) == 1
        pair.kill(1)
        lease = LeaseRow(postgres_url, 2.0)
        left = lease.read()
        assert left is not None and left.holder == "c1"
        process = pair.processes[0]
        assert process is not None and process.process.poll() is None
        time.sleep(2.0 * left.duration_s)
        assert lease.read() == left, "it takes over nothing"
        lease.close()
