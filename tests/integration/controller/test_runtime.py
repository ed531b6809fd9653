"""The service as a whole: what it knew before a kill, what it says while it runs, how it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import control_pb2, status_pb2
from pacekeeper.protos.convert import reports
from support.controllers import (
    PATIENCE_S,
    ControllerProcess,
    ScriptedAgent,
    Watching,
    applied,
    attached,
    attachments,
    first_layout,
    killed,
    step_records,
    until,
    who_died,
)

JOB = "train"
LAYOUT = first_layout()
SURVIVORS = shrink(LAYOUT, dead=[1], generation=2)


def hello(node: str, incarnation: str = "first") -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=reports.PROTOCOL_VERSION,
        product_version="0",
        node=node,
        agent_incarnation=incarnation,
    )


def ask_job(controller: ControllerProcess, name: str = JOB) -> Any:
    return controller.status.GetJob(status_pb2.GetJobRequest(job=name), timeout=30.0).job


def incidents(controller: ControllerProcess, job: str = "", open_only: bool = False) -> list[Any]:
    request = status_pb2.ListIncidentsRequest(job=job, open_only=open_only)
    return list(controller.status.ListIncidents(request, timeout=30.0).incidents)


def steps(agent: ScriptedAgent, first: int, end: int, layout: Any = LAYOUT) -> None:
    for step in range(first, end):
        agent.report(JobReport(job=JOB, records=step_records(step, layout)))
    agent.report_and_wait()


def die_and_go_on(agent: ScriptedAgent) -> None:
    """Rank 1 is killed; the survivors write and run a layout of their own."""
    agent.report_and_wait(JobReport(job=JOB, records=(killed(1),)))
    agent.report_and_wait(
        JobReport(
            job=JOB,
            layouts=((SURVIVORS.generation, encode_layout(SURVIVORS)),),
            records=applied(SURVIVORS, step=5),
        )
    )


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path) as process:
        yield process


def test_after_kill_9_the_job_its_incidents_and_its_generation_are_still_there(
    tmp_path: Path,
) -> None:
    with ControllerProcess(tmp_path) as before:
        agent = ScriptedAgent(before.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        steps(agent, 0, 5)
        die_and_go_on(agent)
        known = ask_job(before)
        assert known.generation == 2
        told = incidents(before)
        assert [(i.kind, i.rank, i.HasField("closed_unix_s")) for i in told] == [("death", 1, True)]
        before.kill()  # in mid-stream
        assert agent.wait_for_end()[0] is grpc.StatusCode.UNAVAILABLE

    with ControllerProcess(tmp_path) as after:
        again = ask_job(after)
        assert (again.name, again.generation) == (JOB, 2)
        assert [(rank.rank, rank.state) for rank in again.ranks] == [
            (0, "silent"),  # nobody has been heard of yet
            (1, "dead"),
            (2, "silent"),
            (3, "silent"),
        ]
        told_again = incidents(after)
        assert [(i.incident_id, i.reason) for i in told_again] == [
            (i.incident_id, i.reason) for i in told
        ]
        for generation, layout in ((0, SURVIVORS), (1, LAYOUT), (2, SURVIVORS)):
            request = status_pb2.GetLayoutRequest(job=JOB, generation=generation)
            answer = after.status.GetLayout(request, timeout=30.0)
            assert decode_layout(answer.layout_json) == layout

        # The agents come back; the next death gets the next number.
        agent = ScriptedAgent(after.address, hello("node-0", "second"))
        agent.report_and_wait(attached(JOB, SURVIVORS))
        steps(agent, 5, 8, SURVIVORS)
        states = [rank.state for rank in ask_job(after).ranks]
        assert states == ["alive", "dead", "alive", "alive"]
        assert ask_job(after).step == 7
        agent.report_and_wait(JobReport(job=JOB, records=(killed(3),)))
        assert [(i.incident_id, i.rank) for i in incidents(after)] == [
            (told[0].incident_id, 1),
            (told[0].incident_id + 1, 3),
        ]
        agent.close()


def test_a_rank_that_died_while_the_controller_was_away_is_noticed(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as before:
        agent = ScriptedAgent(before.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        before.kill()
    with ControllerProcess(tmp_path) as after:
        assert ask_job(after).generation == 1
        agent = ScriptedAgent(after.address, hello("node-0", "second"))
        # The survivors went on meanwhile; nobody speaks of rank 1 any more.
        agent.report_and_wait(attached(JOB, SURVIVORS))
        assert ask_job(after).generation == 2
        steps(agent, 5, 8, SURVIVORS)
        assert ask_job(after).step == 7
        assert "event dropped" not in after.log
        agent.close()


def test_an_acknowledged_report_is_stored_whatever_the_moment_of_the_kill(tmp_path: Path) -> None:
    names = [f"job-{i}" for i in range(40)]
    with ControllerProcess(tmp_path) as before:
        agent = ScriptedAgent(before.address)
        for name in names:
            agent.report(attached(name, LAYOUT))
        until("some are acknowledged", lambda: agent.acknowledged >= 8)
        before.kill()
        agent.wait_for_end()
        acknowledged = max(m.acknowledge.sequence for m in agent.heard if m.HasField("acknowledge"))
    with ControllerProcess(tmp_path) as after:
        jobs = after.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0).jobs
        generations = {job.name: job.generation for job in jobs}
        assert all(generations.get(name) == 1 for name in names[:acknowledged])


def test_those_who_watch_incidents_hear_the_known_ones_then_each_change(
    controller: ControllerProcess,
) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT), attached("other", LAYOUT))
    agent.report_and_wait(JobReport(job="other", records=(killed(2),)))
    everything = Watching(controller.status.WatchIncidents(status_pb2.WatchIncidentsRequest()))
    mine = Watching(controller.status.WatchIncidents(status_pb2.WatchIncidentsRequest(job=JOB)))
    until("the known one is told", lambda: everything.told)
    die_and_go_on(agent)
    until("opened and closed is told", lambda: len(mine.told) >= 2)
    assert [(m.incident.job, m.incident.rank) for m in everything.told[:2]] == [
        ("other", 2),
        (JOB, 1),
    ]
    assert not mine.told[0].incident.HasField("closed_unix_s")
    until("it is closed", lambda: mine.told[-1].incident.HasField("closed_unix_s"))
    agent.report_and_wait(JobReport(job="other", records=(killed(3),)))
    until("who died since is told", lambda: who_died(everything.told[-1].incident) == [2, 3])
    grown = everything.told[-1].incident
    assert (grown.incident_id, grown.job, grown.rank) == (1, "other", 2)
    assert {m.incident.job for m in mine.told} == {JOB}
    agent.close()


def test_those_who_watch_steps_hear_each_complete_step_once_and_in_order(
    controller: ControllerProcess,
) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT), attached("other", LAYOUT))
    mine = Watching(controller.status.WatchSteps(status_pb2.WatchStepsRequest(job=JOB)))
    until("the watch is open", lambda: _is_watched(controller, agent, mine))
    steps(agent, 100, 130)
    agent.report_and_wait(JobReport(job="other", records=step_records(0, LAYOUT)))
    until("all are told", lambda: mine.told[-1].step == 129)
    numbers = [m.step for m in mine.told if m.step >= 100]
    assert numbers == list(range(100, 130))
    assert list(mine.told[-1].ranks) == [0, 1, 2, 3]
    assert len(mine.told[-1].observed_s) == 4
    agent.close()


def _is_watched(controller: ControllerProcess, agent: ScriptedAgent, watching: Watching) -> bool:
    """A watch begins some time after the call: send steps until one is told."""
    step = ask_job(controller).step + 1
    agent.report_and_wait(JobReport(job=JOB, records=step_records(step, LAYOUT)))
    return bool(watching.told)


def test_a_watcher_that_does_not_read_stalls_nobody(controller: ControllerProcess) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    sleepers = [controller.status.WatchSteps(status_pb2.WatchStepsRequest()) for _ in range(5)]
    for first in range(0, 2000, 100):  # more than its queue and its flow control window hold
        records = tuple(
            record for step in range(first, first + 100) for record in step_records(step, LAYOUT)
        )
        agent.report(JobReport(job=JOB, records=records))
    agent.report_and_wait()
    assert ask_job(controller).step == 1999
    assert "event dropped" not in controller.log
    for sleeper in sleepers:
        sleeper.cancel()
    agent.close()


def test_unknown_names_are_answered_with_those_there_are(controller: ControllerProcess) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    asked = [
        (controller.status.GetJob, status_pb2.GetJobRequest(job="tran"), "train"),
        (controller.status.ListIncidents, status_pb2.ListIncidentsRequest(job="tran"), "train"),
        (controller.status.GetLayout, status_pb2.GetLayoutRequest(job="tran"), "train"),
        (
            controller.status.GetLayout,
            status_pb2.GetLayoutRequest(job=JOB, generation=9),
            "job train has no layout of generation 9",
        ),
    ]
    for call, request, words in asked:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=30.0)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert words in str(caught.value.details())
    agent.close()


def test_a_rank_whose_agent_is_away_is_silent_and_not_dead(controller: ControllerProcess) -> None:
    left, right = ScriptedAgent(controller.address), ScriptedAgent(controller.address, hello("b"))
    left.report_and_wait(attached(JOB, LAYOUT))
    right.report_and_wait(JobReport(job=JOB, attached=tuple(attachments(JOB, (2, 3)))))
    steps(left, 0, 3)
    assert [rank.state for rank in ask_job(controller).ranks] == ["alive"] * 4
    right.close()
    expected = ["alive", "alive", "silent", "silent"]
    until("silence", lambda: [r.state for r in ask_job(controller).ranks] == expected)
    assert incidents(controller) == [], "silence is no death"
    left.close()


def test_health_and_reflection_answer(controller: ControllerProcess) -> None:
    health: Any = health_pb2_grpc.HealthStub(controller.channel)
    for service in (
        "",
        "pacekeeper.v1.AgentControlService",
        "pacekeeper.v1.StatusService",
    ):
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request, timeout=30.0).status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(controller.channel).get_services()
    assert {"pacekeeper.v1.OperatorService", "pacekeeper.v1.StatusService"} <= set(services)


def test_sigterm_says_goodbye_to_all_and_ends_with_0(controller: ControllerProcess) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    watching = Watching(controller.status.WatchIncidents(status_pb2.WatchIncidentsRequest()))
    die_and_go_on(agent)
    until("the watch is open", lambda: watching.told)
    assert controller.process.poll() is None
    controller.process.terminate()
    assert agent.wait_for_end()[0] is grpc.StatusCode.UNAVAILABLE
    ended = watching.wait_for_end()
    assert ended.code() is grpc.StatusCode.UNAVAILABLE
    assert controller.process.wait(PATIENCE_S) == ExitCode.OK
    assert "Traceback" not in controller.log
    assert "never awaited" not in controller.log


def test_sigterm_at_once_ends_with_0_too(tmp_path: Path) -> None:
    for _ in range(3):  # while the heavy imports of the background thread are under way
        with ControllerProcess(tmp_path, is_fresh=True) as controller:
            assert controller.stop() == ExitCode.OK
            assert "Fatal" not in controller.log
