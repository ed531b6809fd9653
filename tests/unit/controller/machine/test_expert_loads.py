"""Loads are learnt when all ranks of a layer have told them: late, in turns, or as sums."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.uplink.batching import sum_expert_loads
from pacekeeper.controller.machine import expert_loads
from pacekeeper.controller.machine.expert_loads import LATE_STEPS
from pacekeeper.controller.state.job_parts import LayoutState, StepProgress
from pacekeeper.controller.state.state import JobState, RankState
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import ExpertLoadRecord
from support.machine_driver import SHAPE, attachment

LAYERS, EXPERTS, WEIGHT = 4, 8, 0.1
WIDE = even_layout(ranks=range(4), num_layers=LAYERS, num_experts=EXPERTS, replicas=2)
STAGED = even_layout(
    ranks=range(4), num_layers=LAYERS, num_experts=EXPERTS, replicas=2, num_stages=2
)


def job_of(layout: Layout | None = WIDE) -> JobState:
    shape = replace(SHAPE, num_layers=LAYERS, num_experts=EXPERTS)
    ranks = {
        rank: RankState(attachment=attachment(rank, model=shape), node=f"node-{rank // 2}")
        for rank in range(4)
    }
    return JobState(name="job", ranks=ranks, layouts=LayoutState(current=layout))


def told(
    step: int,
    *,
    ranks: Sequence[int] = range(4),
    layers: Sequence[int] = range(LAYERS),
    generation: int = 1,
    times: int = 1,
) -> list[ExpertLoadRecord]:
    """Rank r sends r + 1 rows to expert 0, r + 2 to expert 1, ..., in each layer; `times` more."""
    return [
        ExpertLoadRecord(
            rank=rank,
            step=step,
            generation=generation,
            layer=layer,
            first_expert=first,
            counts=tuple(times * (rank + 1 + first + i) for i in range(4)),
        )
        for rank in ranks
        for layer in layers
        for first in (0, 4)
    ]


def after(job: JobState, records: Sequence[ExpertLoadRecord]) -> JobState:
    return expert_loads.fold_complete(expert_loads.add_counts(job, records), WEIGHT)


ALL = tuple(10.0 + 4 * expert for expert in range(EXPERTS))  # rows of each, of four ranks


def test_the_first_whole_step_is_the_mean_and_the_next_ones_move_it() -> None:
    job = after(job_of(), told(0))
    assert (job.workload.loads, job.workload.num_load_steps) == ((ALL,) * LAYERS, 1)
    job = after(job, told(1, times=2))
    assert job.workload.loads[0] == pytest.approx([1.1 * rows for rows in ALL])
    assert job.workload.num_load_steps == 2


def test_a_part_of_the_ranks_is_not_learnt() -> None:
    job = after(job_of(), told(0, ranks=[0, 1, 3]))
    assert job.workload.loads == ()
    assert after(job, told(0, ranks=[2])).workload.loads == (ALL,) * LAYERS


def test_a_part_of_the_experts_is_not_learnt() -> None:
    first, *others = told(0)
    job = after(job_of(), others)
    assert job.workload.loads == ()
    assert after(job, [first]).workload.loads == (ALL,) * LAYERS


def test_counts_that_come_steps_later_are_learnt() -> None:
    job = replace(job_of(), progress=StepProgress(step=5))  # judged long ago
    assert after(job, told(3)).workload.loads == (ALL,) * LAYERS


def test_layers_told_in_turns_keep_their_own_means() -> None:
    job = job_of()
    for step in range(2 * LAYERS):
        assert (job.workload.loads == ()) == (step < LAYERS), "known once each layer was told"
        job = after(job, told(step, layers=[step % LAYERS]))
    assert job.workload.loads == (ALL,) * LAYERS
    assert job.workload.num_load_steps == 2


def test_of_a_pipeline_the_ranks_of_a_stage_are_enough() -> None:
    job = after(job_of(STAGED), told(0, ranks=STAGED.ranks_of_layer(0), layers=[0, 1]))
    assert job.workload.loads == ()
    job = after(job, told(0, ranks=STAGED.ranks_of_layer(2), layers=[2, 3]))
    assert len(job.workload.loads) == LAYERS
    assert job.workload.loads[0][0] == sum(rank + 1 for rank in STAGED.ranks_of_layer(0))


def test_ranks_that_stand_by_tell_nothing_and_nobody_waits_for_them() -> None:
    even = even_layout(ranks=range(3), num_layers=LAYERS, num_experts=EXPERTS, replicas=2)
    job = after(job_of(replace(even, standing_by=(3,))), told(0, ranks=range(3)))
    assert job.workload.num_load_steps == 1


def test_counts_under_a_layout_that_is_not_in_force_yet_wait_for_it() -> None:
    job = after(job_of(), told(0, generation=2))
    assert job.workload.loads == ()
    job = replace(job, layouts=replace(job.layouts, current=replace(WIDE, generation=2)))
    assert expert_loads.fold_complete(job, WEIGHT).workload.loads == (ALL,) * LAYERS


def test_counts_under_a_layout_that_is_over_are_forgotten() -> None:
    job = job_of()
    job = replace(job, layouts=replace(job.layouts, current=replace(WIDE, generation=2)))
    job = after(job, told(0))
    assert job.workload.loads == ()
    assert not job.workload.load_drafts.by_layer


def test_a_step_begun_under_one_layout_and_done_again_under_the_next_counts_once() -> None:
    job = after(job_of(), told(0, ranks=[0, 1]))
    job = replace(job, layouts=replace(job.layouts, current=replace(WIDE, generation=2)))
    job = after(job, [*told(0, generation=2), *told(0, ranks=[3])])
    assert job.workload.loads == (ALL,) * LAYERS


def test_what_is_told_twice_counts_once() -> None:
    job = after(job_of(), [*told(0), *told(1)])
    again = after(job, told(0, times=9))
    assert (again.workload.loads, again.workload.num_load_steps) == (job.workload.loads, 2)


def test_a_job_that_went_back_learns_from_its_steps_again() -> None:
    job = after(after(job_of(), told(7)), told(8, ranks=[0, 1]))
    job = expert_loads.reset_drafts(job)
    assert after(job, [*told(7), *told(8)]).workload.num_load_steps == 3


def test_what_never_becomes_whole_does_not_stay() -> None:
    job = job_of()
    for step in range(5 * LATE_STEPS):
        job = after(job, told(step, ranks=[0]))
    assert {step for step, _ in job.workload.load_drafts.by_layer} == {
        *range(4 * LATE_STEPS, 5 * LATE_STEPS)
    }


def test_old_folds_are_not_remembered_for_ever() -> None:
    job = job_of()
    for step in range(3 * LATE_STEPS):
        job = after(job, told(step))
    assert len(job.workload.load_drafts.folded) == LAYERS * LATE_STEPS


def test_what_the_model_lacks_and_who_is_unknown_say_nothing() -> None:
    strange = [replace(one, layer=LAYERS) for one in told(0)]
    strange += [replace(one, first_expert=EXPERTS - 1) for one in told(0)]
    strange += [replace(one, rank=77) for one in told(0)]
    job = job_of()
    assert expert_loads.add_counts(job, strange) is job


@given(
    layout=st.sampled_from([WIDE, STAGED]),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_nodes_that_add_up_and_ranks_that_do_not_say_the_same(
    layout: Layout, steps: list[int], data: st.DataObject
) -> None:
    apart, added = job_of(layout), job_of(layout)
    for step, times in enumerate(steps):
        records = [
            one
            for span in layout.spans
            for one in told(step, ranks=layout.ranks_of_layer(span.start), layers=span, times=times)
        ]
        apart = after(apart, records)
        for node in (0, 1):
            own = [one for one in records if one.rank // 2 == node]
            cut = data.draw(st.integers(0, len(own)))  # two looks into the rings
            looks = [RingBatch(job="job", records=tuple(own[:cut]))]
            looks += [RingBatch(job="job", records=tuple(own[cut:]))]
            for reading in sum_expert_loads(looks):
                loads = [one for one in reading.records if isinstance(one, ExpertLoadRecord)]
                added = after(added, loads)
    assert (added.workload.loads, added.workload.num_load_steps) == (
        apart.workload.loads,
        apart.workload.num_load_steps,
    )
    assert apart.workload.num_load_steps == len(steps)


def test_what_is_told_twice_before_all_have_told_counts_once() -> None:
    job = after(job_of(), [*told(0, ranks=[0, 1]), *told(0, ranks=[0, 1])])
    job = after(job, told(0, ranks=[1, 2]))
    assert job.workload.loads == ()
    assert after(job, told(0)).workload.loads == (ALL,) * LAYERS
