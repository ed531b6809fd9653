"""The figures of the demonstration: right on a story whose answer is known by construction."""

from dataclasses import asdict, replace
from itertools import pairwise
from math import isnan

import pytest

from pacekeeper.cli.demo.metrics import (
    GroundTruth,
    LoggedIncident,
    LoggedStep,
    Outcome,
    Schedule,
    Throughput,
    busy_share,
    compute_outcome,
    delay_iterations,
    drawn_rates,
    fluid_limit,
    is_fault_hidden,
    lost_steps,
    overrun_share,
    split_phases,
    tokens_per_s,
)
from pacekeeper.cli.demo.report import outcome_lines
from pacekeeper.core.config.engine import EngineConfig

WARMUP = 10
SCHEDULE = Schedule.of(100)  # fault 30, lift 60, kill 80
# (first step, seconds per step, generation): healthy, degraded, mitigated, recovered, after
STORY = [(0, 1.0, 1), (30, 1.5, 1), (34, 1.1, 2), (60, 1.1, 2), (64, 1.0, 3), (81, 1.3, 4)]


def story_steps() -> tuple[LoggedStep, ...]:
    steps, now_s = [], 100.0
    for step in range(100):
        _, spent_s, generation = next(s for s in reversed(STORY) if s[0] <= step)
        now_s += spent_s
        steps.append(
            LoggedStep(
                step=step, generation=generation, ended_s=now_s, tokens=1000, loss=5.0 - step / 50
            )
        )
    return tuple(steps)


STEPS = story_steps()
TRUTH = GroundTruth(
    rank=2,
    slowdown=1.6,
    fault_first_step=30,
    fault_s=STEPS[29].ended_s + 0.01,
    lift_first_step=60,
    killed_rank=3,
    kill_s=STEPS[80].ended_s - 0.5,
)
FOUND = LoggedIncident(
    incident_id=1,
    kind="device",
    rank=2,
    slowdown=1.58,
    onset_step=30,
    found_step=31,
    found_s=STEPS[31].ended_s + 0.2,
    reason="slow",
)
DEATH = replace(FOUND, incident_id=2, kind="death", rank=3, found_s=TRUTH.kill_s + 0.1)


def outcome(
    *incidents: LoggedIncident,
    clock: str = "emulated",
    steps: tuple[LoggedStep, ...] = STEPS,
    truth: GroundTruth = TRUTH,
) -> Outcome:
    return compute_outcome(
        logs={0: steps, 1: steps, 2: steps, 3: steps[:80]},
        incidents=incidents,
        truth=truth,
        schedule=SCHEDULE,
        trained=EngineConfig(
            warmup_steps=WARMUP, emulate=clock == "emulated", device="cpu", seed=0
        ),
    )


def test_phases_lie_between_the_changes_and_never_across_one() -> None:
    phases = split_phases(STEPS, TRUTH, warmup_steps=WARMUP, kill_step=80)
    assert phases.healthy == range(11, 30)
    assert phases.degraded == range(30, 34)
    assert phases.mitigated == range(35, 60)
    assert phases.recovered == range(65, 80)
    assert phases.after_kill == range(82, 100)


def test_throughput_is_tokens_over_the_time_of_the_phase() -> None:
    result = outcome(FOUND, DEATH)
    assert result.speed.tokens_per_s.healthy == pytest.approx(1000.0)
    assert result.speed.tokens_per_s.degraded == pytest.approx(1000 / 1.5)
    assert result.speed.tokens_per_s.mitigated == pytest.approx(1000 / 1.1)
    assert result.speed.tokens_per_s.recovered == pytest.approx(1000.0)
    assert result.speed.tokens_per_s.after_kill == pytest.approx(1000 / 1.3)


def test_the_fluid_limit_is_healthy_times_the_mean_speed() -> None:
    result = outcome(FOUND, DEATH)
    assert result.speed.fluid_limit_tokens_per_s == pytest.approx(1000 * (3 + 1 / 1.6) / 4)
    assert result.speed.mitigated_of_fluid == pytest.approx((1000 / 1.1) / 906.25)


def test_no_limit_is_claimed_with_the_cpu_clock() -> None:
    result = outcome(FOUND, DEATH, clock="cpu")
    assert result.speed.fluid_limit_tokens_per_s is None
    assert (result.speed.degraded_of_fluid, result.speed.host_was_measured) == (None, None)


def rates(degraded: float | None) -> Throughput:
    return Throughput(
        healthy=1000.0, degraded=degraded, mitigated=950.0, recovered=1000.0, after_kill=700.0
    )


# Of 1,000 tokens/s a perfect plan keeps 906 at x1.6 and 958 at x1.2.
@pytest.mark.parametrize(
    ("slowdown", "degraded", "hides"),
    [(1.6, 640.0, False), (1.6, 900.0, False), (1.6, 910.0, True), (1.6, 1030.0, True),
     (1.2, 950.0, False), (1.2, 960.0, True)],
)  # fmt: skip
def test_a_fault_that_costs_nothing_means_that_the_host_was_measured(
    slowdown: float, degraded: float, hides: bool
) -> None:
    assert is_fault_hidden(rates(degraded), fluid_limit(1000.0, slowdown, 4)) is hides


