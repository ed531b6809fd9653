"""Whoever changes one import from NVRx to ours gets the same reports: both are run on one clock."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gloo_ranks import run_ranks
from support.nvrx_beside import Time, both, place_of_theirs, section, train, unlike

pytestmark = pytest.mark.skipif(
    place_of_theirs() is None,
    reason="nvidia-resiliency-ext is not installed: pip install 'pacekeeper[adapters]'",
)


def test_ranks_of_a_run_get_the_same_reports(tmp_path: Path) -> None:
    found = run_ranks(train, tmp_path, (0, 1, 2))
    assert {rank: one["differences"] for rank, one in found.items()} == {0: [], 1: [], 2: []}
    assert all(one["reports"] > 2 for one in found.values())
    (named,) = found[2]["named"]
    assert named["straggler_sections_relative"] == {
        name: [[2, "node-2"]] for name in ("fwd", "bwd", "optimizer")
    }
    assert set(named["straggler_sections_individual"]) == {"fwd", "bwd", "optimizer"}


TIMES_MS = st.floats(0.125, 8.0)
INTERVALS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), TIMES_MS), max_size=8), min_size=1, max_size=5
)


@settings(max_examples=60)
@given(
    intervals=INTERVALS,
    scores=st.sampled_from(
        ["all", ["relative_perf_scores"], ["individual_perf_scores"], []],
    ),
    every=st.integers(1, 3),
    gathers=st.booleans(),
)
def test_whatever_a_lone_rank_measures_the_reports_agree(
    intervals: list[list[tuple[str, float]]], scores: Any, every: int, gathers: bool
) -> None:
    time = Time()
    with both(
        time, scores_to_compute=scores, profiling_interval=every, gather_on_rank0=gathers
    ) as pair:
        for interval in intervals:
            for name, span_ms in interval:
                section(pair, name, time, span_ms)
            assert unlike(*(one.generate_report() for one in pair)) == []


def test_wrapped_functions_are_sections_of_the_same_name_and_are_given_back() -> None:
    time = Time()

    class Engine:
        def step(self, number: int) -> int:
            time.pass_ms(1.0)
            return number + 1

    engine, original = Engine(), Engine.step
    with both(time) as pair:
        names = []
        for one in pair:
            identity = __import__(one.__module__, fromlist=["CallableId"]).CallableId
            one.wrap_callables([identity(engine, "step"), identity(Engine, "step")])
            assert engine.step(1) == Engine.step(engine, 1) == 2
            names.append(set(one.generate_report().local_section_summaries))
            one.restore_original_callables()
            assert Engine.step is original and engine.step(1) == 2
    assert names[0] == names[1] and len(names[0]) == 2
