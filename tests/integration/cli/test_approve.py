"""`pacekeeper approve` and `deny`: a person's word, from the terminal to the ranks."""

import json
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import status_pb2
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


def is_proposed(controller: ControllerProcess) -> bool:
    job: Any = controller.status.GetJob(status_pb2.GetJobRequest(job=JOB), timeout=30.0).job
    return bool(job.HasField("proposal"))


def slow_down(agent: ScriptedAgent) -> None:
    """Rank 2 is slow after a while."""
    for number in range(WARM + 12):
        records = step_records(number, LAYOUT, {2: 1.8} if number >= WARM else None)
        agent.report(JobReport(job=JOB, records=records))
    agent.report_and_wait()


def test_a_plan_is_denied_and_the_next_one_approved(tmp_path: Path) -> None:
    config = tmp_path / "pacekeeper.toml"
    config.write_text('[policy]\nmode = "approve"\napprove = "all"\n')
    with ControllerProcess(tmp_path, "--config", str(config)) as controller:
        where = ("--controller", controller.api)
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        slow_down(agent)
        until("a plan is proposed", lambda: is_proposed(controller))

        (job,) = json.loads(pacekeeper("status", "--json", *where).stdout)["jobs"]
        assert (job["proposal"]["proposal_id"], job["proposal"]["answer"]) == (1, "waiting")
        denial = ("deny", "1", "--reason", "a release is on", "--by", "ada", "--json")
        denied = pacekeeper(*denial, *where)
        assert denied.returncode == ExitCode.OK, denied.stderr
        answer = json.loads(denied.stdout)
        assert (answer["answer"], answer["note"]) == ("denied", "a release is on")
        assert "ada" in answer["operator"] and "127.0.0.1" in answer["operator"]
        again = pacekeeper("approve", "1", *where)
        assert (again.returncode, again.stdout) == (ExitCode.USAGE, "")
        assert "ada" in again.stderr
        assert agent.offers() == []

        until("the next best is proposed", lambda: is_proposed(controller))
        approved = pacekeeper("approve", "2", "--by", "bob", "--json", *where)
        assert approved.returncode == ExitCode.OK, approved.stderr
        answer = json.loads(approved.stdout)
        assert answer["answer"] == "offered" and answer["operator"].startswith("bob")
        (offer, *_) = until("the plan is offered", agent.offers)
        assert offer.generation == answer["generation"]
        (incident,) = json.loads(pacekeeper("incidents", "--json", *where).stdout)
        names = [name for text in incident["actions"] for name in ("ada", "bob") if name in text]
        assert list(dict.fromkeys(names)) == ["ada", "bob"]
        agent.close()
