"""The rules of others on matrices made by hand: what each names, and what it can not see."""

import numpy as np
import pytest
from benchmarks.baselines import (
    DlRover,
    Greyhound,
    NvrxIndividual,
    NvrxRelative,
    ResiHp,
    Rule,
    ScoutTemporal,
    SniffTest,
    two_parameter_expected,
)

from pacekeeper.predictor.cost.features import Array, Flags

ONE_ROLE = (0, 0, 0, 0)
ALL_RULES = (
    NvrxRelative(),
    NvrxRelative(by_role=True),
    NvrxIndividual(),
    Greyhound(),
    ResiHp(),
    SniffTest(),
    ScoutTemporal(),
    DlRover(),
)


def even(num_steps: int, num_ranks: int = 4) -> Array:
    """A second each, and a wobble of 1 % that differs between ranks and steps."""
    step, rank = np.indices((num_steps, num_ranks))
    return 1.0 + 0.01 * np.sin(7.0 * step + 3.0 * rank)


def slow(times_s: Array, rank: int, slowdown: float, first: int = 0, end: int = 10**6) -> Array:
    changed = times_s.copy()
    changed[first:end, rank] *= slowdown
    return changed


def named(flags: Flags) -> set[int]:
    return set(np.flatnonzero(flags.any(axis=0)).tolist())


def first_flag(flags: Flags, rank: int) -> int:
    return int(np.flatnonzero(flags[:, rank])[0])


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_nobody_is_named_where_all_are_even(rule: Rule) -> None:
    times_s = even(60)
    flags = rule.flags(times_s, ONE_ROLE, expected_s=np.ones(60))
    assert flags.shape == times_s.shape and flags.dtype == np.bool_
    assert not flags.any()


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_a_rule_knows_nothing_later(rule: Rule) -> None:
    times_s = slow(even(80), 2, 2.2, first=40)
    whole = rule.flags(times_s, ONE_ROLE, expected_s=np.ones(80))
    part = rule.flags(times_s[:60], ONE_ROLE, expected_s=np.ones(60))
    np.testing.assert_array_equal(whole[:60], part)
    assert named(whole) == {2}


def test_nvrx_names_below_three_quarters_of_the_fastest_at_its_reports() -> None:
    flags = NvrxRelative().flags(slow(even(30), 1, 1.4, first=10), ONE_ROLE)
    assert np.argwhere(flags).tolist() == [[19, 1], [29, 1]]
    assert not NvrxRelative().flags(slow(even(30), 1, 1.3), ONE_ROLE).any()  # 1/1.3 > 0.75


def test_nvrx_takes_a_longer_stage_for_slow_unless_compared_within_it() -> None:
    times_s = slow(slow(even(10), 2, 1.5), 3, 1.5)
    assert named(NvrxRelative().flags(times_s, (0, 0, 1, 1))) == {2, 3}
    assert not NvrxRelative(by_role=True).flags(times_s, (0, 0, 1, 1)).any()


def test_nvrx_takes_the_lower_of_two_middle_values() -> None:
    times_s = np.ones((4, 2))
    times_s[2:, 0] = 2.0  # its middle values are 1 and 2
    assert not NvrxRelative(window=4).flags(times_s, (0, 0)).any()


def test_nvrx_own_best_sees_what_became_slow_and_not_what_always_was() -> None:
    assert named(NvrxIndividual().flags(slow(even(30), 1, 1.4, first=10), ONE_ROLE)) == {1}
    assert not NvrxIndividual().flags(slow(even(30), 1, 1.4), ONE_ROLE).any()


def test_greyhound_names_the_slow_rank_from_a_dozen_steps_on_until_it_recovers() -> None:
    flags = Greyhound().flags(slow(even(120), 2, 1.5, first=40, end=80), ONE_ROLE)
    assert named(flags) == {2}
    assert 40 + 10 <= first_flag(flags, 2) <= 40 + 12
    assert flags[60:80, 2].all() and not flags[100:].any()


