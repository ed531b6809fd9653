"""Builds the inputs of a decision, a `PlanningSnapshot`, from a job's state. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp

import numpy as np

from pacekeeper.controller.detection.link_verdicts import slow_links
from pacekeeper.controller.detection.peer_groups import peers
from pacekeeper.controller.mitigation import probes
from pacekeeper.controller.mitigation.verification import measured_step_s, steps_since_onset
from pacekeeper.controller.observability.explain import slowdown_interval
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot, RankTime
from pacekeeper.controller.state.state import JobState, NodeState
from pacekeeper.core.telemetry.attachment import Capability
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.predictor.cost.forecast import Workload, forecast
from pacekeeper.predictor.detector.state import among, microbatches_per_step, series_of

LEAST_DENSE = 0.05  # of a rank's time: loads are means, which may overstate the experts' part


def snapshot_of(
    job: JobState,
    now_s: float,
    nodes: Mapping[str, NodeState],
    lemons: Collection[str] = (),
) -> PlanningSnapshot:
    """Return the inputs of a decision on an actionable job.

    Args:
        job: The job; its layout, its model's shape and its expert loads are known.
        now_s: The machine's clock.
        nodes: The nodes, by name; the source of racks.
        lemons: Nodes that were slow repeatedly.
    """
    layout, shape = job.layouts.current, job.shape
    assert layout is not None and shape is not None, "actionable"
    evidences = [known.evidence for known in peers(job, layout.working)]
    view = PlanningSnapshot(
        layout=layout,
        shape=shape,
        model=job.detection.evidence.model,
        workload=Workload(
            num_rows=shape.rows_per_step,
            tokens=job.workload.tokens_per_step,
            sum_len_squared=job.workload.squares_per_step,
            num_documents=job.workload.documents_per_step,
            head_tokens=job.workload.head_tokens_per_step,
            expert_rows=job.workload.expert_rows_per_step,
            active_experts=job.workload.active_experts_per_step,
            loads=job.workload.loads or ((),) * shape.num_layers,
            num_microbatches=shape.num_microbatches or max(map(microbatches_per_step, evidences)),
            are_rows_microbatches=Capability.MICROBATCH_COUNTS in job.capabilities,
        ),
        slow=job.detection.evidence.slow,
        unprobed=probes.unprobed(job),
        refuted=probes.refuted(job),
        is_probing=job.detection.probe is not None,
        asked_s=now_s,
        baseline=job.layouts.baseline,
        step_s=measured_step_s(job) or 0.0,
        steps_since_plan=job.progress.step - job.layouts.first_step,
        is_provisional=job.layouts.is_provisional,
        by_survivors=job.layouts.is_provisional
        and layout.generation not in job.layouts.offer_reasons,
        num_load_steps=job.workload.num_load_steps,
        next_generation=job.layouts.newest_generation + 1,
        node_of={rank: job.ranks[rank].node for rank in layout.ranks},
        rack_of=_racks(job, layout.ranks, nodes),
        slow_steps=steps_since_onset(job),
        slow_links=slow_links(job),
        slow_at_least=_slow_at_least(job, layout.working),
        link_s_per_byte=_link_s_per_byte(job),
        memory_of={
            rank: known.memory_bytes
            for rank in layout.ranks
            if (known := job.ranks[rank].attachment.model) is not None and known.memory_bytes
        },
        approved=None if job.plan.approved is None else job.plan.approved.decision,
        cordoned=job.cordoned,
        doubted=frozenset(rank for rank in layout.ranks if job.ranks[rank].node in lemons),
        history=PlanHistory(
            moves=job.plan.moves,
            failed=job.plan.failed,
            refusals={**job.plan.refusals, **job.plan.rollbacks},
            losses=job.losses,
        ),
        capabilities=job.capabilities,
    )
    return _with_work(view, job) if view.is_partitioned else view


def _slow_at_least(job: JobState, ranks: Sequence[int]) -> dict[int, float]:
    """Return the lower end of the slowdown of each slow rank whose recent steps suffice."""
    steps, found = steps_since_onset(job), {}
    for known in peers(job, ranks):
        charts = known.evidence.charts
        for at, rank in enumerate(charts.ranks):
            if rank not in known.evidence.slow:
                continue
            interval = slowdown_interval(np.exp(series_of(charts, at)[-(steps or 0) :]).tolist())
            if interval is not None and interval.low is not None:
                found[rank] = max(1.0, interval.low / exp(charts.doubt[at]))
    return found


def _link_s_per_byte(job: JobState) -> float:
    """Return the median over steps of what the transfers of ranks with healthy links took."""
    links = job.detection.links
    told = [
        sample.observed_s[of] / sample.features[of, FEATURES.index("tokens")]
        for sample in links.history
        if (of := ~among(sample.ranks, links.slow)).any()
    ]
    return float(np.median(np.concatenate(told))) if told else 0.0


def _racks(job: JobState, ranks: Iterable[int], nodes: Mapping[str, NodeState]) -> dict[int, str]:
    """Return the racks of the ranks whose node reports one."""
    of_node = {name: node.rack for name, node in nodes.items() if node.rack}
    return {rank: of_node[on] for rank in ranks if (on := job.ranks[rank].node) in of_node}


def _with_work(view: PlanningSnapshot, job: JobState) -> PlanningSnapshot:
    """Add the time of each rank's work, once every role has a cost model; otherwise unchanged."""
    work: dict[int, RankTime] = {}
    for known in peers(job, view.layout.working):
        model = known.evidence.model
        if model is None:
            return view
        parts = forecast(view.layout, model=model, workload=view.workload, speeds={})
        for rank in known.ranks:
            whole_s = job.detection.measured.of(rank).expected_s
            if whole_s is None:
                return view
            fixed_s = min(parts.fixed_s, (1.0 - LEAST_DENSE) * whole_s)
            expert_s = min(parts.expert_s[rank], (1.0 - LEAST_DENSE) * whole_s - fixed_s)
            work[rank] = RankTime(
                dense_s=whole_s - fixed_s - expert_s, expert_s=expert_s, fixed_s=fixed_s
            )
    return replace(view, work=work)
