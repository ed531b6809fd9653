"""Fault script of the demo: slows, restores and kills ranks at the steps of the schedule."""

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.cli.demo.fleet import NUM_RANKS, Fleet
from pacekeeper.cli.demo.live_view import LiveView
from pacekeeper.cli.demo.metrics import (
    GroundTruth,
    LoggedStep,
    Outcome,
    Schedule,
    compute_outcome,
    step_at,
)
from pacekeeper.cli.demo.recorder import Recorder, read_injected_faults, read_step_log
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.trainer.emulation.faults import COMPUTE_FAULT, stop_duty_cycle

FIRST_STEP_TIMEOUT_S = 180.0  # ranks load large libraries first, on busy machines for a while
SILENCE_TIMEOUT_S = 60.0
STOP_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript:
    """Slow rank, kind of fault, killed rank, and the generator that chooses the moment."""

    victim: int
    slowdown: float
    fault: str
    killed: int
    chosen: random.Random


class ScriptRunner:
    """Injects the faults; `truth` holds what was injected, for the figures only."""

    def __init__(
        self, *, fleet: Fleet, schedule: Schedule, folder: Path, fault: str = COMPUTE_FAULT
    ) -> None:
        self.fleet = fleet
        self.fault = fault
        self.schedule = schedule
        self.folder = folder
        self.recorder = Recorder(address=fleet.address, job=fleet.config.job)
        self.truth: GroundTruth | None = None
        self._is_lifted = threading.Event()

    def play(self, view: LiveView, script: FaultScript) -> None:
        """Run the script to the end of the job.

        Raises:
            PacekeeperError: the job stalls or a process of the fleet ends early.
        """
        victim, slowdown, killed = script.victim, script.slowdown, script.killed
        self._until(view, self.schedule.fault_step)
        began_s = self._begin_fault(victim, slowdown)
        self.recorder.add_event("fault", f"rank {victim} is slowed by x{slowdown:g}")
        self._until(view, self.schedule.lift_step)
        lifted_s = self._lift_fault(victim)
        self.recorder.add_event("lift", f"rank {victim} runs at full speed again")
        self._until(view, self.schedule.kill_step)
        # At any moment within a step.
        time.sleep(script.chosen.random() * 0.4)
        kill_s = self.fleet.kill_rank(killed)
        self.recorder.add_event("kill", f"rank {killed} is killed (SIGKILL)")
        self._until(view, self.schedule.steps)
        if self.fault == COMPUTE_FAULT:
            first, began_s = self._truth_entry(victim, after_s=0.0)
            lifted, _ = self._truth_entry(victim, after_s=began_s)
        else:
            log = self.logs()[victim]
            first, lifted = step_at(log, began_s) + 1, step_at(log, lifted_s) + 1
        self.truth = GroundTruth(
            rank=victim,
            slowdown=slowdown,
            fault_first_step=first,
            fault_s=began_s,
            lift_first_step=lifted,
            killed_rank=killed,
            kill_s=kill_s,
        )
        self.recorder.close()
        view.update()

    def outcome(self) -> Outcome:
        """Compute the figures from the logs."""
        assert self.truth is not None, "play() comes before outcome()"
        return compute_outcome(
            logs=self.logs(),
            incidents=list(self.recorder.incidents.values()),
            truth=self.truth,
            schedule=self.schedule,
            trained=self.fleet.config,
        )

    def logs(self) -> dict[int, tuple[LoggedStep, ...]]:
        """Return the committed steps of each rank's log."""
        return {r: read_step_log(self._log_path(r)) for r in range(NUM_RANKS)}

    def _log_path(self, rank: int) -> Path:
        return self.folder / "train" / f"steps-{rank}.jsonl"

    def _until(self, view: LiveView, step: int) -> None:
        """Wait until `step` steps are complete or the job ended; redraw the view meanwhile."""
        seen, moved_s = -1, time.monotonic()
        while not self.fleet.is_training_finished:
            self.fleet.check()
            view.update()
            newest = self.recorder.steps[-1].step if self.recorder.steps else -1
            if newest > seen:
                seen, moved_s = newest, time.monotonic()
            if seen + 1 >= step and step < self.schedule.steps:
                return
            timeout_s = FIRST_STEP_TIMEOUT_S if seen < 0 else SILENCE_TIMEOUT_S
            if time.monotonic() - moved_s > timeout_s:
                raise PacekeeperError(
                    f"no step for {timeout_s:.0f} s"
                    + (f" after step {seen}" if seen >= 0 else ": the ranks did not start"),
                    remedy=f"see the logs in {self.folder / 'logs'}",
                )
            time.sleep(0.05)
        self.fleet.check()  # all launchers ended: successfully?
        if step < self.schedule.steps:
            raise PacekeeperError(
                f"training ended before step {step}", remedy=f"see {self.folder / 'logs'}"
            )

    def _begin_fault(self, rank: int, slowdown: float) -> float:
        """Slow the rank down; return the monotonic time just before."""
        began_s = time.monotonic()
        if self.fault == COMPUTE_FAULT:
            self.fleet.set_fault(rank, slowdown)
        else:
            threading.Thread(
                target=stop_duty_cycle,
                args=(self.fleet.pid_of(rank),),
                kwargs={
                    "duty": 1.0 - 1.0 / slowdown,
                    "period_s": STOP_PERIOD_S,
                    "is_over": self._is_lifted.is_set,
                },
                daemon=True,
            ).start()
        return began_s

    def _lift_fault(self, rank: int) -> float:
        self._is_lifted.set()
        if self.fault == COMPUTE_FAULT:
            self.fleet.set_fault(rank, 1.0)
        return time.monotonic()

    def _truth_entry(self, rank: int, *, after_s: float) -> tuple[int, float]:
        """Return (step, time) of the rank's first change in the fault injector's log since then."""
        for entry in read_injected_faults(self.folder / "faults" / "truth.jsonl"):
            if entry["rank"] == rank and entry["mono_s"] > after_s:
                return int(entry["step"]), float(entry["mono_s"])
        raise PacekeeperError(
            "a fault of the demo was not applied by the rank",
            remedy=f"see the logs in {self.folder / 'logs'}",
        )
