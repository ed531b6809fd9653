"""The agents' stream over real gRPC: who is let in, what is acknowledged, who is told what."""

import hashlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import control_pb2, status_pb2, telemetry_pb2, tls
from pacekeeper.protos.convert import reports
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    attachments,
    first_layout,
    killed,
    step_records,
    until,
)

MANY = 200


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


def hello(
    node: str,
    *,
    incarnation: str = "first",
    protocol: int = reports.PROTOCOL_VERSION,
    rack: str = "",
) -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=protocol,
        product_version="9.9",
        node=node,
        agent_incarnation=incarnation,
        rack=rack,
    )


def nodes(controller: ControllerProcess) -> dict[str, status_pb2.Node]:
    answer = controller.status.ListNodes(status_pb2.ListNodesRequest(), timeout=30.0)
    return {node.name: node for node in answer.nodes}


def test_a_welcome_answers_hello_and_the_node_is_listed(controller: ControllerProcess) -> None:
    agent = ScriptedAgent(controller.address, hello("polite"))
    until("welcome", lambda: agent.is_welcome)
    assert agent.heard[0].welcome.protocol_version == reports.PROTOCOL_VERSION
    assert nodes(controller)["polite"].is_connected
    assert nodes(controller)["polite"].product_version == "9.9"
    agent.close()
    until("the node is away", lambda: not nodes(controller)["polite"].is_connected)


def test_another_protocol_version_is_told_both_versions_and_what_to_do(
    controller: ControllerProcess,
) -> None:
    agent = ScriptedAgent(controller.address, hello("old", protocol=reports.PROTOCOL_VERSION + 8))
    code, why = agent.wait_for_end()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"protocol {reports.PROTOCOL_VERSION + 8}" in why
    assert f"speaks {reports.PROTOCOL_VERSION};" in why and "install the same" in why
    assert "old" not in nodes(controller)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (control_pb2.AttachRequest(report=telemetry_pb2.NodeReport(sequence=1)), "must be Hello"),
        (control_pb2.AttachRequest(hello=hello("")), "node name"),
        (control_pb2.AttachRequest(hello=hello("a\x1b[2Jb")), "printable"),
        (control_pb2.AttachRequest(hello=hello("x" * 254)), "1 to 253"),
        (control_pb2.AttachRequest(hello=hello("x", rack="a\nb")), "rack name"),
        (control_pb2.AttachRequest(hello=hello("x", rack="x" * (65 << 10))), "must be Hello: 6"),
    ],
)
def test_who_does_not_say_who_he_is_is_refused(
    controller: ControllerProcess, first: control_pb2.AttachRequest, words: str
) -> None:
    from pacekeeper.protos import control_pb2_grpc

    with tls.client_channel(controller.address, TlsConfig()) as channel:
        stub = control_pb2_grpc.AgentControlServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Attach(iter([first]), timeout=60.0))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())


def test_each_report_is_acknowledged_soon_and_not_each_by_itself(
    controller: ControllerProcess,
) -> None:
    agent = ScriptedAgent(controller.address, hello("busy"))
    for _ in range(50):
        agent.report()
    until("all 50 are acknowledged", lambda: agent.acknowledged == 50)
    acks = [m for m in agent.heard if m.HasField("acknowledge")]
    assert len(acks) <= 16, "sparse"
    # The last one is acknowledged too, though none follows it.
    agent.report()
    until("the last one is acknowledged", lambda: agent.acknowledged == 51)
    agent.close()


def impossible_reports() -> dict[str, telemetry_pb2.NodeReport]:
    unequal = telemetry_pb2.NodeReport(sequence=1)
    unequal.jobs.add(job="bad").steps.rank.append(1)
    infinite = telemetry_pb2.NodeReport(sequence=1)
    job = infinite.jobs.add(job="bad")
    job.steps.CopyFrom(
        telemetry_pb2.StepColumns(
            rank=[0], step=[0], generation=[1], tokens=[1], duration_s=[float("inf")],
            loss=[1.0], is_redone=[False], ended_mono_s=[0.0],
        )
    )  # fmt: skip
    nameless = telemetry_pb2.NodeReport(sequence=1)
    nameless.jobs.add(job="../bad")
    strange = telemetry_pb2.NodeReport(sequence=1)
    strange.jobs.add(job="bad").attached.add(job="other", rank=0, world_size=1, clock="wall")
    beyond = telemetry_pb2.NodeReport(sequence=1)
    beyond.jobs.add(job="bad").attached.add(job="bad", rank=5, world_size=1, clock="wall")
    return {
        "entries": unequal,
        "impossible duration_s": infinite,
        "job name '../bad'": nameless,
        "attachments of other jobs": strange,
        "rank 5 is not in a world of 1": beyond,
    }


@pytest.mark.parametrize("words", impossible_reports())
def test_an_impossible_report_ends_its_stream_with_the_reason_and_nothing_else(
    controller: ControllerProcess, words: str
) -> None:
    bystander = ScriptedAgent(controller.address, hello("bystander"))
    bystander.report_and_wait()
    agent = ScriptedAgent(controller.address, hello("broken"))
    agent.say(control_pb2.AttachRequest(report=impossible_reports()[words]))
    code, why = agent.wait_for_end()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in why
    # It would block the agent's good reports if it had to be sent again for ever.
    assert [m.acknowledge.sequence for m in agent.heard if m.HasField("acknowledge")] == [1]
    bystander.report_and_wait()
    bystander.close()
    jobs = controller.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0).jobs
    assert "bad" not in {job.name for job in jobs}