def test_of_a_phase_without_steps_nothing_is_said() -> None:
    assert is_fault_hidden(rates(None), 900.0) is None


def test_the_story_s_devices_set_the_pace() -> None:
    result = outcome(FOUND, DEATH)
    assert result.speed.host_was_measured is False
    assert result.speed.degraded_of_fluid == pytest.approx((1000 / 1.5) / 906.25)
    assert "100.3%" in dict(outcome_lines(result))["fluid limit"]


PHASES = ("healthy", "degraded", "mitigated", "recovered", "after_kill")


def late(first: int, end: int, share: float) -> tuple[LoggedStep, ...]:
    """The story, its arithmetic late for a share of each of these steps."""
    made, overrun_s = [STEPS[0]], 0.0
    for before, s in pairwise(STEPS):
        overrun_s += share * (s.ended_s - before.ended_s) if first <= s.step < end else 0.0
        made.append(replace(s, overrun_s=overrun_s))
    return tuple(made)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_in_which_the_machine_was_late_has_no_rate_and_the_others_keep_theirs(
    phase: str,
) -> None:
    quiet = outcome(FOUND, DEATH)
    spanned = getattr(quiet.phases, phase)
    busy = outcome(FOUND, DEATH, steps=late(spanned.start, spanned.stop, 0.06))
    assert busy.speed.busy_phases == (phase,)
    rates = asdict(quiet.speed.tokens_per_s) | {phase: None}
    assert asdict(busy.speed.tokens_per_s) == rates
    assert busy.speed.host_overrun_share == pytest.approx(0.06)
    is_judged = phase in ("recovered", "after_kill")
    assert busy.speed.host_was_measured is not is_judged
    assert (busy.speed.degraded_of_fluid is None) == (phase in ("healthy", "degraded"))
    assert (busy.speed.mitigated_of_fluid is None) == (phase in ("healthy", "mitigated"))
    assert (busy.detection, busy.recovery) == (quiet.detection, quiet.recovery)
    said = dict(outcome_lines(busy))
    assert "busy machine" in said and ("fluid limit" in said) == (
        busy.speed.mitigated_of_fluid is not None
    )


def test_a_machine_that_is_late_for_less_than_a_twentieth_is_not_busy() -> None:
    slightly = outcome(FOUND, DEATH, steps=late(0, 100, 0.045))
    assert slightly.speed.busy_phases == ()
    assert slightly.speed.tokens_per_s == outcome(FOUND, DEATH).speed.tokens_per_s
    assert "busy machine" not in dict(outcome_lines(slightly))


def test_a_fault_that_costs_nothing_leaves_no_rate_of_any_phase() -> None:
    now_s, even = 100.0, []
    for s in STEPS:
        now_s += 1.0
        even.append(replace(s, ended_s=now_s))
    truth = replace(TRUTH, fault_s=even[29].ended_s + 0.01, kill_s=even[80].ended_s - 0.5)
    hidden = outcome(FOUND, DEATH, steps=tuple(even), truth=truth)
    assert hidden.speed.busy_phases == PHASES and hidden.speed.host_was_measured
    assert set(asdict(hidden.speed.tokens_per_s).values()) == {None}
    assert hidden.speed.fluid_limit_tokens_per_s is None
    assert "busy machine" in dict(outcome_lines(hidden))
    assert all(map(isnan, drawn_rates(even, hidden.phases, hidden.speed.busy_phases)))


def test_what_the_machine_limited_is_not_drawn() -> None:
    quiet = outcome(FOUND, DEATH)
    assert drawn_rates(STEPS, quiet.phases, ()) == pytest.approx(
        [1000 / (s.ended_s - before.ended_s) for before, s in pairwise(STEPS)]
    )
    for phase, first, end in (("healthy", 1, 30), ("mitigated", 35, 65), ("after_kill", 82, 100)):
        drawn = drawn_rates(STEPS, quiet.phases, (phase,))
        assert [s.step for s, rate in zip(STEPS[1:], drawn, strict=True) if isnan(rate)] == list(
            range(first, end)
        )


def test_the_delay_counts_slow_iterations_that_were_over_when_the_finding_arrived() -> None:
    assert delay_iterations(STEPS, TRUTH, FOUND) == 2


def test_a_finding_of_another_rank_is_false() -> None:
    wrong = replace(FOUND, incident_id=3, rank=1)
    assert outcome(FOUND, DEATH).detection.false_findings == 0
    assert outcome(FOUND, DEATH, wrong).detection.false_findings == 1
    assert outcome(DEATH, wrong).detection.found_rank is None


