"""Only plans that the trainer can carry out: a foreign job that changes its micro-batches alone."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.even_layout import flat_pipelines
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import (
    DEFAULT_CAPABILITIES,
    Attachment,
    Capability,
    ModelShape,
)
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from support.machine_driver import (
    QUICK,
    WARM,
    Driver,
    applied,
    attachment,
    refused,
)

NUM_RANKS, PER_STEP, MICRO_BATCH_S = 4, 28, 0.025
SHAPE = ModelShape(
    num_layers=1,
    num_experts=0,
    experts_per_token=0,
    rows_per_step=PER_STEP,
    slots_per_rank=0,
    expert_bytes=0,
    dense_bytes=0,
)
FIRST = Layout(
    generation=1,
    num_attention_shards=1,
    num_mlp_shards=1,
    pipelines=flat_pipelines(range(NUM_RANKS), 1),
    experts=((),),
)


def attached(rank: int, plan_kinds: str) -> Attachment:
    return replace(attachment(rank, model=SHAPE), plan_kinds=plan_kinds)


def started(plan_kinds: str = Capability.MICROBATCH_COUNTS) -> Driver:
    driver = Driver(config=QUICK)
    for node, ranks in (("node-0", (0, 1)), ("node-1", (2, 3))):
        driver.agent(node)
        driver.report(node=node, attached=[attached(r, plan_kinds) for r in ranks], layouts=[FIRST])
    driver.report(*applied(FIRST))
    return driver


def step(number: int, layout: Layout, slow: int | None, slowdown: float) -> Iterable[Record]:
    """Each rank runs its micro-batches, one after the other; the slowest one ends the step."""
    counts, spent_s = layout.rows_of(PER_STEP), dict.fromkeys(layout.ranks, 0.0)
    for rank, count in counts.items():
        for place in range(count):
            noise = 1.0 + 0.002 * ((number + 3 * place + rank) % 5)
            compute_s = MICRO_BATCH_S * (slowdown if rank == slow else 1.0) * noise
            spent_s[rank] += compute_s
            yield MicroBatchRecord(
                rank=rank, step=number, micro_batch=place, generation=layout.generation,
                compute_s=compute_s, tokens=512, sum_len_squared=32_768,
                expert_rows=1024, num_active_experts=8,
            )  # fmt: skip
    for rank in layout.ranks:
        yield StepRecord(
            rank=rank, step=number, generation=layout.generation,
            duration_s=max(spent_s.values()) + 0.002, tokens=512 * PER_STEP, loss=2.0,
        )  # fmt: skip


def train(
    driver: Driver, first: int, end: int, layout: Layout, slow: int | None = None,
    slowdown: float = 2.0,
) -> int:  # fmt: skip
    """Steps [first, end); stops where a plan is offered. The step after the last."""
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*step(number, layout, slow, slowdown))
        if driver.job.plan.desired is not None:
            return number + 1
    return end


def test_a_slow_rank_runs_fewer_micro_batches_and_as_many_again_once_it_is_well() -> None:
    driver = started()
    at = train(driver, 0, WARM, FIRST)
    at = train(driver, at, at + 20, FIRST, slow=2)
    plan = driver.job.plan.desired
    assert plan is not None and driver.job.plan.offer is not None
    decision = driver.job.plan.offer.decision
    assert decision.level is MitigationLevel.BATCH_SHARES
    assert plan.rows_of(PER_STEP) == {0: 8, 1: 8, 2: 4, 3: 8}  # the fluid limit itself
    # 7 on the slow rank before, 8 on the others now.
    assert decision.current_step_s == pytest.approx(7 * 2 * MICRO_BATCH_S, rel=0.02)
    assert decision.planned_step_s == pytest.approx(8 * MICRO_BATCH_S, rel=0.03)
    driver.report(*applied(plan))
    assert driver.job.layouts.current == plan
    at = train(driver, at, at + 15, plan, slow=2)
    assert driver.job.plan.desired is None and driver.job.plan.failed is None
    assert driver.job.detection.evidence.slow.keys() == {2}
    train(driver, at, at + 60, plan)
    home = driver.job.plan.desired
    assert home is not None and driver.job.plan.offer is not None
    assert driver.job.plan.offer.decision.level is MitigationLevel.RETURN_HOME
    assert home.pipelines == FIRST.pipelines


def test_a_rank_that_hardly_moves_keeps_one_micro_batch() -> None:
    driver = started()
    at = train(driver, 0, WARM, FIRST)
    train(driver, at, at + 20, FIRST, slow=1, slowdown=60.0)
    plan = driver.job.plan.desired
    assert plan is not None and plan.rows_of(PER_STEP) == {0: 9, 1: 1, 2: 9, 3: 9}


def test_nothing_is_offered_to_a_trainer_that_can_carry_out_nothing_known() -> None:
    driver = started("juggling")
    at = train(driver, 0, WARM, FIRST)
    assert train(driver, at, at + 20, FIRST, slow=2) == at + 20
    assert driver.job.detection.evidence.slow.keys() == {2}
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.level is MitigationLevel.NOTHING


def test_a_refused_plan_is_withdrawn_and_its_kind_waits() -> None:
    driver = started()
    at = train(driver, 0, WARM, FIRST)
    at = train(driver, at, at + 20, FIRST, slow=2)
    plan = driver.job.plan.desired
    assert plan is not None
    driver.report(refused(plan, 3, "the loader has no rows left"))
    assert driver.job.plan.desired is None
    refusal = driver.job.plan.refusals[MitigationLevel.BATCH_SHARES]
    assert "no rows left" in refusal.text
    assert train(driver, at, at + 10, FIRST, slow=2) == at + 10


@pytest.mark.parametrize(
    ("kinds", "model", "expected"),
    [
        ("", SHAPE, DEFAULT_CAPABILITIES),
        ("microbatch_counts", SHAPE, {Capability.MICROBATCH_COUNTS}),
        ("batch_shares later token_shares", SHAPE, {"batch_shares", "token_shares"}),
        ("later", SHAPE, set()),
        ("batch_shares", None, set()),
    ],
)
def test_capabilities_of_an_attachment(
    kinds: str, model: ModelShape | None, expected: set[str]
) -> None:
    of = replace(attachment(0, model=model), plan_kinds=kinds)
    assert of.capabilities == expected
