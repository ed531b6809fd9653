"""What a slow rank's micro-batches take whatever their rows is explained by its speed."""

from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.step_events import event_step_s
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.policy.partition_inputs import as_partition, unevenness_of
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.core.config.policy import PolicyConfig
from support.examples import examples
from support.partitioned import staged_layout, view_of, work_of

OVERHEAD_S = 0.7


def test_the_time_that_no_price_explains_is_not_that_of_a_slow_rank() -> None:
    """A plan that leaves the rank out is else priced as if its fixed time stayed."""
    drawn: Counter[str] = Counter()

    @settings(max_examples=examples(200))
    @given(
        stages=st.sampled_from((1, 2)),
        data=st.sampled_from((1, 2)),
        tensor=st.sampled_from((1, 2, 4)),
        experts=st.sampled_from((0, 4)),
        fixed=st.floats(0.0, 0.5),
        slow=st.tuples(st.integers(0, 15), st.floats(0.02, 0.9)),
    )
    def holds(
        stages: int, data: int, tensor: int, experts: int, fixed: float, slow: tuple[int, float]
    ) -> None:
        layout = staged_layout(stages=stages, data=data, tensor=tensor, experts=experts)
        victim, speed = slow[0] % len(layout.ranks), slow[1]
        work = {
            rank: replace(time, fixed_s=fixed * time.dense_s)
            for rank, time in work_of(layout).items()
        }
        view = view_of(layout, slow={victim: 1.0 / speed}, work=work)
        if not view.is_partitioned:
            return
        problem = Pricing(view, PolicyConfig()).problem
        assert problem is not None
        uneven = unevenness_of(layout, view.workload.loads, view.speeds)
        now, problem = as_partition(view, layout), replace(problem, unevenness=uneven)
        played_s = event_step_s(now, problem)
        free = replace(problem, model=replace(problem.model, launch_s=0.0))
        drawn["all"] += 1
        # As much as the plan that leaves the rank out gains at most.
        drawn["felt"] += played_s - event_step_s(now, free) > 0.1 * played_s
        found = Pricing(replace(view, step_s=played_s + OVERHEAD_S), PolicyConfig())
        assert found.overhead_s == pytest.approx(OVERHEAD_S, abs=1e-3 * played_s)

    holds()
    assert drawn["felt"] >= 0.2 * drawn["all"]