def test_a_second_hello_is_no_report(controller: ControllerProcess) -> None:
    agent = ScriptedAgent(controller.address, hello("twice"))
    agent.say(control_pb2.AttachRequest(hello=hello("twice")))
    code, why = agent.wait_for_end()
    assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, "expected a report after Hello")


def test_the_newer_of_two_agents_of_one_node_stays(controller: ControllerProcess) -> None:
    older = ScriptedAgent(controller.address, hello("shared", incarnation="older"))
    older.report_and_wait()
    newer = ScriptedAgent(controller.address, hello("shared", incarnation="newer"))
    code, why = older.wait_for_end()
    assert code is grpc.StatusCode.ABORTED
    assert "another agent attached as node shared" in why
    newer.report_and_wait()
    assert nodes(controller)["shared"].is_connected, "the older one's end is not the node's"
    assert "agent newer replaces older" in controller.log
    newer.close()


def test_an_agent_that_comes_back_in_the_same_life_takes_over_its_stream(
    controller: ControllerProcess,
) -> None:
    lost = ScriptedAgent(controller.address, hello("back"))
    until("welcome", lambda: lost.is_welcome)
    again = ScriptedAgent(controller.address, hello("back"))
    again.report_and_wait()
    lost.wait_for_end()
    lost.close()
    again.report_and_wait()
    assert nodes(controller)["back"].is_connected
    assert "node=back attached anew" not in controller.log
    again.close()


def test_deaths_go_to_all_nodes_of_the_job_and_to_no_other(controller: ControllerProcess) -> None:
    layout = first_layout()
    left = ScriptedAgent(controller.address, hello("left"))
    right = ScriptedAgent(controller.address, hello("right"))
    other = ScriptedAgent(controller.address, hello("unconcerned"))
    until("all are in", lambda: left.is_welcome and right.is_welcome and other.is_welcome)
    left.report_and_wait(attached("dying", layout))
    right.report_and_wait(JobReport(job="dying", attached=tuple(attachments("dying", (2, 3)))))
    left.report_and_wait(JobReport(job="dying", records=(killed(1),)))
    until("the left node knows", lambda: left.deaths())
    until("the right node knows", lambda: right.deaths())
    assert left.deaths()[0] == right.deaths()[0] == (1,)
    # All of them, not only the new.
    left.report_and_wait(JobReport(job="dying", records=(killed(3),)))
    until("both deaths are told", lambda: (1, 3) in right.deaths())
    other.report_and_wait()
    assert other.deaths() == []
    for agent in (left, right, other):
        agent.close()


def test_a_slow_rank_brings_a_plan_whose_layout_gives_it_less(
    controller: ControllerProcess,
) -> None:
    layout = first_layout()
    agent = ScriptedAgent(controller.address, hello("plans"))
    agent.report_and_wait(attached("slow-job", layout))
    for step in range(60):
        slow = {2: 1.8} if step >= 30 else None
        agent.report(JobReport(job="slow-job", records=step_records(step, layout, slow)))
    offer = until("a plan is offered", agent.offers)[0]
    assert (offer.job, offer.base_generation) == ("slow-job", layout.generation)
    assert hashlib.sha256(offer.layout_json).digest() == offer.sha256
    plan = decode_layout(offer.layout_json)
    assert plan.generation == offer.generation > layout.generation
    shares = dict(plan.batch_shares)
    assert shares[2] < min(share for rank, share in shares.items() if rank != 2)
    # Level, not edge: it is said again until it is observed.
    heard = len(agent.offers())
    until("the plan is offered again", lambda: len(agent.offers()) > heard)
    agent.close()


def test_garbage_on_the_port_hurts_nobody(controller: ControllerProcess) -> None:
    host, _, port = controller.address.rpartition(":")
    agent = ScriptedAgent(controller.address, hello("calm"))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"PRI * HTTP/2.0\r\n\r\nSM"):
        with socket.create_connection((host, int(port)), timeout=30.0) as connection:
            connection.sendall(garbage)
    with tls.client_channel(controller.address, TlsConfig()) as channel:
        # The right method, bytes that are no message.
        attach: Any = channel.stream_stream("/pacekeeper.v1.AgentControlService/Attach")
        with pytest.raises(grpc.RpcError):
            list(attach(iter([b"\xff" * 100]), timeout=60.0))
    agent.report_and_wait()
    agent.close()


def test_many_agents_may_come_at_once(controller: ControllerProcess) -> None:
    names = [f"crowd-{i:03d}" for i in range(MANY)]
    agents = [ScriptedAgent(controller.address, hello(name)) for name in names]
    for agent in agents:
        agent.report()
    until("all are acknowledged", lambda: all(a.acknowledged >= 1 for a in agents), 60.0)
    assert all(nodes(controller)[name].is_connected for name in names)
    for agent in agents:
        agent.close()
    until("all are away", lambda: not any(nodes(controller)[n].is_connected for n in names))
