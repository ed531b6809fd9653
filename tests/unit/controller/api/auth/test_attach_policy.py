"""A report may speak of the ranks of its own node only, where it is known whose they are."""

from dataclasses import replace

import pytest

from pacekeeper.controller.api.auth.attach_policy import find_foreign_rank
from pacekeeper.controller.state.persistent_map import NodeMap
from pacekeeper.controller.state.state import (
    JobState,
    NodeState,
    RankState,
    RankStatus,
    State,
)
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, RankExitRecord, Record, StepRecord

RUN_ID = 1000


def attachment(rank: int, run_id: int = RUN_ID) -> Attachment:
    return Attachment(job="moe", rank=rank, world_size=4, pid=rank + 1, run_id=run_id)


def state(
    *, is_there: bool = True, status: RankStatus = RankStatus.ALIVE, job_run_id: int = RUN_ID
) -> State:
    """Rank 0 is of node a, rank 1 of node b."""
    ranks = {
        rank: RankState(attachment=attachment(rank, job_run_id), node=node, status=status)
        for rank, node in enumerate("ab")
    }
    return State(
        jobs={"moe": JobState(name="moe", run_id=job_run_id, ranks=ranks)},
        nodes=NodeMap(
            {
                node: NodeState(name=node, agent_incarnation="x", is_connected=is_there)
                for node in "ab"
            }
        ),
    )


def report(
    *records: Record, attached: tuple[Attachment, ...] = (), run_id: int = RUN_ID
) -> NodeReport:
    job = JobReport(job="moe", run_id=run_id, records=records, attached=attached)
    return NodeReport(sequence=1, sent_mono_s=0.0, jobs=(job,))


def step(rank: int) -> StepRecord:
    return StepRecord(rank=rank, step=1, generation=1, duration_s=0.1, tokens=1)


def killed(rank: int) -> RankExitRecord:
    return RankExitRecord(rank=rank, pid=rank + 1, exit_code=0, signal=9)


@pytest.mark.parametrize(
    "told",
    [
        report(step(1)),
        report(killed(1)),
        report(step(0), step(1)),
        report(attached=(attachment(1),)),
    ],
)
def test_what_is_told_of_another_nodes_rank_is_foreign(told: NodeReport) -> None:
    assert find_foreign_rank(state(), "a", told) == "rank 1 of job moe belongs to node b"
    assert find_foreign_rank(state(), "b", report(step(1), killed(1))) == ""


def test_work_in_tables_is_of_its_ranks() -> None:
    work = MicroBatchRecord(rank=1, step=1, micro_batch=0, generation=1, compute_s=0.1, tokens=1)
    job = JobReport(job="moe", run_id=RUN_ID, micro_batches=(table_from_records([work]),))
    told = NodeReport(sequence=1, sent_mono_s=0.0, jobs=(job,))
    assert find_foreign_rank(state(), "a", told) == "rank 1 of job moe belongs to node b"
    assert find_foreign_rank(state(), "b", told) == ""


def test_a_rank_that_nobody_has_attached_is_whoevers_brings_it() -> None:
    assert find_foreign_rank(state(), "a", report(step(2), attached=(attachment(2),))) == ""
    assert find_foreign_rank(State(), "a", report(step(1))) == ""


def test_the_ranks_of_an_agent_that_is_away_may_be_taken_over() -> None:
    """It may have come back under another name."""
    assert find_foreign_rank(state(is_there=False), "a", report(step(1))) == ""


def test_the_dead_and_other_lives_belong_to_nobody() -> None:
    assert find_foreign_rank(state(status=RankStatus.DEAD), "a", report(step(1))) == ""
    assert find_foreign_rank(state(), "a", report(step(1), run_id=RUN_ID + 1)) == ""
    assert find_foreign_rank(state(job_run_id=0), "a", report(step(1), run_id=0)) == ""


def test_every_job_of_a_report_is_looked_at() -> None:
    told = report(step(1))
    other = replace(told.jobs[0], job="other")
    assert find_foreign_rank(state(), "a", replace(told, jobs=(other, *told.jobs))) != ""
