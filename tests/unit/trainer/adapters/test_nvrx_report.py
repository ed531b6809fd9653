"""Scores by the published formula, on paper; beside the original: test_trainer_nvrx_beside."""

import math
from typing import Any

import pytest

from pacekeeper.trainer.adapters import nvrx_report
from pacekeeper.trainer.adapters.nvrx_report import RankTimes, Report, Statistic, StragglerId


def rank_times(rank: int, sections: dict[str, float], **device: tuple[float, float]) -> RankTimes:
    return RankTimes(
        rank=rank, node=f"n{rank}", sections=sections, device=device, own_sections={},
        own_device=math.nan,
    )  # fmt: skip


def report(**fields: Any) -> Report:
    values: dict[str, Any] = {
        "gpu_relative_perf_scores": {},
        "section_relative_perf_scores": {},
        "gpu_individual_perf_scores": {},
        "section_individual_perf_scores": {},
        "rank_to_node": {0: "a", 1: "b"},
        "local_section_summaries": {},
        "local_kernel_summaries": {},
        "generate_report_elapsed_time": 0.0,
        "gather_on_rank0": True,
        "rank": 0,
    }
    return Report(**values | fields)


def test_a_rank_is_compared_with_the_fastest_in_what_all_ranks_ran() -> None:
    told = [
        rank_times(0, {"fwd": 1.0, "alone": 5.0}, a=(1.0, 30.0), b=(4.0, 10.0)),
        rank_times(1, {"fwd": 2.0}, a=(2.0, 60.0), c=(1.0, 1.0)),
    ]
    devices, sections = nvrx_report.scores(told, told, {"fwd", "alone", "earlier"})
    assert sections["fwd"] == {0: 1.0, 1: 0.5}
    assert all(math.isnan(score) for score in sections["alone"].values())
    assert all(math.isnan(score) for score in sections["earlier"].values())
    assert devices == {0: 1.0, 1: 0.5}
    devices, sections = nvrx_report.scores(told, told[1:], None)
    assert sections == {"fwd": {1: 0.5}} and devices == {1: 0.5}


def test_what_ran_longer_weighs_more_in_the_score_of_a_device() -> None:
    one = nvrx_report.weighted({"a": 1.0, "b": 1.0}, {"a": (2.0, 30.0), "b": (1.0, 10.0)})
    assert one == pytest.approx((0.5 * 30 + 1.0 * 10) / 40)
    assert math.isnan(nvrx_report.weighted({}, {"a": (2.0, 30.0)}))
    assert math.isnan(nvrx_report.weighted({"a": 0.0}, {"a": (0.0, 0.0)}))


def test_no_time_is_no_score() -> None:
    assert math.isnan(nvrx_report.against({"a": 0.0}, {"a": 0.0})["a"])


def test_the_median_is_the_lower_one() -> None:
    summary = nvrx_report.summary_of([4.0, 1.0, 3.0, 2.0])
    assert (summary[Statistic.MED], summary[Statistic.NUM]) == (2.0, 4)
    assert (summary[Statistic.MIN], summary[Statistic.MAX], summary[Statistic.AVG]) == (1, 4, 2.5)
    assert math.isnan(nvrx_report.summary_of([1.0])[Statistic.STD])
    assert str(Statistic.MED) == "MED"


def test_who_is_below_a_threshold_is_named_and_unknown_is_not_below() -> None:
    found = report(
        gpu_relative_perf_scores={0: 0.74, 1: 0.75},
        gpu_individual_perf_scores={0: math.nan, 1: 0.2},
        section_relative_perf_scores={"fwd": {0: 1.0, 1: 0.5}, "bwd": {0: 1.0}},
        section_individual_perf_scores={"fwd": {0: 0.6}},
    )
    first, second = StragglerId(rank=0, node="a"), StragglerId(rank=1, node="b")
    assert found.identify_stragglers() == {
        "straggler_gpus_relative": {first},
        "straggler_gpus_individual": {second},
        "straggler_sections_relative": {"fwd": {second}},
        "straggler_sections_individual": {"fwd": {first}},
    }
    strict = found.identify_stragglers(
        gpu_rel_threshold=0.1, section_rel_threshold=0.1, gpu_indiv_threshold=0.1,
        section_indiv_threshold=0.1,
    )  # fmt: skip
    assert not any(strict.values())


def test_suspects_are_the_controllers_and_no_matter_of_scores() -> None:
    found = report(suspect_ranks=frozenset({1, 7}))
    assert found.identify_suspects() == {
        StragglerId(rank=1, node="b"), StragglerId(rank=7, node="<unk>"),
    }  # fmt: skip
    assert not any(found.identify_stragglers().values())
