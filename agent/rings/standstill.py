"""Compares the phase of each rank of this node with its usual length, at each poll. Pure.

The collector calls `PhaseWatch.observe` at each poll. A phase shorter than the time between two
polls is mostly not seen; it is far below any limit. Nothing here decides whether a rank hangs: that
needs the ranks of other nodes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from pacekeeper.agent.host.process_state import ProcessState
from pacekeeper.core.telemetry.records import MAX_S, PlanAppliedRecord, Record, StepRecord
from pacekeeper.core.telemetry.sign_of_life import Phase, RankPhase, SignOfLife

MIN_STEPS = 3  # of one layout, after which a phase has a usual length: the first ones compile
STANDING_S = 0.75  # in one phase, before which a rank never stands still
REPEAT_S = 1.0  # between two reports of the same standstill
KEPT = 64  # last lengths of a phase, of which `usual_s` is the 90th percentile
# Of a phase that is rare and long, before one was seen.
UNSEEN_S = dict.fromkeys((Phase.SAVING, Phase.EVALUATING, Phase.MOVING), 30.0)


@dataclass(slots=True)
class PhaseWatch:
    """The phases of one rank."""

    rank: int
    num_steps: int = 0  # since it attached, or its layout changed
    last: SignOfLife | None = None
    lengths_s: dict[Phase, deque[float]] = field(default_factory=dict)
    reported_s: float = -inf  # of the present standstill; -inf: none
    _first: tuple[float, float] | None = None  # CPU time and time at its first report

    @property
    def suspect_s(self) -> float:
        """When the rank was last reported to stand still without waiting; -inf: it is not."""
        is_waiting = self.last is None or self.last.phase is Phase.WAITING
        return -inf if is_waiting else self.reported_s

    def observe(
        self,
        sign: SignOfLife,
        records: Iterable[Record],
        now_s: float,
        *,
        suspect_s: float = -inf,
    ) -> RankPhase | None:
        """Take up the sign of life of one poll; return what is to be reported, if anything.

        Args:
            sign: As the ring has it now.
            records: The rank's new records.
            now_s: Monotonic clock.
            suspect_s: The newest `suspect_s` of the node's ranks. A rank that waits is reported
                once after it, however short it waits: that names the suspect.
        """
        was_settled = self.num_steps >= MIN_STEPS
        for record in records:
            if isinstance(record, StepRecord):
                self.num_steps += 1
            elif isinstance(record, PlanAppliedRecord):
                self.num_steps = 0
        before, self.last = self.last, sign
        held_s = min(max(0.0, now_s - sign.since_mono_s), MAX_S)
        was_standing = self.reported_s > -inf
        if before is not None and before.phase is not None and before != sign:
            if was_settled:
                length_s = min(max(0.0, sign.since_mono_s - before.since_mono_s), MAX_S)
                self.lengths_s.setdefault(before.phase, deque(maxlen=KEPT)).append(length_s)
            self.reported_s, self._first = -inf, None
            if was_standing:
                phase = sign.phase or before.phase
                return RankPhase(rank=self.rank, phase=phase, held_s=held_s, is_standing=False)
        if sign.phase is None:
            return None
        usual_s = self.usual_s(sign.phase)
        is_due = held_s >= max(STANDING_S, usual_s or 0.0) and now_s - self.reported_s >= REPEAT_S
        is_victim = sign.phase is Phase.WAITING and -inf < suspect_s >= self.reported_s
        if not is_due and not is_victim:
            return None
        self.reported_s = now_s
        return RankPhase(rank=self.rank, phase=sign.phase, held_s=held_s, usual_s=usual_s)

    def usual_s(self, phase: Phase) -> float | None:
        """Return how long the phase usually is; 0: too short to be seen; None: not known yet."""
        if self.num_steps < MIN_STEPS:
            return None
        lengths_s = self.lengths_s.get(phase)
        if not lengths_s:
            return UNSEEN_S.get(phase, 0.0)
        return sorted(lengths_s)[int(0.9 * (len(lengths_s) - 1) + 0.5)]

    def with_process(self, seen: RankPhase, process: ProcessState, now_s: float) -> RankPhase:
        """Return a report of a standstill with the state of the process."""
        cpu_ratio = None
        if self._first is None:
            self._first = process.cpu_s, now_s
        elif now_s > self._first[1]:
            cpu_ratio = max(0.0, process.cpu_s - self._first[0]) / (now_s - self._first[1])
        return replace(
            seen,
            process_state=process.letter,
            kernel_wait=process.kernel_wait,
            cpu_ratio=cpu_ratio,
        )
