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


def trained(agent: ScriptedAgent) -> None:
    """Rank 2 is slow after a while."""
    agent.report_and_wait(attached(JOB, LAYOUT))
    for number in range(WARM + 8):
        records = step_records(number, LAYOUT, {2: 1.8} if number >= WARM else None)
        agent.report(JobReport(job=JOB, records=records))
    agent.report_and_wait()


def test_an_incident_is_explained_before_and_after_a_restart(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        where = ("--controller", controller.address)
        agent = ScriptedAgent(controller.address)
        said("dry-run", "on", "--reason", "a trial", *where)
        trained(agent)

        def decided() -> Any:
            told = json.loads(said("explain", "1", "--json", *where))
            return told if told["plans"] else None

        told = until("a decision is noted", decided)
        text = said("explain", "1", "--plot", str(tmp_path / "plot.png"), *where)
        agent.close()
        assert controller.stop() == 0
    assert "rank 2 on node-0" in text and "What was decided" in text
    assert "in the median of" in text and "forecast: a step from" in text
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    course = told["course"]
    assert course["step"][0] == 0 and len({len(column) for column in course.values()}) == 1
    assert told["measured"]["slowdown"] == pytest.approx(1.8, rel=0.05)
    assert told["plans"][-1]["considered"], "what was passed over is told"

    with ControllerProcess(tmp_path) as controller:
        where = ("--controller", controller.address)
        again = json.loads(said("explain", "1", "--json", *where))
        assert again["course"]["step"] == course["step"]
        assert "no incident 9" in said("explain", "9", *where, code=ExitCode.USAGE)
        assert "none is offered" in said("status", *where), "the dry run outlived the restart"
        said("dry-run", "off", *where)


def test_cordon_and_pause_are_said_shown_and_taken_back(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        where = ("--by", "ada", "--controller", controller.address)
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        assert "node node-0 is cordoned since" in said("cordon", "node-0", *where)
        said("cordon", f"{JOB}/3", "--reason", "warm", *where)
        said("pause", JOB, *where)
        shown = said("status", *where[2:])
        assert f"rank {JOB}/3 is cordoned" in shown and f"job {JOB} is paused" in shown
        assert "alive cordoned" in shown and "attached cordoned" in shown
        unknown = said("cordon", "node-9", *where, code=ExitCode.USAGE)
        assert "no node 'node-9'; there are: node-0" in unknown
        for command, subject in (
            ("uncordon", f"{JOB}/3"),
            ("uncordon", "node-0"),
            ("resume", JOB),
        ):
            assert said(command, subject, *where).startswith("taken back: ")
        assert "cordoned" not in said("status", *where[2:])
        agent.close()
