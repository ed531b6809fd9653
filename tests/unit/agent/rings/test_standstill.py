"""A rank stands still beyond the usual length of its phase; the first steps have none."""

from math import inf

import pytest

from pacekeeper.agent.host.process_state import ProcessState
from pacekeeper.agent.rings.standstill import MIN_STEPS, STANDING_S, PhaseWatch
from pacekeeper.core.telemetry.records import PlanAppliedRecord, StepRecord
from pacekeeper.core.telemetry.sign_of_life import Phase, RankPhase, SignOfLife


def sign(phase: Phase | None, since_s: float) -> SignOfLife:
    return SignOfLife(phase=phase, since_mono_s=since_s, dump_signal=0)


STEP = StepRecord(rank=0, step=1, generation=1, duration_s=1.0, tokens=1)
APPLIED = PlanAppliedRecord(
    rank=0, step=1, generation=2, previous_generation=1, duration_s=0.0, moved_bytes=0,
    is_regroup=False, layout_crc=0,
)  # fmt: skip


def settled(*lengths_s: float) -> tuple[PhaseWatch, float]:
    """A watch that has seen its first steps, then computing of these lengths; and the time now."""
    watch, now_s = PhaseWatch(7), 0.0
    watch.observe(sign(Phase.OUTSIDE, 0.0), [STEP] * MIN_STEPS, 0.0)
    for length_s in lengths_s:
        watch.observe(sign(Phase.COMPUTING, now_s), [], now_s)
        now_s += length_s
        watch.observe(sign(Phase.WAITING, now_s), [], now_s)
    return watch, now_s


def test_a_standstill_is_reported_each_second_and_its_end_once() -> None:
    watch, _ = settled()
    held = sign(Phase.COMPUTING, 10.0)
    seen = [watch.observe(held, [], 10.0 + tenths / 10) for tenths in range(35)]
    assert [tenths for tenths, one in enumerate(seen) if one is not None] == [8, 18, 28]
    assert seen[18] is not None and seen[18].held_s == pytest.approx(1.8)
    assert seen[18] == RankPhase(rank=7, phase=Phase.COMPUTING, held_s=seen[18].held_s, usual_s=0.0)
    ended = watch.observe(sign(Phase.WAITING, 13.45), [], 13.5)
    assert ended is not None and (ended.is_standing, ended.phase) == (False, Phase.WAITING)
    assert watch.observe(sign(Phase.WAITING, 13.45), [], 13.6) is None


@pytest.mark.parametrize(
    ("lengths_s", "usual_s"),
    [((), 0.0), ((3.0,), 3.0), ((5.0,) + (0.2,) * 19, 0.2), ((5.0,) * 4 + (0.2,) * 16, 5.0)],
)
def test_the_usual_length_is_the_ninetieth_percentile_of_those_seen(
    lengths_s: tuple[float, ...], usual_s: float
) -> None:
    watch, now_s = settled(*lengths_s)
    assert watch.usual_s(Phase.COMPUTING) == pytest.approx(usual_s)
    held = sign(Phase.COMPUTING, now_s)
    watch.observe(held, [], now_s)
    assert watch.observe(held, [], now_s + max(STANDING_S, usual_s) - 0.01) is None
    assert watch.observe(held, [], now_s + max(STANDING_S, usual_s) + 0.01) is not None


def test_first_steps_and_a_new_layout_have_no_usual_length() -> None:
    watch, held = PhaseWatch(7), sign(Phase.COMPUTING, 0.0)
    watch.observe(held, [STEP] * (MIN_STEPS - 1), 0.0)
    compiling = watch.observe(held, [], 60.0)
    assert compiling is not None and compiling.usual_s is None
    watch.observe(sign(Phase.WAITING, 61.0), [STEP], 61.0)
    assert watch.usual_s(Phase.COMPUTING) == 0.0, "the compilation does not count"
    watch.observe(sign(Phase.WAITING, 61.0), [APPLIED], 61.1)
    assert watch.usual_s(Phase.COMPUTING) is None


def test_a_first_checkpoint_may_take_long_and_an_ended_rank_never_stands_still() -> None:
    watch, _ = settled()
    assert watch.observe(sign(Phase.SAVING, 0.0), [], 29.0) is None
    assert watch.observe(sign(Phase.SAVING, 0.0), [], 30.5) is not None
    assert watch.observe(sign(None, 0.0), [], 31.0) is not None, "it has moved"
    assert watch.observe(sign(None, 0.0), [], 500.0) is None


def test_cpu_time_counts_from_the_first_report() -> None:
    watch, _ = settled()
    seen = RankPhase(rank=0, phase=Phase.COMPUTING, held_s=1.0)
    first = watch.with_process(seen, ProcessState(letter="S", cpu_s=7.0), 1.0)
    later = watch.with_process(seen, ProcessState(letter="T", cpu_s=7.5, kernel_wait="x"), 3.0)
    assert (first.cpu_ratio, first.process_state) == (None, "S")
    assert (later.cpu_ratio, later.process_state, later.kernel_wait) == (0.25, "T", "x")


def test_a_rank_that_waits_is_reported_at_once_where_another_of_its_node_stands_still() -> None:
    watch, now_s = settled(3.0)
    waiting = sign(Phase.WAITING, now_s)
    assert watch.observe(waiting, [], now_s + 0.1) is None
    seen = watch.observe(waiting, [], now_s + 0.2, suspect_s=now_s + 0.1)
    assert seen is not None and seen.held_s == pytest.approx(0.2)
    assert watch.observe(waiting, [], now_s + 0.3, suspect_s=now_s + 0.1) is None
    assert watch.observe(waiting, [], now_s + 0.4, suspect_s=now_s + 0.3) is not None, "again"
    assert watch.suspect_s == -inf, "it waits"
    computing, _ = settled()
    held = sign(Phase.COMPUTING, 10.0)
    assert computing.observe(held, [], 10.2, suspect_s=10.1) is None
    assert computing.suspect_s == -inf
    assert computing.observe(held, [], 10.8) is not None and computing.suspect_s == 10.8
