"""The demo's fleet says which of its parts ended, why, and with what code."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.cli.demo.fleet import Fleet
from pacekeeper.cli.demo.metrics import Schedule
from pacekeeper.cli.demo.run_dir import claim_run_dir
from pacekeeper.cli.demo.script import FaultScript, ScriptRunner
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode, PacekeeperError
from pacekeeper.trainer.emulation.faults import COMPUTE_FAULT

SCHEDULE = Schedule.of(80)


class NoView:
    def update(self) -> None:
        pass


def fleet_of(run_dir: Path, codes: dict[str, int], log: str = "") -> Fleet:
    """A fleet whose parts have ended with these codes, each having written `log`."""
    with claim_run_dir(run_dir):
        fleet = Fleet(run_dir=run_dir, config=EngineConfig(job="demo", steps=80))
    fleet.address = "127.0.0.1:1"  # nobody is asked
    for name, code in codes.items():
        (run_dir / "logs" / f"{name}.log").write_text(log)
        fleet.processes[name] = subprocess.Popen([sys.executable, "-c", f"exit({code})"])
        fleet.processes[name].wait()
    return fleet


@pytest.mark.parametrize(
    ("code", "expected"),
    [(4, ExitCode.HOST), (8, ExitCode.NO_QUORUM), (77, ExitCode.INTERNAL), (-9, ExitCode.INTERNAL)],
)
def test_a_part_that_fails_passes_on_its_words_and_its_code(
    code: int, expected: ExitCode, tmp_path: Path
) -> None:
    raised = "import os; os.kill(os.getpid(), 9)" if code < 0 else f"exit({code})"
    fleet = fleet_of(tmp_path, {"launch-0": 0}, log="much\npacekeeper: no room; make some\n")
    (tmp_path / "logs" / "launch-1.log").write_text("much\npacekeeper: no room; make some\nmore\n")
    fleet.processes["launch-1"] = subprocess.Popen([sys.executable, "-c", raised])
    fleet.processes["launch-1"].wait()
    with pytest.raises(PacekeeperError, match=r"launch-1.*no room") as found:
        fleet.check()
    assert found.value.exit_code == expected


def test_a_part_without_words_of_its_own_is_told_by_the_end_of_its_log(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, {"agent-0": 0}, log="first\nlast\n")
    with pytest.raises(PacekeeperError, match=r"agent-0(.|\n)*first\nlast") as found:
        fleet.check()
    assert found.value.exit_code == ExitCode.INTERNAL


def director_of(fleet: Fleet) -> ScriptRunner:
    return ScriptRunner(fleet=fleet, schedule=SCHEDULE, folder=fleet.run_dir)


def test_launchers_that_all_failed_between_two_looks_are_not_taken_for_an_early_end(
    tmp_path: Path,
) -> None:
    director = director_of(fleet_of(tmp_path, {"launch-0": 4, "launch-1": 4}))
    view: Any = NoView()
    with pytest.raises(PacekeeperError, match="launch-0") as found:
        story = FaultScript(
            victim=0, slowdown=1.6, fault=COMPUTE_FAULT, killed=1, chosen=random.Random(0)
        )
        director.play(view, story)
    assert found.value.exit_code == ExitCode.HOST


def test_a_launcher_that_fails_in_the_last_phase_fails_the_demo(tmp_path: Path) -> None:
    director = director_of(fleet_of(tmp_path, {"launch-0": 0, "launch-1": 7}))
    view: Any = NoView()
    with pytest.raises(PacekeeperError, match="launch-1") as found:
        director._until(view, SCHEDULE.steps)
    assert found.value.exit_code == ExitCode.LOST_STATE


def test_launchers_that_ended_well_but_early_are_told_so(tmp_path: Path) -> None:
    director = director_of(fleet_of(tmp_path, {"launch-0": 0, "launch-1": 0}))
    view: Any = NoView()
    with pytest.raises(PacekeeperError, match=str(SCHEDULE.fault_step)):
        director._until(view, SCHEDULE.fault_step)
    director._until(view, SCHEDULE.steps)
