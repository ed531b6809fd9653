"""`pacekeeper incidents`: what was found, why, what was done; "none" never means "misspelt"."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports
from support.commands import Started, pacekeeper
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    applied,
    attached,
    first_layout,
    killed,
)

LAYOUT = first_layout()
NODE = "rack[b]-7"  # brackets are text, not markup
SURVIVORS = shrink(LAYOUT, dead=[1], generation=2)


def go_on_without_rank_1(agent: ScriptedAgent, job: str) -> None:
    layouts = ((SURVIVORS.generation, encode_layout(SURVIVORS)),)
    records = applied(SURVIVORS, step=5)
    agent.report_and_wait(JobReport(job=job, layouts=layouts, records=records))


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    """Job "a": a death that is over. Job "b": a death that is open. Job "c": nothing."""
    with ControllerProcess(tmp_path_factory.mktemp("incidents")) as process:
        hello = control_pb2.Hello(
            protocol_version=reports.PROTOCOL_VERSION,
            product_version="0",
            node=NODE,
            agent_incarnation="x",
        )
        agent = ScriptedAgent(process.address, hello)
        agent.report_and_wait(*(attached(job, LAYOUT) for job in "abc"))
        agent.report_and_wait(JobReport(job="a", records=(killed(1),)))
        go_on_without_rank_1(agent, "a")
        agent.report_and_wait(JobReport(job="b", records=(killed(3),)))
        yield process
        agent.close()


def listed(controller: ControllerProcess, *arguments: str) -> list[Any]:
    done = pacekeeper("incidents", "--controller", controller.api, "--json", *arguments)
    assert done.returncode == ExitCode.OK, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, list)
    return answer


def test_a_program_gets_them_in_order_with_numbers_as_numbers(
    controller: ControllerProcess,
) -> None:
    first, second = listed(controller)
    assert (first["incident_id"], first["job"], first["rank"]) == (1, "a", 1)
    assert (second["incident_id"], second["job"], second["rank"]) == (2, "b", 3)
    assert first["node"] == NODE
    assert first["closed_unix_s"] >= first["opened_unix_s"] > 1e9, "Unix time"
    assert second["closed_unix_s"] is None and second["closed_step"] is None
    assert second["slowdown"] is None, "infinite: no number JSON knows"


def test_they_can_be_narrowed_to_open_ones_and_to_a_job(controller: ControllerProcess) -> None:
    assert [i["job"] for i in listed(controller, "--open")] == ["b"]
    assert [i["job"] for i in listed(controller, "--job", "a")] == ["a"]
    assert listed(controller, "--job", "a", "--open") == []
    assert [i["incident_id"] for i in listed(controller, "--last", "1")] == [2]
    assert [i["incident_id"] for i in listed(controller, "--last", "9")] == [1, 2]


def test_people_read_what_happened_why_and_what_was_done(controller: ControllerProcess) -> None:
    done = pacekeeper("incidents", "--controller", controller.api, "--job", "a")
    assert done.returncode == ExitCode.OK, done.stderr
    head, *_ = done.stdout.splitlines()
    assert head.startswith("#1 ") and NODE in head


def test_none_is_said_and_a_misspelt_job_is_not_none(controller: ControllerProcess) -> None:
    address = controller.api
    assert pacekeeper("incidents", "--controller", address, "--job", "c").returncode == ExitCode.OK
    wrong = pacekeeper("incidents", "--controller", address, "--job", "d")
    assert (wrong.returncode, wrong.stdout) == (ExitCode.USAGE, "")
    assert "'d'" in wrong.stderr


def test_a_watch_tells_known_ones_then_changes_until_ctrl_c(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with ControllerProcess(tmp_path_factory.mktemp("watched")) as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached("a", LAYOUT), attached("b", LAYOUT))
        agent.report_and_wait(JobReport(job="b", records=(killed(2),)))
        agent.report_and_wait(JobReport(job="a", records=(killed(1),)))
        arguments = ("incidents", "--controller", controller.api, "--json", "--watch")
        with Started(*arguments) as everything, Started(*arguments, "--job", "a") as mine:
            assert everything.stdout is not None and mine.stdout is not None
            known = [json.loads(everything.stdout.readline())["job"] for _ in range(2)]
            assert known == ["b", "a"]
            assert json.loads(mine.stdout.readline())["closed_unix_s"] is None
            go_on_without_rank_1(agent, "a")
            for watch in (everything, mine):
                assert watch.stdout is not None
                while True:  # its action is noted, then it is closed
                    told = json.loads(watch.stdout.readline())
                    assert (told["job"], told["rank"]) == ("a", 1)
                    if told["closed_unix_s"] is not None:
                        break
                watch.send_signal(signal.SIGINT)
                assert watch.wait() == ExitCode.OK
        agent.close()


def test_a_watch_ends_with_a_reason_when_the_controller_goes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with ControllerProcess(tmp_path_factory.mktemp("going")) as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached("a", LAYOUT))
        agent.report_and_wait(JobReport(job="a", records=(killed(1),)))
        with Started("incidents", "--controller", controller.api, "--watch") as watch:
            assert watch.stdout is not None and watch.stderr is not None
            assert watch.stdout.readline().startswith("#1 ")
            assert controller.stop() == ExitCode.OK
            assert watch.wait() == ExitCode.UNREACHABLE
            assert controller.api in watch.stderr.read()
