"""Plans of the policy for slow ranks, followed by the engine: it trains as one process does.

Slow ranks and levels that wait are drawn anew for each plan: rows by pipeline and by stage,
replicas, shards, layers, ranks left out, schedules, and the way home.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.plan_phase import RankRejection
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import STATE_MOVING_LEVELS, MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import ENGINE_CAPABILITIES
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import ROWS, PlainRun, adamw, engine_of, own_batches, rows_of
from support.partitioned import view_of, work_of
from support.rank_threads import ThreadGroup, run_ranks

FAMILY, STEPS, CLIP, SHARDS, AT_ONCE, SLOTS = "qwen3_moe", 8, 0.4, 4, 3, 4
CONFIG = PolicyConfig(min_nodes=1, plan_s=0.0, min_gain=0.001)
MESHES = {"stages": (2, 1), "stages and groups": (2, 2), "groups": (1, 2)}


def view(layout: Layout, home: Layout, chosen: Random) -> PlanningSnapshot:
    """The job on this layout, with up to two slow ranks."""
    ranks = chosen.sample(layout.working, min(chosen.randint(0, 2), len(layout.working) - 1))
    slow = {rank: chosen.choice([1.5, 3.0, 100.0]) for rank in ranks}
    found = view_of(layout, slow=slow, baseline=home, rows=ROWS, work=work_of(layout))
    refusals = {
        level: RankRejection(plan=layout, rank=0, reason="no", count=1, until_s=60.0)
        for level in STATE_MOVING_LEVELS
        if chosen.random() < 0.5
    }
    return replace(
        found,
        history=PlanHistory(refusals=refusals),
        shape=replace(
            found.shape,
            splits_each_step=False,
            slots_per_rank=SLOTS,
            rows_per_microbatch=AT_ONCE,
            num_microbatches=2,
        ),
        next_generation=layout.generation + 1,
        capabilities=ENGINE_CAPABILITIES,
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.usefixtures("wide")
def test_the_engine_follows_each_plan(mesh: str) -> None:
    plain = PlainRun(FAMILY, STEPS, CLIP)
    num_stages, tensor_size = MESHES[mesh]
    num_ranks = 2 * num_stages * tensor_size
    layout = start_layout(
        [4, 4],
        range(num_ranks),
        num_stages=num_stages,
        tensor_size=tensor_size,
        num_attention_shards=SHARDS,
        num_mlp_shards=SHARDS,
    )
    chosen, plans, levels = Random(mesh), list[Layout](), Counter[MitigationLevel]()
    while len(plans) < STEPS:
        decision = decide(view(plans[-1] if plans else layout, layout, chosen), CONFIG)
        if decision.layout is not None:
            plans.append(decision.layout)
            levels[decision.level] += 1
    assert len(levels) > 2
    assert num_stages == 1 or any(plan.stage_shares for plan in plans)
    assert num_stages == 1 or any(plan.schedule is not layout.schedule for plan in plans)

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of(
            FAMILY, group, layout=layout, shards=SHARDS, num_slots=SLOTS, max_grad_norm=CLIP
        )
        adamw(engine)
        losses = []
        for step, plan in enumerate(plans):
            engine.apply(plan)
            losses.append(engine.step(own_batches(engine, rows_of(step), AT_ONCE)).loss.item())
        return losses

    for losses in run_ranks(num_ranks, work):
        assert losses == pytest.approx(plain.losses, rel=1e-11), levels
