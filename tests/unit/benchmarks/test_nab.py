"""Windows hit and false runs are counted as the peers' were."""

import numpy as np
from benchmarks.nab import Count, counted, flagged


def flags(*points: int, length: int = 100) -> np.typing.NDArray[np.bool_]:
    told = np.zeros(length, dtype=np.bool_)
    told[list(points)] = True
    return told


def test_a_window_is_hit_once_by_many_points() -> None:
    told = counted(flags(50, 51, 55), ((48, 58), (80, 90)))
    assert told == Count(hits=1, windows=2, false_runs=0)


def test_points_beside_each_other_outside_are_one_false_run() -> None:
    assert counted(flags(20, 21, 22, 30, 99), ()).false_runs == 3


def test_a_run_that_goes_through_a_window_is_false_on_both_sides() -> None:
    assert counted(flags(*range(40, 70)), ((50, 60),)) == Count(hits=1, windows=1, false_runs=2)


def test_nothing_counts_in_the_probation() -> None:
    assert counted(flags(0, 14), ((10, 15),)) == Count(hits=0, windows=1, false_runs=0)
    assert counted(flags(749, 750, length=20_000), ()).false_runs == 1


def test_a_stretch_that_takes_longer_is_flagged_from_first_to_last() -> None:
    values = np.ones(400)
    values[200:260] = 1.5
    assert np.flatnonzero(flagged(values, is_steady=False)).tolist() == list(range(200, 260))
