"""Taking records in: cheap at any number of ranks, and the same as looking at everything anew."""

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.machine import steps
from pacekeeper.controller.state.job_parts import LayoutState
from pacekeeper.controller.state.persistent_map import CHUNK_RANKS, RankMap
from pacekeeper.controller.state.state import JobState, RankState, RankStatus
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from support.machine_driver import FIRST, Driver, applied, exited, started, step

RANKS = range(4)
LAYOUT = even_layout(ranks=(0, 1, 2), num_layers=1, num_experts=3, replicas=1)

changes = st.lists(
    st.dictionaries(st.integers(0, 3 * CHUNK_RANKS), st.integers(), max_size=5), max_size=8
)


@given(changes=changes)
def test_a_rank_map_is_the_dictionary_of_its_changes(changes: list[dict[int, int]]) -> None:
    made: RankMap[int] = RankMap()
    expected: dict[int, int] = {}
    for values in changes:
        before, content = made, dict(made)
        made = made.changed(values)
        expected |= values
        assert dict(made) == expected
        assert (len(made), set(made)) == (len(expected), set(expected))
        assert all((rank in made) == (rank in expected) for rank in range(3 * CHUNK_RANKS))
        assert sorted(made.values()) == sorted(expected.values())
        assert [made.get(rank, -1) for rank in range(9)] == [expected.get(r, -1) for r in range(9)]
        assert before == content, "the one from before is as it was"
    assert made == RankMap(expected)


Fact = MicroBatchRecord | StepRecord


def works(rank: int, generation: int) -> Fact:
    return MicroBatchRecord(
        rank=rank, step=0, micro_batch=0, generation=generation, compute_s=0.1, tokens=1
    )


def ends(rank: int, generation: int) -> Fact:
    return StepRecord(rank=rank, step=0, generation=generation, duration_s=0.1, tokens=1)


facts = st.builds(
    lambda make, rank, generation: make(rank, generation),
    st.sampled_from([works, ends]),
    st.sampled_from(RANKS),
    st.sampled_from([1, 1, 1, 2]),
)
lives = st.tuples(st.sampled_from(RANKS), st.sampled_from(list(RankStatus)))


def is_complete(job: JobState, records: list[Fact]) -> bool:
    """The rule as one would say it: everybody committed the step and reported its work."""
    ended = {r.rank: r.generation for r in records if isinstance(r, StepRecord)}
    worked = {(r.rank, r.generation) for r in records if isinstance(r, MicroBatchRecord)}
    must = set(RANKS) if job.layouts.current is None else set(job.layouts.current.ranks)
    whole = {rank for rank, generation in ended.items() if (rank, generation) in worked}
    return bool(whole) and {r for r in must if job.ranks[r].status is RankStatus.ALIVE} <= whole


@given(layout=st.sampled_from([None, LAYOUT]), arrivals=st.lists(facts | lives, max_size=40))
def test_where_it_looks_first_never_changes_what_is_complete(
    layout: Layout | None, arrivals: list[Fact | tuple[int, RankStatus]]
) -> None:
    """Records in any order, repeated, of a step done again; ranks that die, and live again."""
    attached = {
        rank: RankState(
            attachment=Attachment(job="j", rank=rank, world_size=len(RANKS), pid=1), node="n"
        )
        for rank in RANKS
    }
    job = JobState(
        name="j", ranks=attached, world_size=len(RANKS), layouts=LayoutState(current=layout)
    )
    seen: list[Fact] = []
    for arrival in arrivals:
        if isinstance(arrival, tuple):
            rank, status = arrival
            job = replace(job, ranks={**job.ranks, rank: replace(job.ranks[rank], status=status)})
        else:
            seen.append(arrival)
            job = steps.add_pending(
                job,
                [table_from_records([arrival])] if isinstance(arrival, MicroBatchRecord) else [],
                [arrival] if isinstance(arrival, StepRecord) else [],
            )
        if 0 in job.progress.pending:
            for hint in range(3):
                at = steps.first_missing(
                    job, replace(job.progress.pending[0], first_missing=hint), is_work_missing=False
                )
                assert (at is None) == is_complete(job, seen), f"looking at {hint} first"


@given(num_ranks=st.integers(1, 300), per_report=st.integers(1, 20), seed=st.integers(0, 99))
def test_each_rank_is_looked_at_about_once_until_all_are_there(
    num_ranks: int, per_report: int, seed: int
) -> None:
    order, looks = list(range(num_ranks)), 0
    Random(seed).shuffle(order)
    there: set[int] = set()

    def is_there(rank: int) -> bool:
        nonlocal looks
        looks += 1
        return rank in there

    at: int | None = 0
    asked = 0
    while at is not None:
        there |= set(order[:per_report])
        order = order[per_report:]
        at = steps.first_without(range(num_ranks), at, is_there)
        asked += 1
    assert not order
    assert looks <= 2 * num_ranks + asked


def by_kind(records: list[Record]) -> list[Record]:
    """As the wire carries them."""
    kinds = list(dict.fromkeys(type(record) for record in records))
    return [record for kind in kinds for record in records if type(record) is kind]


@given(seed=st.integers(0, 10_000), dead=st.sampled_from([None, 0, 2]))
def test_how_kinds_lie_among_each_other_in_a_report_means_nothing(
    seed: int, dead: int | None
) -> None:
    dice = Random(seed)
    ends = [] if dead is None else [exited(dead)]
    streams: list[list[Record]] = [applied(replace(FIRST, generation=2)), ends]
    for kind in (0, 1, 2):  # of each rank and step: a micro-batch, its loads, its end
        streams.append([record for number in range(3) for record in step(number)[kind::3]])
    told: list[Record] = []
    while any(streams):
        stream = dice.choice([stream for stream in streams if stream])
        told.append(stream.pop(0))

    def after(records: list[Record]) -> Driver:
        driver = started()
        driver.report(*records, layouts=[replace(FIRST, generation=2)])
        return driver

    one, other = after(told), after(by_kind(told))
    assert list(map(repr, one.said)) == list(map(repr, other.said))
    assert (one.job.ranks, one.job.layouts.current) == (other.job.ranks, other.job.layouts.current)
    assert (one.job.progress.step, one.job.workload.loads) == (
        other.job.progress.step,
        other.job.workload.loads,
    )
