"""What tests of adapters share: a clock by script, the hooks on it, and what was told."""

from pathlib import Path

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, Record, StepRecord
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from support.rings import records_in


class ScriptedClock:
    """A pipeline's clock in whose time things happen when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._since_s = 0.0
        self._spent_s = 0.0

    def begin(self) -> None:
        self._spent_s, self._since_s = 0.0, self.now_s

    def pause(self) -> None:
        self._spent_s += self.now_s - self._since_s

    def resume(self) -> None:
        self._since_s = self.now_s

    def suspend(self) -> float:
        self.pause()
        return self._spent_s

    def resume_suspended(self, aside: float) -> None:
        self._spent_s, self._since_s = aside, self.now_s

    def time_of(self, aside: float) -> ComputeTime | None:
        return ComputeTime(compute_s=aside)

    def end(self) -> ComputeTime | None:
        return self.time_of(self.suspend())


class Pace:
    """Hooks of one rank on a scripted clock, and the records in its ring."""

    def __init__(self, directory: Path) -> None:
        self.clock = ScriptedClock()
        self.hooks = hooks.attach(
            job="job", rank=0, world_size=1, ring_dir=str(directory), timer=self.clock, run_id=1
        )

    @property
    def records(self) -> list[Record]:
        assert self.hooks.ring.num_errors == 0, self.hooks.ring.reason
        assert self.hooks.ring.path is not None
        return records_in(self.hooks.ring.path)

    @property
    def micro_batches(self) -> list[MicroBatchRecord]:
        return [r for r in self.records if isinstance(r, MicroBatchRecord)]

    @property
    def steps(self) -> list[StepRecord]:
        return [r for r in self.records if isinstance(r, StepRecord)]

    @property
    def loads(self) -> list[ExpertLoadRecord]:
        return [r for r in self.records if isinstance(r, ExpertLoadRecord)]
