"""Does to the job what the schedule says, when the job's own steps say it is time."""

import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.cli.demo.fleet import NUM_RANKS, Fleet
from pacekeeper.cli.demo.live_view import View
from pacekeeper.cli.demo.metrics import LoggedStep, Outcome, Schedule, Truth, judge, step_at
from pacekeeper.cli.demo.recorder import Recorder, read_step_log, read_truth
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.trainer.emulation.device import COMPUTE_FAULT, stop_duty_cycle

JOB = "demo"
SILENCE_TIMEOUT_S = 60.0
STOP_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """`victim` is slowed by a `fault` of that kind, then `killed` dies at a moment `chosen`."""

    victim: int
    slowdown: float
    fault: str
    killed: int
    chosen: random.Random


class Director:
    """The hand that harms the job; everything it knows of the answer stays in `truth`."""

    def __init__(
        self, *, fleet: Fleet, schedule: Schedule, folder: Path, fault: str = COMPUTE_FAULT
    ) -> None:
        self.fleet = fleet
        self.fault = fault
        self.schedule = schedule
        self.folder = folder
        self.recorder = Recorder(address=fleet.address, job=JOB)
        self.truth: Truth | None = None
        self._is_lifted = threading.Event()

    def play(self, view: View, story: Story) -> None:
        """Run the story to its end. Raises PacekeeperError where the job stalls or a part dies."""
        victim, slowdown, killed = story.victim, story.slowdown, story.killed
        self._until(view, self.schedule.fault_step)
        began_s = self._begin_fault(victim, slowdown)
        self.recorder.say("fault", f"rank {victim} is made x{slowdown:g} slower (nobody is told)")
        self._until(view, self.schedule.lift_step)
        lifted_s = self._lift_fault(victim)
        self.recorder.say("lift", f"rank {victim} runs at full speed again (nobody is told)")
        self._until(view, self.schedule.kill_step)
        # Anywhere within a step: the survivors must cope with every moment.
        time.sleep(story.chosen.random() * 0.4)
        kill_s = self.fleet.kill_rank(killed)
        self.recorder.say("kill", f"rank {killed} is killed (SIGKILL)")
        self._until(view, self.schedule.steps)
        if self.fault == COMPUTE_FAULT:
            first, began_s = self._truth_entry(victim, after_s=0.0)
            lifted, _ = self._truth_entry(victim, after_s=began_s)
        else:
            log = self.logs()[victim]
            first, lifted = step_at(log, began_s) + 1, step_at(log, lifted_s) + 1
        self.truth = Truth(
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

    def outcome(self, trained: TrainConfig) -> Outcome:
        """The figures, from the logs."""
        assert self.truth is not None, "play() comes before outcome()"
        return judge(
            logs=self.logs(),
            incidents=list(self.recorder.incidents.values()),
            truth=self.truth,
            schedule=self.schedule,
            warmup_steps=trained.warmup_steps,
            clock=trained.clock,
            seed=trained.seed,
            num_ranks=NUM_RANKS,
        )

    def logs(self) -> dict[int, tuple[LoggedStep, ...]]:
        """Each rank's committed steps, from its own log."""
        return {r: read_step_log(self._log_path(r)) for r in range(NUM_RANKS)}

    def _log_path(self, rank: int) -> Path:
        return self.folder / "train" / f"steps-{rank}.jsonl"

    def _until(self, view: View, step: int) -> None:
        """Wait until `step` steps are complete (or the job is over); draw meanwhile."""
        seen, moved_s = -1, time.monotonic()
        while not self.fleet.training_is_over:
            self.fleet.check()
            view.update()
            newest = self.recorder.steps[-1].step if self.recorder.steps else -1
            if newest > seen:
                seen, moved_s = newest, time.monotonic()
            if seen + 1 >= step and step < self.schedule.steps:
                return
            if time.monotonic() - moved_s > SILENCE_TIMEOUT_S:
                raise PacekeeperError(
                    f"no step for {SILENCE_TIMEOUT_S:.0f} s after step {seen}",
                    remedy=f"see the logs in {self.folder / 'logs'}",
                )
            time.sleep(0.05)
        self.fleet.check()  # all launchers ended since the last look: well?
        if step < self.schedule.steps:
            raise PacekeeperError(
                f"training ended before step {step}", remedy=f"see {self.folder / 'logs'}"
            )

    def _begin_fault(self, rank: int, slowdown: float) -> float:
        """Make the rank slow; the monotonic time just before."""
        began_s = time.monotonic()
        if self.fault == COMPUTE_FAULT:
            self._order(rank, slowdown)
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
            self._order(rank, 1.0)
        return time.monotonic()

    def _order(self, rank: int, slowdown: float) -> None:
        path = self.folder / "faults" / f"rank-{rank}.json"
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps({"slowdown": slowdown, "kind": COMPUTE_FAULT}))
        fresh.rename(path)

    def _truth_entry(self, rank: int, *, after_s: float) -> tuple[int, float]:
        """(step, time) of the first change that the rank's fault injector wrote down since."""
        for entry in read_truth(self.folder / "faults" / "truth.jsonl"):
            if entry["rank"] == rank and entry["mono_s"] > after_s:
                return int(entry["step"]), float(entry["mono_s"])
        raise PacekeeperError(
            "an order of the demo never reached the rank",
            remedy=f"see the logs in {self.folder / 'logs'}",
        )
