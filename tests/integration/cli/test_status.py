"""`pacekeeper status`: readable for people, complete for programs, honest about what is unknown."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from support.commands import Started, pacekeeper
from support.controllers import (
    HELLO,
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    killed,
    step_records,
)

LAYOUT = first_layout()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    """One that knows job "a" (rank 2 slow, rank 3 dead) and job "b" (just attached)."""
    with ControllerProcess(tmp_path_factory.mktemp("status")) as process:
        agent = ScriptedAgent(process.address)
        agent.report_and_wait(attached("a", LAYOUT), attached("b", LAYOUT))
        for step in range(50):
            slow = {2: 1.8} if step >= 30 else None
            agent.report(JobReport(job="a", records=step_records(step, LAYOUT, slow)))
        agent.report_and_wait(JobReport(job="a", records=(killed(3),)))
        yield process
        agent.close()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path_factory.mktemp("empty")) as process:
        yield process


def document(controller: ControllerProcess, *arguments: str) -> Any:
    done = pacekeeper("status", "--controller", controller.api, "--json", *arguments)
    assert done.returncode == ExitCode.OK, done.stderr
    return json.loads(done.stdout)


def test_a_proxy_of_the_environment_is_not_asked_for_the_way(
    controller: ControllerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert document(controller)["jobs"]


def test_a_program_gets_jobs_ranks_and_nodes(controller: ControllerProcess) -> None:
    answer = document(controller)
    assert [job["name"] for job in answer["jobs"]] == ["a", "b"]
    job = answer["jobs"][0]
    assert (job["step"], job["generation"], job["open_incidents"]) == (49, 1, 2)
    assert [rank["state"] for rank in job["ranks"]] == ["alive", "alive", "alive", "dead"]
    assert job["ranks"][2]["slowdown"] == pytest.approx(1.8, rel=0.1)
    assert sum(rank["batch_share"] for rank in job["ranks"]) == pytest.approx(1.0)
    (node,) = answer["nodes"]
    assert (node["name"], node["is_connected"], node["jobs"]) == (HELLO.node, True, ["a", "b"])
    assert node["rack"] == HELLO.rack


def test_what_is_unknown_is_null_for_a_program(controller: ControllerProcess) -> None:
    job = document(controller, "--job", "b")["jobs"][0]
    assert job["loss"] is None
    assert [rank["slowdown"] for rank in job["ranks"]] == [None] * 4


def test_one_job_may_be_asked_for(controller: ControllerProcess) -> None:
    answer = document(controller, "--job", "b")
    assert [job["name"] for job in answer["jobs"]] == ["b"]


def test_a_job_that_is_not_there_is_the_users_mistake(controller: ControllerProcess) -> None:
    done = pacekeeper("status", "--controller", controller.api, "--job", "c")
    assert done.returncode == ExitCode.USAGE
    assert "'c'" in done.stderr


def test_people_get_tables_that_are_whole_where_the_output_is_a_file(
    controller: ControllerProcess,
) -> None:
    done = pacekeeper("status", "--controller", controller.api)
    assert done.returncode == ExitCode.OK, done.stderr
    lines = done.stdout.splitlines()
    header = next(line for line in lines if "suspicion" in line)
    for column in ("rank", "node", "state", "slowdown", "observed", "expected", "replicas"):
        assert column in header
    row = next(line.split() for line in lines if line.split()[:1] == ["2"])
    assert row[1:3] == [HELLO.node, "alive"]
    assert row[3].startswith("x1.")
    assert any(line.split()[:3] == ["3", HELLO.node, "dead"] for line in lines)
    assert any("measuring" in line for line in lines), "job b"
    assert any(line.split()[:3] == [HELLO.node, "connected", HELLO.rack] for line in lines)
    assert "..." not in done.stdout and "\N{HORIZONTAL ELLIPSIS}" not in done.stdout


def test_a_controller_without_jobs_says_so(empty: ControllerProcess) -> None:
    done = pacekeeper("status", "--controller", empty.api)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert document(empty) == {"jobs": [], "nodes": []}


def test_a_watch_gives_one_document_per_line_until_ctrl_c(controller: ControllerProcess) -> None:
    with Started("status", "--controller", controller.api, "--json", "--watch") as watch:
        assert watch.stdout is not None
        for _ in range(2):
            assert len(json.loads(watch.stdout.readline())["jobs"]) == 2
        watch.send_signal(signal.SIGINT)
        assert watch.wait() == ExitCode.OK


def test_a_watch_ends_with_a_reason_when_the_controller_goes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        ControllerProcess(tmp_path_factory.mktemp("going")) as going,
        Started("status", "--controller", going.api, "--json", "--watch") as watch,
    ):
        assert watch.stdout is not None and watch.stderr is not None
        watch.stdout.readline()
        going.kill()
        assert watch.wait() == ExitCode.UNREACHABLE
        assert going.api in watch.stderr.read()


def test_the_fleet_is_told_by_what_was_found_of_its_devices(controller: ControllerProcess) -> None:
    def fleet(*arguments: str) -> str:
        done = pacekeeper("fleet", "--controller", controller.api, *arguments)
        assert done.returncode == ExitCode.OK, done.stderr
        return done.stdout

    (node,) = json.loads(fleet("--json"))["nodes"]
    (strike,) = node["strikes"]
    assert (strike["job"], strike["kind"]) == ("a", "device") and strike["slowdown"] > 1.5
    assert node["name"] in fleet() and node["name"] in fleet(node["name"])
    none = pacekeeper("fleet", "--controller", controller.api, "elsewhere")
    assert none.returncode == ExitCode.USAGE and "elsewhere" in none.stderr
