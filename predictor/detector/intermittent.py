"""Finds ranks that are slow now and then: too often for noise, never for long enough to agree.

A step that waits for its slowest rank loses as much to a rank that stalls in every third step as to
one that is a third as slow all the time. What counts is the number of separate slow spells in the
last steps (a scan statistic); a rank that has so many by chance, at the share of steps in which its
peers have one, is named as rarely as any other. Pure.
"""

from math import log

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions

LEAST_SLOWDOWN = 1.05  # of a slow step
LEAST_SIGMAS = 4.0
USUAL_SHARE = 0.01  # of healthy steps in which a spell begins, before a job has shown its own
FEWEST_SPELLS = 3
STILL_SO = 0.01  # chance of so long a quiet run while a rank is as often slow as before


def slow_steps(log_ratios: Array, *, doubts: Array | float, sigmas: Array | float) -> Flags:
    """Return which steps are slow, in the shape of `log_ratios` [steps, ...]; NaN: not slow.

    A spell begins with a step that no noise explains and ends with one below half of that, so that
    a slowdown just large enough to be seen is one spell.

    Args:
        log_ratios: log(observed / expected).
        doubts: bounds on the model's error (log).
        sigmas: one sigma of a step.
    """
    level = _level(sigmas)
    beyond = log_ratios - doubts
    is_slow: Flags = beyond > level
    goes_on = beyond > 0.5 * level
    for step in range(1, len(is_slow)):
        is_slow[step] |= is_slow[step - 1] & goes_on[step]
    return is_slow


def _level(sigmas: Array | float) -> Array:
    """Return the log ratio from which on a step is slow."""
    level: Array = np.maximum(LEAST_SIGMAS * np.asarray(sigmas), log(LEAST_SLOWDOWN))
    return level


def starts(is_slow: Flags) -> Flags:
    """Return the first step of each spell of slow steps, in the shape of `is_slow` [steps, ...]."""
    first = is_slow.copy()
    first[1:] &= ~is_slow[:-1]
    return first


def repeatedly_slow(
    log_ratios: Array, *, doubts: Array, sigmas: Array, is_healthy: Flags
) -> Positions:
    """Return the ranks without a finding that are slow in the newest step, for the third time or
    more.

    Arguments as in `runs_beyond_chance`.
    """
    half = 0.5 * _level(sigmas)
    may_be = (log_ratios[-1:] - doubts[-1:] > half).any(axis=0) & is_healthy
    near = np.flatnonzero(may_be)  # few: the window is scanned of these only
    is_slow = slow_steps(log_ratios[:, near], doubts=doubts[:, near], sigmas=sigmas[near])
    is_one = is_slow[-1:].any(axis=0) & (starts(is_slow).sum(axis=0) >= FEWEST_SPELLS)
    suspects: Positions = near[is_one]
    return suspects


def runs_beyond_chance(
    log_ratios: Array, *, doubts: Array, sigmas: Array, is_healthy: Flags, between: float
) -> dict[int, int]:
    """Return, by position, the number of last steps that hold more slow spells than chance gives,
    for each such rank that is slow in the newest step.

    By chance a spell begins as often as on the other ranks without a finding, or as a fast one on
    the rank itself, if that is more often: noise of its own is as often on the other side.

    Args:
        log_ratios: log(observed / expected) [steps, ranks], newest last; NaN: no record.
        doubts: bounds on the model's error (log) [steps, ranks].
        sigmas: one sigma of a step [ranks].
        is_healthy: ranks without a finding [ranks].
        between: steps of a rank between two of its false alarms.
    """
    runs = dict[int, int]()
    suspects = repeatedly_slow(log_ratios, doubts=doubts, sigmas=sigmas, is_healthy=is_healthy)
    if not len(suspects):
        return runs
    is_slow = slow_steps(log_ratios, doubts=doubts, sigmas=sigmas) & is_healthy
    num_spells = starts(is_slow).sum(axis=0)
    num_steps = (np.isfinite(log_ratios) & is_healthy).sum(axis=0)
    for i in suspects.tolist():
        spells_of_others = int(num_spells.sum() - num_spells[i])
        steps_of_others = int(num_steps.sum() - num_steps[i])
        told = np.isfinite(log_ratios[:, i])
        is_fast = slow_steps(-log_ratios[told, i], doubts=doubts[told, i], sigmas=sigmas[i])
        usual = usual_share(spells_of_others, steps_of_others, starts(is_fast))
        run = steps_beyond_chance(is_slow[told, i], usual, between)
        if run:
            runs[i] = run
    return runs


def usual_share(spells_of_others: int, steps_of_others: int, starts_of_fast: Flags) -> float:
    """Return the share of healthy steps of a rank in which a slow spell begins.

    Args:
        spells_of_others: slow spells of the other ranks without a finding.
        steps_of_others: their steps.
        starts_of_fast: whether a fast spell of the rank itself begins [steps].
    """
    of_others = (1.0 + spells_of_others) / (1.0 / USUAL_SHARE + steps_of_others)
    return max(of_others, float(starts_of_fast.mean()))


def steps_beyond_chance(is_slow: Flags, usual: float, between: float) -> int:
    """Return the number of last steps that hold more slow spells than chance; 0: none do.

    Args:
        is_slow: steps of one rank [steps], newest last.
        usual: share of healthy steps in which a spell starts.
        between: steps of a rank between two of its false alarms.
    """
    from scipy.special import bdtrc  # slow to import: not at start-up

    begun = np.flatnonzero(starts(is_slow))[::-1]
    num_steps = len(is_slow) - begun
    # Of any of so many runs: less would do for independent steps, but noise comes in bouts.
    chance = bdtrc(np.arange(len(begun)), num_steps, usual) * len(is_slow)
    chance[: FEWEST_SPELLS - 1] = 1.0
    least = int(chance.argmin()) if len(chance) else 0
    return int(num_steps[least]) if len(chance) and chance[least] < 1.0 / between else 0


def period(is_slow: Flags, steps: Positions) -> int:
    """Return k where a slow spell begins in every k-th step, however long it lasts; 0: in others.

    Args:
        is_slow: steps of one rank [steps], newest last.
        steps: their numbers [steps].
    """
    gaps = set(np.diff(steps[starts(is_slow)]).tolist())
    return int(gaps.pop()) if len(gaps) == 1 else 0


def spells(is_slow: Flags) -> Flags | None:
    """Return the steps [steps] from a rank's first slow spell to its last; None: it has too few."""
    if starts(is_slow).sum() < FEWEST_SPELLS:
        return None
    at = np.flatnonzero(is_slow)
    return is_slow[at[0] : at[-1] + 1]


def is_ongoing(is_slow: Flags) -> bool:
    """Return whether a rank with several slow spells in its steps [steps], newest last, has been
    quiet for too short a time to be no longer slow now and then.
    """
    seen = spells(is_slow)
    if seen is None or seen.all():
        return False
    num_quiet = len(is_slow) - 1 - int(np.flatnonzero(is_slow)[-1])
    return (1.0 - float(seen.mean())) ** num_quiet > STILL_SO
