"""The whole loop with real processes: replicas that move, the demo, real clocks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.cli.demo.job import demo_config, write_job
from pacekeeper.cli.demo.recorder import read_step_log
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.layout import ReplicaSet
from support.asking import Asking, assert_no_step_is_lost, quick_fleet, quick_job, until

pytest.importorskip("transformers")

VICTIM = 2


def test_replicas_move_in_flight_where_shares_alone_can_not_help(tmp_path: Path) -> None:
    """One host per expert: the slow rank's experts have to get another one, and leave it again."""
    with quick_fleet(tmp_path, quick_job(tmp_path, seed=1, replicas=1)) as fleet:
        ask = Asking(fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
        first = ask.layout()
        assert not any(map(has_copies, first.experts))
        fleet.set_fault(VICTIM, 2.0)
        # Shares, which are undone as easily, do not wait for the probe that a copy waits for.
        until("replicas move", lambda: any(map(has_copies, ask.layout().experts)))
        (found,) = ask.faults()
        assert "other expert replicas" in found.actions[-1]
        # State was moved only when a probe had confirmed the finding.
        assert found.tier == "confirmed"
        assert found.probe.endswith(": confirmed")
        fleet.set_fault(VICTIM, 1.0)
        until("the layout goes home", lambda: ask.layout().experts == first.experts)
        until("the incident is closed", lambda: ask.faults()[0].HasField("closed_unix_s"))
    assert_no_step_is_lost(fleet, range(4))
    for rank in range(4):
        steps = read_step_log(fleet.run_dir / "train" / f"steps-{rank}.jsonl")
        assert steps[-1].loss < steps[0].loss


def has_copies(layer: tuple[ReplicaSet, ...]) -> bool:
    return any(len(hosts) > 1 for hosts in layer)


def test_the_demo_tells_a_program_what_happened(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pacekeeper.cli.main", "demo", "--json"]
    config = tmp_path / "quick.toml"
    config.write_text("[engine]\nrow_tokens = 16\nemulated_step_s = 0.15\n")
    command += ["--config", str(config)]
    command += ["--rank", "0", "--steps", "80", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["injected_rank"], outcome["found_rank"]) == (0, 0)
    assert outcome["found_slowdown"] == pytest.approx(1.6, rel=0.1)
    assert (outcome["false_findings"], outcome["steps_lost"]) == (0, 0)
    assert outcome["loss_last"] < outcome["loss_first"]
    assert outcome["survivors"] == 3
    first = read_step_log(tmp_path / "run" / "train" / "steps-0.jsonl")[0]
    assert first.tokens == 64 * 16, "the file's rows, shorter than usual"
    page = (tmp_path / "run" / "report.html").read_text()
    # Not "http": four letters that base64 of a plot may hold.
    assert "data:image/png;base64," in page and "://" not in page
    assert (tmp_path / "run" / "demo.png").stat().st_size > 10_000


@pytest.mark.alone
def test_without_any_emulation_a_rank_that_does_more_is_named_and_nobody_else(
    tmp_path: Path,
) -> None:
    config = demo_config(tmp_path / "run", steps=1_000_000, seed=0, clock="cpu", config_file=None)
    with quick_fleet(tmp_path, replace(config, job="loop"), write_job) as fleet:
        ask = Asking(fleet.address)
        until("a healthy phase", lambda: ask.job().step >= 24)
        assert ask.faults() == []
        fleet.set_fault(VICTIM, 1.6)
        until("it is found", lambda: bool(ask.faults()))
        found_step = ask.job().step
        until("training goes on", lambda: ask.job().step >= found_step + 12)
        assert {(i.kind, i.rank) for i in ask.faults()} == {("device", VICTIM)}
    assert_no_step_is_lost(fleet, range(4))


@pytest.mark.alone
def test_without_any_emulation_a_rank_that_is_stopped_is_named_and_nobody_else(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "pacekeeper.cli.main", "demo", "--json", "--clock", "cpu"]
    command += ["--run-dir", str(tmp_path / "run")]
    command += ["--rank", "1", "--steps", "240", "--fault", "stop"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["injected_rank"], outcome["found_rank"]) == (1, 1)
    assert outcome["steps_lost"] == 0
    # Stops that fall into a rank's waiting cost it nothing: it may be named again, nobody else is.
    _, incidents, _ = Store.open(tmp_path / "run" / "controller.sqlite").load()
    devices = [i.finding for i in incidents if i.finding.kind is FindingKind.DEVICE]
    assert {finding.rank for finding in devices} == {1}
    assert outcome["fluid_limit_tokens_per_s"] is None  # shared cores: no throughput is claimed
