"""Decides when records read from the rings are sent: at a step's end, or at once. Pure.

The daemon adds the batches of each poll and asks `is_due`. A routine report is sent at the end of a
step, at least `interval_s` after the previous one, so that a step longer than that is reported
without delay. An urgent one is sent at once, at most one each MIN_GAP_S.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.core.telemetry.node_report import MAX_RECORDS_PER_REPORT
from pacekeeper.core.telemetry.records import (
    MAX_S,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    StepRecord,
)

DEFAULT_INTERVAL_S = 1.0
MAX_INTERVAL_S = 60.0  # of a controller's instruction: beyond it the job would count as blind
MAX_SPREAD_S = 300.0
MIN_GAP_S = 0.5  # between any two reports
KEEPALIVE_S = 5.0  # longest silence while connected; two intervals where that is more
SETTLE_S = 0.3  # a step is over on this node so long after its first rank ended it, at the latest
SLOW_RATIO = 1.4  # a micro-batch against the rank's own past, beside the other ranks of the node
SLOW_IN_A_ROW = 2
REARM_S = 10.0  # between two urgent reports because of one slow rank
MEMORY = 0.1  # weight of a new micro-batch in a rank's past

_URGENT = (RankExitRecord, PlanAppliedRecord, PlanRefusedRecord, ProbeRecord)
_Run = tuple[str, int]  # job, run_id


@dataclass(slots=True, kw_only=True)
class ReportPacer:
    """Records that wait for their report, and when that is due.

    Attributes:
        interval_s: Least time between two routine reports, set by the controller.
    """

    interval_s: float = DEFAULT_INTERVAL_S
    _pending: dict[_Run, RingBatch] = field(default_factory=dict)
    _num_records: int = 0
    _open: dict[_Run, "_OpenStep"] = field(default_factory=dict)
    _standing: dict[_Run, set[int]] = field(default_factory=dict)  # ranks reported to stand still
    _slow: "SlowRanks" = field(default_factory=lambda: SlowRanks())
    _has_step: bool = False  # a step that is over on this node, or a standstill, waits
    _is_urgent: bool = False
    _sent_s: float = -math.inf
    _aged_s: float = -math.inf  # up to which the phases that wait are held
    _step_sent_s: float = -math.inf

    @property
    def jobs(self) -> frozenset[str]:
        """Jobs with records that wait."""
        return frozenset(job for job, _ in self._pending)

    def set_interval(self, interval_s: float) -> None:
        """Set the interval as a controller sent it; 0 or nonsense: the default."""
        is_set = math.isfinite(interval_s) and interval_s > 0.0
        self.interval_s = min(interval_s, MAX_INTERVAL_S) if is_set else DEFAULT_INTERVAL_S

    def add(
        self, batches: Sequence[RingBatch], pids: Mapping[str, Mapping[int, int]], now_s: float
    ) -> None:
        """Add what one poll returned.

        Args:
            batches: New data of the rings; empty batches count for nothing.
            pids: The ranks of each job on this node, as keys.
            now_s: Monotonic clock.
        """
        self._age_phases(now_s)
        for batch in batches:
            if batch.is_empty:
                continue
            run = batch.job, batch.run_id
            known = self._pending.get(run)
            self._pending[run] = batch if known is None else _joined(known, batch)
            self._num_records += len(batch.records)
            is_news = bool(batch.attached or batch.layouts or batch.stacks)
            is_news = self._note_standstills(run, batch) or is_news
            is_urgent = is_news or any(isinstance(record, _URGENT) for record in batch.records)
            is_slow = self._slow.add(run, batch.records, now_s)
            self._is_urgent = self._is_urgent or is_urgent or is_slow
            self._note_steps(run, batch, frozenset(pids.get(batch.job, ())), now_s)
        for run in [run for run in self._open if run[0] not in pids]:
            del self._open[run]
        for run in [run for run in self._standing if run[0] not in pids]:
            del self._standing[run]
        self._slow.keep(pids)

    def is_due(self, now_s: float, *, is_urgent: bool = False, is_connected: bool = True) -> bool:
        """Decide whether a report is due.

        Args:
            now_s: Monotonic clock.
            is_urgent: Something other than a record is urgent, such as a device that throttles.
            is_connected: Without a connection no report without records is made: it would only
                displace others in the spool.
        """
        gap_s = now_s - self._sent_s
        if gap_s < MIN_GAP_S:
            return False
        if is_urgent or self._is_urgent or self._num_records >= MAX_RECORDS_PER_REPORT:
            return True
        if self._is_step_over(now_s) and now_s - self._step_sent_s >= self.interval_s:
            return True
        is_anything = bool(self._pending) or is_connected
        return is_anything and gap_s >= max(KEEPALIVE_S, 2.0 * self.interval_s)

    def take(self, now_s: float) -> tuple[RingBatch, ...]:
        """Return all that waits, one batch per job and incarnation: it is being sent."""
        self._age_phases(now_s)
        if self._is_step_over(now_s):
            self._step_sent_s = now_s
            self._open = {
                run: step for run, step in self._open.items() if not step.is_settled(now_s)
            }
        batches = tuple(self._pending.values())
        self._pending, self._num_records = {}, 0
        self._has_step = self._is_urgent = False
        self._sent_s = now_s
        return batches

    def _age_phases(self, now_s: float) -> None:
        """Lengthen the phases that wait by the time they have waited for their report."""
        later_s, self._aged_s = now_s - self._aged_s, now_s
        for run, batch in self._pending.items():
            if batch.phases:
                aged = (replace(p, held_s=min(p.held_s + later_s, MAX_S)) for p in batch.phases)
                self._pending[run] = replace(batch, phases=tuple(aged))

    def _note_standstills(self, run: _Run, batch: RingBatch) -> bool:
        """Whether a rank has begun to stand still or moves again; a repetition is routine."""
        standing, is_news = self._standing.setdefault(run, set()), False
        for phase in batch.phases:
            if phase.is_standing and phase.rank in standing:
                self._has_step = True
                continue
            is_news = True
            if phase.is_standing:
                standing.add(phase.rank)
            else:
                standing.discard(phase.rank)
        return is_news

    def _note_steps(self, run: _Run, batch: RingBatch, ranks: frozenset[int], now_s: float) -> None:
        for record in batch.records:
            if not isinstance(record, StepRecord):
                continue
            step = self._open.get(run)
            if step is None or record.step != step.number:
                self._has_step = self._has_step or step is not None
                step = _OpenStep(number=record.step, since_s=now_s)
                self._open[run] = step
            step.ranks.add(record.rank)
            if step.ranks >= ranks:
                self._has_step = True
                del self._open[run]

    def _is_step_over(self, now_s: float) -> bool:
        return self._has_step or any(step.is_settled(now_s) for step in self._open.values())


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    """A step that some ranks of this node have ended."""

    number: int
    since_s: float
    ranks: set[int] = field(default_factory=set)

    def is_settled(self, now_s: float) -> bool:
        return now_s - self.since_s >= SETTLE_S


@dataclass(slots=True)
class _RankPace:
    mean: float  # of the logarithm of compute_s
    ratio: float = 0.0  # logarithm of the newest micro-batch against it
    num_slow: int = 0
    told_s: float = -math.inf


@dataclass(slots=True)
class SlowRanks:
    """Finds ranks that became slow by themselves: against their own past and their neighbours."""

    _runs: dict[_Run, dict[int, _RankPace]] = field(default_factory=dict)

    def add(self, run: _Run, records: Sequence[object], now_s: float) -> bool:
        """Add the micro-batches among `records`; whether a rank is slow and it is news."""
        is_news = False
        for record in records:
            if not isinstance(record, MicroBatchRecord) or record.compute_s <= 0.0:
                continue
            paces, value = self._runs.setdefault(run, {}), math.log(record.compute_s)
            pace = paces.setdefault(record.rank, _RankPace(value))
            pace.ratio = value - pace.mean
            others = sorted(one.ratio for rank, one in paces.items() if rank != record.rank)
            common = max(0.0, others[len(others) // 2]) if others else 0.0
            if pace.ratio - common < math.log(SLOW_RATIO):
                pace.num_slow = 0
            else:
                pace.num_slow += 1
                if pace.num_slow >= SLOW_IN_A_ROW and now_s - pace.told_s >= REARM_S:
                    pace.told_s, is_news = now_s, True
            pace.mean += MEMORY * pace.ratio
        return is_news

    def keep(self, jobs: Mapping[str, object]) -> None:
        """Forget all jobs but these."""
        for run in [run for run in self._runs if run[0] not in jobs]:
            del self._runs[run]


def reconnect_bound_s(
    backoff_s: float, spread_s: float, longest_s: float, *, was_connected: bool
) -> float:
    """The longest wait before the next attempt to connect; the wait is uniform below it.

    Args:
        backoff_s: The exponential back-off of this attempt.
        spread_s: Time over which the controller asked its fleet to come back.
        longest_s: The configured longest back-off.
        was_connected: The previous attempt led to a connection, so the whole fleet may have lost
            its controller just now. Later attempts are closer to each other: a third of the spread.
    """
    if was_connected:
        return max(backoff_s, spread_s)
    return min(backoff_s, max(longest_s, spread_s / 3.0))


def _joined(one: RingBatch, more: RingBatch) -> RingBatch:
    return replace(
        one,
        attached=one.attached + more.attached,
        records=one.records + more.records,
        layouts=one.layouts + more.layouts,
        phases=tuple({phase.rank: phase for phase in (*one.phases, *more.phases)}.values()),
        stacks=one.stacks + more.stacks,
    )