@pytest.mark.parametrize(
    ("what", "slowdown", "first", "end"),
    [
        ("below 10 %", 1.08, 40, 200),
        ("shorter than 10 steps", 3.0, 40, 48),
        ("from the first step on", 2.0, 0, 200),
        ("within the first 10 steps", 2.0, 6, 200),
    ],
)
def test_greyhound_can_not_see(what: str, slowdown: float, first: int, end: int) -> None:
    assert not Greyhound().flags(slow(even(90), 2, slowdown, first, end), ONE_ROLE).any(), what


def test_greyhound_sees_15_percent_and_can_not_place_it() -> None:
    times_s = slow(even(90), 2, 1.15, first=40)
    follow = np.ones(90, dtype=np.bool_)
    assert Greyhound().slow_steps(times_s.max(axis=1), follow)[-1][0] == 40
    assert not Greyhound().flags(times_s, ONE_ROLE).any()


def test_greyhound_forgets_a_fault_that_is_over() -> None:
    times_s = slow(even(120), 2, 1.5, first=40, end=80)
    steps = Greyhound().slow_steps(times_s.max(axis=1), np.ones(120, dtype=np.bool_))
    assert steps[79] == list(range(40, 80)) and steps[-1] == []


def test_greyhound_adds_up_small_changes_that_it_did_not_accept() -> None:
    times_s = slow(slow(even(120), 2, 1.07, first=60), 2, 1.07, first=75)
    steps = Greyhound().slow_steps(times_s.max(axis=1), np.ones(120, dtype=np.bool_))
    assert steps[74] == [] and steps[-1]


def test_greyhound_deletes_slow_steps_until_they_are_a_tenth_of_what_it_looks_at() -> None:
    times_s = slow(even(320), 2, 3.0, first=260)
    assert 270 <= first_flag(Greyhound().flags(times_s, ONE_ROLE), 2) <= 274
    assert 284 <= first_flag(Greyhound(window=300).flags(times_s, ONE_ROLE), 2) <= 292


def test_greyhound_wants_a_change_to_be_probable() -> None:
    """Healthy series with 15 % noise: it misjudges few of those that the 10 % alone would."""
    random = np.random.default_rng(0)
    series = [np.exp(random.normal(0.0, 0.15, 100)) for _ in range(60)]
    follow = np.ones(100, dtype=np.bool_)

    def misjudged(rule: Greyhound) -> int:
        return sum(any(rule.slow_steps(values, follow)) for values in series)

    assert 2 * misjudged(Greyhound()) < misjudged(Greyhound(probability=0.0))


def test_greyhound_takes_more_work_for_a_slow_job_and_resihp_does_not() -> None:
    """The same 40 % more work for all, one rank half as much again: nobody is slow by work."""
    work = np.ones(90)
    work[40:] = 1.4
    times_s = even(90) * work[:, None]
    times_s[40:, 2] *= 1.25
    longest_s = times_s.max(axis=1)
    assert named(Greyhound().flags(times_s, ONE_ROLE)) == {2}
    assert not ResiHp().flags(times_s, ONE_ROLE, expected_s=longest_s).any()


def test_resihp_names_what_the_work_does_not_explain_above_its_gate() -> None:
    expected_s = np.full(90, 1.0)
    seen = ResiHp().flags(slow(even(90), 2, 1.5, first=40), ONE_ROLE, expected_s=expected_s)
    assert named(seen) == {2}
    gated = ResiHp().flags(slow(even(90), 2, 1.22, first=40), ONE_ROLE, expected_s=expected_s)
    assert not gated.any()
    assert named(Greyhound().flags(slow(even(90), 2, 1.22, first=40), ONE_ROLE)) == {2}
    with pytest.raises(ValueError, match="needs the predicted healthy time"):
        ResiHp().flags(even(9), ONE_ROLE)


