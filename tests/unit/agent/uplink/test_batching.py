"""A node's ranks tell the same experts' loads at once: they go as their sum."""

from dataclasses import replace

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.uplink.batching import MAX_COUNT, sum_expert_loads
from pacekeeper.core.telemetry.records import ExpertLoadRecord, Record
from support.agents import step

LOADS = ExpertLoadRecord(rank=8, step=3, generation=1, layer=0, first_expert=16, counts=(5, 0, 7))


def summed(*records: Record) -> tuple[Record, ...]:
    (reading,) = sum_expert_loads([RingBatch(job="job", run_id=4, records=records)])
    assert (reading.job, reading.run_id) == ("job", 4)
    return reading.records


def test_ranks_of_one_place_are_added_up_and_counted() -> None:
    more = replace(LOADS, rank=9, counts=(1, 2, 3))
    assert summed(LOADS, more) == (replace(LOADS, counts=(6, 2, 10), num_ranks=2),)


def test_other_records_stay_in_their_order_before_the_sums() -> None:
    more = replace(LOADS, rank=9)
    first, second = step(3), step(4)
    *others, load = summed(first, LOADS, second, more)
    assert (others, load) == ([first, second], replace(LOADS, counts=(10, 0, 14), num_ranks=2))


def test_steps_generations_layers_and_experts_are_apart() -> None:
    others = [
        replace(LOADS, rank=9, step=4),
        replace(LOADS, rank=9, generation=2),
        replace(LOADS, rank=9, layer=1),
        replace(LOADS, rank=9, first_expert=32),
        replace(LOADS, rank=9, counts=(1, 1)),
    ]
    assert set(summed(LOADS, *others)) == {LOADS, *others}


def test_a_lone_rank_is_told_as_it_is() -> None:
    records = (LOADS, step(3), replace(LOADS, layer=1))
    assert summed(*records) == records


def test_a_sum_that_no_wire_holds_is_not_made() -> None:
    broken = replace(LOADS, rank=9, counts=(MAX_COUNT, 1, 1))
    assert summed(LOADS, broken) == (LOADS, broken)


def test_sums_are_added_to_sums() -> None:
    sums = [replace(LOADS, rank=rank, num_ranks=4) for rank in (0, 4)]
    assert summed(*sums) == (replace(sums[0], counts=(10, 0, 14), num_ranks=8),)