def test_a_finding_before_the_fault_is_false_even_for_the_right_rank() -> None:
    early = replace(FOUND, incident_id=3, onset_step=20, found_s=TRUTH.fault_s - 5.0)
    assert outcome(early, DEATH).detection.false_findings == 1


def test_naming_the_same_rank_twice_counts_once_as_right() -> None:
    again = replace(FOUND, incident_id=3, found_s=FOUND.found_s + 9.0)
    assert outcome(FOUND, again, DEATH).detection.false_findings == 1


def test_a_death_of_the_living_is_false() -> None:
    assert (
        outcome(FOUND, DEATH, replace(DEATH, incident_id=4, rank=0)).detection.false_findings == 1
    )


def test_kill_to_next_step_waits_for_the_last_survivors_own_layout() -> None:
    # The step under way at the kill was voted on already: it proves nothing.
    assert outcome(FOUND, DEATH).recovery.kill_to_next_step_s == pytest.approx(0.5 + 1.3)


def test_steps_committed_twice_never_or_unlike_the_others_are_lost() -> None:
    assert lost_steps([STEPS], 100) == 0
    assert lost_steps([STEPS], 101) == 1  # the run ended early
    assert lost_steps([STEPS + STEPS[-1:]], 100) == 1
    assert lost_steps([STEPS[:50] + STEPS[52:]], 100) == 2
    unlike = (*STEPS[:9], replace(STEPS[9], loss=9.0), *STEPS[10:])
    assert lost_steps([STEPS, unlike], 100) == 1


def test_the_slowdown_judged_is_the_one_that_was_found() -> None:
    found = outcome(replace(FOUND, last_slowdown=1.9), DEATH)
    assert (found.detection.found_slowdown, found.detection.last_slowdown) == (1.58, 1.9)


def test_an_empty_phase_has_no_throughput() -> None:
    assert tokens_per_s(STEPS, range(5, 5)) is None
    assert tokens_per_s(STEPS, range(0, 5)) is None  # nothing before step 0 to measure from


def test_a_run_too_short_to_show_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="80"):
        Schedule.of(40)


def timed(rank: int, healthy_s: float, mitigated_s: float) -> tuple[LoggedStep, ...]:
    return tuple(
        replace(s, compute_s=mitigated_s if 35 <= s.step < 60 else healthy_s) for s in STEPS
    )


def test_devices_are_busy_for_the_share_that_a_perfect_division_would_need() -> None:
    """0.8 s of each healthy 1.0 s; mitigated, 0.8 s of the slow rank are 0.5 s of work."""
    logs = {rank: timed(rank, 0.8, 0.8) for rank in range(4)}
    assert busy_share(logs, range(11, 30), {}) == pytest.approx(0.8)
    assert busy_share(logs, range(35, 60), {2: 1.6}) == pytest.approx((2.4 + 0.5) / 3.625 / 1.1)
    assert busy_share({0: STEPS}, range(11, 30), {}) is None, "another clock"
    assert busy_share(logs, range(5, 5), {}) is None


def test_the_fluid_limit_is_passed_by_as_much_as_devices_are_busier() -> None:
    """Hot experts: rank 0 waits half of each healthy step, and not under the plan."""
    healthy = {0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0}
    work = sum(healthy.values())
    speeds = {0: 1.0, 1: 1.0, 2: 1 / 1.6, 3: 1.0}
    step_s = work / sum(speeds.values())  # the best there is for this work
    logs = {
        rank: tuple(replace(s, compute_s=healthy[rank] if s.step < 30 else step_s) for s in STEPS)
        for rank in range(4)
    }
    faster = {
        rank: tuple(
            replace(s, ended_s=s.ended_s - (1.1 - step_s) * max(0, min(s.step, 59) - 34))
            for s in steps
        )
        for rank, steps in logs.items()
    }
    before = busy_share(faster, range(11, 30), {})
    after = busy_share(faster, range(35, 60), {2: 1.6})
    assert before == pytest.approx(work / 4)
    assert after == pytest.approx(1.0)
    fluid = tokens_per_s(faster[0], range(11, 30)) or 0.0
    reached = (tokens_per_s(faster[0], range(35, 60)) or 0.0) / (fluid * sum(speeds.values()) / 4)
    assert reached == pytest.approx(1.0 / (work / 4)) and reached > 1.0


def test_what_the_host_held_up_is_told_by_the_worst_rank_of_the_worst_phase() -> None:
    delayed = late(35, 60, 0.2)
    assert overrun_share({0: STEPS, 1: delayed}, range(11, 30)) == 0.0
    assert overrun_share({0: STEPS, 1: delayed}, range(35, 60)) == pytest.approx(0.2)
    assert overrun_share({0: STEPS}, range(5, 5)) == 0.0
    assert outcome(FOUND, DEATH).speed.host_overrun_share == 0.0
    assert outcome(FOUND, DEATH, clock="cpu").speed.host_overrun_share is None
