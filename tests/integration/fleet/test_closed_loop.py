"""The whole loop with real processes: found, relieved, the controller killed, a rank killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper.cli.demo.fleet import Fleet
from pacekeeper.cli.demo.recorder import read_step_log
from pacekeeper.cli.demo.run_dir import claim_run_dir
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.layout import ReplicaSet
from support.asking import Asking, quick_fleet, quick_job, until

VICTIM, KILLED = 2, 1


def set_fault(fleet: Fleet, slowdown: float) -> None:
    path = fleet.run_dir / "faults" / f"rank-{VICTIM}.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"slowdown": slowdown}))
    fresh.rename(path)


def test_the_loop_survives_the_death_of_the_controller_and_of_a_rank(tmp_path: Path) -> None:
    with quick_fleet(tmp_path, seed=3) as fleet:
        folder = fleet.run_dir
        ask = Asking(fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
        set_fault(fleet, 1.6)
        until("the layout follows the finding", lambda: ask.job().generation == 2)
        (found,) = ask.faults()
        assert (found.kind, found.rank) == ("device", VICTIM)
        assert found.slowdown == pytest.approx(1.6, rel=0.1)
        share = dict(ask.layout().batch_shares)
        assert share[VICTIM] < min(s for rank, s in share.items() if rank != VICTIM)

        # kill -9 the controller: training goes on, and a new one knows what the old one knew.
        fleet.processes["controller"].send_signal(signal.SIGKILL)
        fleet.processes["controller"].wait()
        before = len(read_step_log(folder / "train" / "steps-0.jsonl"))
        until(
            "training goes on without a controller",
            lambda: len(read_step_log(folder / "train" / "steps-0.jsonl")) > before + 2,
        )
        fleet._spawn(
            "controller",
            ["controller", "--listen", fleet.address]
            + ["--store", str(folder / "controller.sqlite")],
        )
        until("the new controller answers", lambda: ask.job().name == "loop")
        (again,) = ask.faults()
        assert (again.incident_id, again.rank) == (found.incident_id, VICTIM)
        assert not again.HasField("closed_unix_s")
        assert ask.job().generation == 2
        until("agents are back", lambda: len(ask.job().ranks) == 4 and ask.job().step > before)

        # It measures anew, sees the end of the fault, and goes home.
        until("it has measured again", lambda: ask.job().watch == "degraded")
        set_fault(fleet, 1.0)
        until("the incident is closed", lambda: ask.faults()[0].HasField("closed_unix_s"))
        even = pytest.approx([0.25] * 4)
        until("the layout goes home", lambda: [s for _, s in ask.layout().batch_shares] == even)

        fleet.kill_rank(KILLED)
        until("the survivors' layout is known", lambda: KILLED not in ask.layout().ranks)
        layout = ask.layout()
        assert all(len(hosts) >= 2 for layer in layout.experts for hosts in layer)
        assert [i.kind for i in ask.faults()] == ["device", "death"]
        until("the death is closed", lambda: ask.faults()[1].HasField("closed_unix_s"))
        states = {rank.rank: rank.state for rank in ask.job().ranks}
        assert states == {0: "alive", 1: "dead", 2: "alive", 3: "alive"}
        for rank in (0, 2, 3):
            steps = [s.step for s in read_step_log(folder / "train" / f"steps-{rank}.jsonl")]
            assert steps == list(range(len(steps)))


def test_replicas_move_in_flight_where_shares_alone_can_not_help(tmp_path: Path) -> None:
    """One host per expert: the slow rank's experts have to get another one, and leave it again."""
    with quick_fleet(tmp_path, seed=3, replicas=1) as fleet:
        ask = Asking(fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
        first = ask.layout()
        assert not any(map(has_copies, first.experts))
        set_fault(fleet, 2.0)
        # Shares, which are undone as easily, do not wait for the probe that a copy waits for.
        until("replicas move", lambda: any(map(has_copies, ask.layout().experts)))
        (found,) = ask.faults()
        assert "other expert replicas" in found.actions[-1]
        # State was moved only when a probe had borne the finding out.
        assert found.tier == "confirmed"
        assert "borne out" in found.probe
        assert "not borne out" not in found.probe
        set_fault(fleet, 1.0)
        until("the layout goes home", lambda: ask.layout().experts == first.experts)
        until("the incident is closed", lambda: ask.faults()[0].HasField("closed_unix_s"))
    for rank in range(4):
        steps = read_step_log(fleet.run_dir / "train" / f"steps-{rank}.jsonl")
        assert [s.step for s in steps] == list(range(len(steps)))
        assert steps[-1].loss < steps[0].loss


def has_copies(layer: tuple[ReplicaSet, ...]) -> bool:
    return any(len(hosts) > 1 for hosts in layer)


def test_the_demo_tells_a_program_what_happened(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pacekeeper.cli.main", "demo", "--json"]
    command += ["--config", str(quick_job(tmp_path, step_s=0.12))]
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
    assert first.tokens <= 32 * 48, "the file's rows, shorter than usual"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page.split("</head>")[1]
    assert (tmp_path / "run" / "demo.png").stat().st_size > 10_000


@pytest.mark.alone
def test_without_any_emulation_a_rank_that_does_more_is_named_and_nobody_else(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "train.toml"
    settings.write_text("[train]\nnum_layers = 2\n")  # half the work, in segments as long
    with (
        claim_run_dir(tmp_path / "run") as folder,
        Fleet(
            run_dir=folder,
            job="loop",
            steps=1_000_000,
            seed=0,
            clock="cpu",
            train_file=settings,
        ) as fleet,
    ):
        ask = Asking(fleet.address)
        until("a healthy phase", lambda: ask.job().step >= 24)
        assert ask.faults() == []
        set_fault(fleet, 1.6)
        until("it is found", lambda: bool(ask.faults()))
        found_step = ask.job().step
        until("training goes on", lambda: ask.job().step >= found_step + 12)
        assert {(i.kind, i.rank) for i in ask.faults()} == {("device", VICTIM)}
    for rank in range(4):
        steps = [s.step for s in read_step_log(folder / "train" / f"steps-{rank}.jsonl")]
        assert steps == list(range(len(steps)))


@pytest.mark.alone
def test_without_any_emulation_a_rank_that_is_stopped_is_named_and_nobody_else(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "pacekeeper.cli.main", "demo", "--json", "--clock", "cpu"]
    command += ["--rank", "1", "--steps", "80", "--fault", "stop", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["injected_rank"], outcome["found_rank"]) == (1, 1)
    assert outcome["steps_lost"] == 0
    # Stops that fall into a rank's waiting cost it nothing: it may be named again, nobody else is.
    _, incidents, _ = Store.open(tmp_path / "controller.sqlite").load()
    devices = [i.finding for i in incidents if i.finding.kind is FindingKind.DEVICE]
    assert {finding.rank for finding in devices} == {1}
    assert outcome["fluid_limit_tokens_per_s"] is None  # shared cores: no throughput is claimed
