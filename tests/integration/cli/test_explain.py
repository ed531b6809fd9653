"""`pacekeeper explain` and the orders of people, from the terminal to the machine and back."""

import json
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from support.commands import pacekeeper
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
    until,
)

JOB = "train"
LAYOUT = first_layout()
WARM = 30  # steps in which all are well
PNG = b"\x89PNG\r\n"


def said(*arguments: str, code: int = ExitCode.OK) -> str:
    done = pacekeeper(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code == ExitCode.OK else done.stderr


def orders(where: tuple[str, ...]) -> list[tuple[str, str]]:
    """(kind, subject) of the orders that `status` shows of the job."""
    (job,) = json.loads(said("status", "--json", *where))["jobs"]
    return [(order["kind"], order["subject"]) for order in job["orders"]]


def trained(agent: ScriptedAgent) -> None:
    """Rank 2 is slow after a while."""
    agent.report_and_wait(attached(JOB, LAYOUT))
    for number in range(WARM + 8):
        records = step_records(number, LAYOUT, {2: 1.8} if number >= WARM else None)
        agent.report(JobReport(job=JOB, records=records))
    agent.report_and_wait()


def test_an_incident_is_explained_before_and_after_a_restart(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        where = ("--controller", controller.api)
        agent = ScriptedAgent(controller.address)
        said("dry-run", "on", "--reason", "a trial", *where)
        trained(agent)

        def decided() -> Any:
            told = json.loads(said("explain", "1", "--json", *where))
            return told if any(plan["considered"] for plan in told["plans"]) else None

        told = until("a decision and what was passed over are noted", decided)
        said("explain", "1", "--plot", str(tmp_path / "plot.png"), *where)
        agent.close()
        assert controller.stop() == 0
    assert (told["incident"]["rank"], told["incident"]["node"]) == (2, "node-0")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    timeline = told["timeline"]
    assert timeline["step"][0] == 0 and len({len(column) for column in timeline.values()}) == 1
    assert told["measured"]["slowdown"] == pytest.approx(1.8, rel=0.05)

    with ControllerProcess(tmp_path) as controller:
        where = ("--controller", controller.api)
        again = json.loads(said("explain", "1", "--json", *where))
        assert again["timeline"]["step"] == timeline["step"]
        said("explain", "9", *where, code=ExitCode.USAGE)
        assert orders(where) == [("dry_run", "")], "the dry run outlived the restart"
        said("dry-run", "off", *where)


def test_cordon_and_pause_are_said_shown_and_taken_back(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        where = ("--by", "ada", "--controller", controller.api)
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        given = json.loads(said("cordon", "node-0", "--json", *where))
        assert (given["kind"], given["is_on"]) == ("cordon_node", True)
        said("cordon", f"{JOB}/3", "--reason", "warm", *where)
        said("pause", JOB, *where)
        known = [("cordon_node", "node-0"), ("cordon_rank", f"{JOB}/3"), ("pause", JOB)]
        assert sorted(orders(where[2:])) == known
        assert "node-9" in said("cordon", "node-9", *where, code=ExitCode.USAGE)
        for command, subject in (
            ("uncordon", f"{JOB}/3"),
            ("uncordon", "node-0"),
            ("resume", JOB),
        ):
            assert json.loads(said(command, subject, "--json", *where))["is_on"] is False
        assert orders(where[2:]) == []
        agent.close()