def test_two_parameters_follow_tokens_and_squares_and_have_no_intercept() -> None:
    random = np.random.default_rng(0)
    tokens = random.uniform(5e3, 9e3, (20, 3))
    squares = random.uniform(1e7, 4e7, (20, 3))
    times_s = 2e-5 * tokens + 3e-9 * squares
    late = times_s.copy()
    late[10:] *= 1.5  # after the warm-up: not learnt
    found = two_parameter_expected(tokens, squares, late, num_warm_up=10)
    np.testing.assert_allclose(found, times_s)
    with_constant = two_parameter_expected(tokens, squares, times_s + 1.0, num_warm_up=20)
    assert np.abs(with_constant - times_s - 1.0).max() > 0.01


def test_the_sniff_test_names_a_tenth_from_the_median_both_ways() -> None:
    flags = SniffTest().flags(slow(slow(even(3), 1, 1.2), 2, 0.8), ONE_ROLE)
    assert named(flags) == {1, 2}
    assert not SniffTest().flags(slow(even(3), 1, 1.08), ONE_ROLE).any()


def test_the_sniff_test_is_blind_where_half_of_the_ranks_spread() -> None:
    """A median deviation above 10 % is the threshold then."""
    times_s = 1.0 / np.array([[1.0, 1.0, 0.8, 1.2, 0.78]])
    assert not SniffTest().flags(times_s, (0,) * 5)[0, :4].any()
    assert SniffTest().flags(times_s, (0,) * 5)[0, 4]


def test_scout_names_at_the_second_slow_round_in_a_row() -> None:
    flags = ScoutTemporal().flags(slow(even(40), 3, 1.3, first=20), ONE_ROLE)
    assert np.flatnonzero(flags[:, 3]).tolist() == list(range(21, 40))  # never learnt as normal
    assert named(flags) == {3}
    assert not ScoutTemporal().flags(slow(even(40), 3, 1.3, 20, 21), ONE_ROLE).any()


def test_scout_can_not_see_small_early_or_always_slow_ranks_nor_through_noise() -> None:
    assert not ScoutTemporal().flags(slow(even(40), 3, 1.2, first=20), ONE_ROLE).any()
    assert not ScoutTemporal().flags(slow(even(40), 3, 2.0), ONE_ROLE).any()
    noisy = even(40) * np.resize([1.0, 1.2, 1.4], 40)[:, None]  # 4 sigma: as much as the median
    assert not ScoutTemporal().flags(slow(noisy, 3, 1.6, first=20), ONE_ROLE).any()
    drifting = even(120) * 1.01 ** np.arange(120)[:, None]
    assert not ScoutTemporal().flags(drifting, ONE_ROLE).any()


def test_scout_learns_what_its_first_five_rounds_show() -> None:
    assert not ScoutTemporal().flags(slow(even(10), 3, 3.0, first=2), ONE_ROLE).any()
    assert ScoutTemporal().flags(slow(even(10), 3, 3.0, first=5), ONE_ROLE)[6, 3]


def test_dlrover_names_above_twice_the_median_of_the_role() -> None:
    times_s = np.array([[10.0, 10.5, 11.0, 22.0]])
    assert named(DlRover().flags(times_s, ONE_ROLE)) == {3}
    times_s[0, 3] = 19.9
    assert not DlRover().flags(times_s, ONE_ROLE).any()
    # A stage that takes three times as long is no rank that does.
    assert not DlRover().flags(np.array([[1.0, 1.0, 3.0, 3.0]]), (0, 0, 1, 1)).any()


def test_what_is_no_time_is_refused() -> None:
    rule = DlRover()
    with pytest.raises(ValueError, match="times_s: expected finite times above 0"):
        rule.flags(np.array([[1.0, np.nan]]), (0, 0))
    with pytest.raises(ValueError, match="step_s: expected 1 steps, got 2"):
        rule.flags(np.ones((1, 2)), (0, 0), step_s=np.ones(2))
    with pytest.raises(ValueError, match="groups: expected one for each of 2 ranks"):
        rule.flags(np.ones((1, 2)), (0,))
    with pytest.raises(ValueError, match="expected_s: expected finite"):
        rule.flags(np.ones((1, 2)), (0, 0), expected_s=np.zeros(1))
