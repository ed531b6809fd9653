"""The benchmark of live plans: its limit, its phases, and what misses a bar."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benchmarks.repartition_live import (
    FIRST_HEALTHY_STEP,
    LOSS_TOLERANCE,
    Case,
    Run,
    figures_of,
    fluid_step_s,
    is_kept,
    layout_text,
    layouts_by_step,
    usual_step_s,
)

from pacekeeper.cli.demo.metrics import LoggedStep
from support.partitioned import staged_layout

CASE = Case(name="one", slow={1: 2.0})
ONSET, PLANS, LAST = 20, (24, 26), 40
LOSSES = [1.0] * (LAST + 1)


def test_the_limit_is_a_healthy_step_whose_part_of_devices_takes_longer() -> None:
    assert fluid_step_s(2.0, 2.0, {}, 4) == 2.0
    assert fluid_step_s(2.0, 2.0, {1: 2.0}, 4) == pytest.approx(2.0 * 4 / 3.5)
    assert fluid_step_s(2.0, 2.0, {1: 2.0, 3: 4.0}, 4) == pytest.approx(2.0 * 4 / 2.75)
    assert fluid_step_s(2.0, 1.0, {1: 2.0}, 4) == pytest.approx(1.0 + 4 / 3.5)
    assert fluid_step_s(2.0, 0.0, {1: 2.0}, 4) == 2.0
    assert fluid_step_s(2.0, 9.0, {1: 2.0}, 4) == pytest.approx(2.0 * 4 / 3.5)


def test_steps_that_others_on_the_host_lengthen_do_not_count() -> None:
    steps = run(SECONDS).logs[0]
    late = [replace(s, ended_s=s.ended_s + 5.0 * (s.step >= 12)) for s in steps]
    phase = range(9, 17)
    assert usual_step_s(late, phase) == usual_step_s(steps, phase) == pytest.approx(1.0)
    assert usual_step_s(steps, range(9, 9)) is None


def test_devices_idle_in_pipelines_by_their_schedule() -> None:
    assert CASE.idle_factor == 1.0
    staged = replace(CASE, num_stages=4, rows_per_microbatch=8)
    assert staged.idle_factor == pytest.approx(11 / 8)
    assert replace(staged, num_stages=2).idle_factor == pytest.approx(5 / 4)


def test_a_plan_that_was_not_needed_or_exceeds_the_limit_keeps_no_bar() -> None:
    found = figures_of(run(SECONDS | {"slow": 1.0, "planned": 1.08}), CASE, LOSSES)
    assert found.without_plan and found.without_plan > CASE.bar
    assert not is_kept(CASE, found)
    found = figures_of(run(SECONDS | {"planned": 1.0}), CASE, LOSSES)
    assert found.fluid_fraction and found.fluid_fraction > 1.02
    assert not is_kept(CASE, found)


def run(seconds: Mapping[str, float], *, plans: tuple[int, ...] = PLANS, loss: float = 1.0) -> Run:
    """Steps of 100 tokens that take so long before the onset, without a plan, and with it."""
    ended_s, steps = 0.0, []
    for number in range(LAST + 1):
        generation = 1 + sum(number >= plan for plan in plans)
        phase = "healthy" if number < ONSET else "planned" if generation > 1 else "slow"
        ended_s += seconds[phase] * (10.0 if number < FIRST_HEALTHY_STEP else 1.0)
        steps.append(
            LoggedStep(
                step=number, generation=generation, ended_s=ended_s, tokens=100, loss=loss,
                compute_s=0.5,
            )
        )  # fmt: skip
    layouts = {n: (staged_layout(generation=n), f"plan {n}") for n in (1, 2, 3)}
    return Run(logs=dict.fromkeys(range(4), steps), onset_step=ONSET, layouts=layouts, found={1})


SECONDS = {"healthy": 1.0, "slow": 2.0, "planned": 1.25}


def test_rates_are_those_between_the_changes_and_steps_count_from_the_onset() -> None:
    found = figures_of(run(SECONDS), CASE, LOSSES)
    limit_s = 0.5 + 0.5 * 4 / 3.5  # devices take half of a healthy step
    assert found.fluid_fraction == pytest.approx(limit_s / 1.25)
    assert found.without_plan == pytest.approx(limit_s / 2.0)
    assert (found.steps_to_first_plan, found.steps_to_last_plan, found.num_plans) == (4, 6, 2)
    assert found.busy_healthy == pytest.approx(0.5)
    assert found.reasons == ["plan 2", "plan 3"]
    assert not is_kept(CASE, found)
    faster = figures_of(run(SECONDS | {"planned": 1.08}), CASE, LOSSES)
    assert is_kept(CASE, faster)


def test_without_a_settled_plan_or_with_other_losses_no_bar_is_kept() -> None:
    assert figures_of(run(SECONDS, plans=()), CASE, LOSSES).fluid_fraction is None
    late = figures_of(run(SECONDS | {"planned": 1.0}, plans=(LAST - 3,)), CASE, LOSSES)
    assert late.fluid_fraction is None
    assert not is_kept(CASE, late)
    other = figures_of(
        run(SECONDS | {"planned": 1.08}, loss=1.0 + 2 * LOSS_TOLERANCE), CASE, LOSSES
    )
    assert other.loss_difference == pytest.approx(2 * LOSS_TOLERANCE)
    assert not is_kept(CASE, other)


def test_losses_may_differ_as_those_without_faults_do_but_not_in_float64() -> None:
    loss = 1.0 + 2 * LOSS_TOLERANCE
    other = figures_of(run(SECONDS | {"planned": 1.08}, loss=loss), CASE, LOSSES)
    assert is_kept(CASE, replace(other, control_difference=1.5 * LOSS_TOLERANCE))
    assert not is_kept(CASE, replace(other, control_difference=0.5 * LOSS_TOLERANCE))
    equal = figures_of(run(SECONDS | {"planned": 1.08}), CASE, LOSSES)
    assert is_kept(CASE, replace(equal, float64_difference=1e-12))
    assert not is_kept(CASE, replace(equal, float64_difference=1e-8))


def test_losses_are_compared_by_phase_and_layouts_are_told_by_step() -> None:
    losses = [1.0] * ONSET + [0.5] * (PLANS[0] - ONSET) + [0.25] * (LAST + 1 - PLANS[0])
    found = figures_of(run(SECONDS), CASE, losses)
    assert (found.before_onset, found.before_plan, found.after_plan) == (0.0, 1.0, 3.0)
    assert found.loss_difference == 3.0
    told = layouts_by_step(run(SECONDS))
    assert {step: layout.generation for step, layout in told.items()} == {0: 1, 24: 2, 26: 3}


def test_a_layout_is_described_by_layers_shards_and_rows() -> None:
    assert layout_text(staged_layout(data=1), 64) == "layers 4+4; shards 4+4, 4+4"
    assert layout_text(staged_layout(stages=1, tensor=1), 64) == "layers 8; rows 32+32"
