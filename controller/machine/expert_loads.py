"""Running mean of each expert's rows, from the router counts that ranks report.

A layer's counts of a step are added once all ranks that run the layer have reported theirs, up to
16 steps late: devices report a step later, and a large model's layers are reported in turns. Agents
sum the counts of their node's ranks; the record holds how many ranks it covers. Pure.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import numpy as np

from pacekeeper.controller.state.expert_load_drafts import LayerDraft, LoadDrafts, StepLayer
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import ExpertLoadRecord

LATE_STEPS = 16  # counts that come later than this after the newest step are dropped


def add_counts(job: JobState, records: Iterable[ExpertLoadRecord]) -> JobState:
    """Add counts to those of the same layer and step; a newer generation replaces an older one.

    Repeated counts, experts that the model lacks and unknown ranks are ignored.
    """
    shape, drafts = job.shape, job.workload.load_drafts
    if shape is None:
        return job
    news = dict[StepLayer, list[ExpertLoadRecord]]()
    for record in records:
        at, end = (record.step, record.layer), record.first_expert + len(record.counts)
        is_of_model = record.layer < shape.num_layers and end <= shape.num_experts
        if is_of_model and record.rank in job.ranks and at not in drafts.folded:
            news.setdefault(at, []).append(record)
    changed = {
        at: _with_more(drafts.by_layer.get(at), told, shape.num_experts)
        for at, told in news.items()
    }
    if not changed:
        return job
    by_layer = {**drafts.by_layer, **changed}
    newest_step = max(drafts.newest_step, *(step for step, _ in changed))
    if newest_step > drafts.newest_step:
        by_layer = {at: one for at, one in by_layer.items() if at[0] > newest_step - LATE_STEPS}
    fresh = drafts.fresh | changed.keys()
    drafts = replace(drafts, by_layer=by_layer, fresh=fresh, newest_step=newest_step)
    return replace(job, workload=replace(job.workload, load_drafts=drafts))


def fold_complete(job: JobState, weight: float) -> JobState:
    """Fold complete counts into the means: a new step weighs `weight`, the first one 1."""
    drafts, layout = job.workload.load_drafts, job.layouts.current
    if not drafts.fresh or layout is None:
        return job
    by_layer, means = dict(drafts.by_layer), dict(drafts.means)
    early, folded = set[StepLayer](), set[StepLayer]()
    for at in sorted(drafts.fresh & by_layer.keys()):
        draft, layer = by_layer[at], at[1]
        if draft.generation > layout.generation:
            early.add(at)  # its layout is not in force yet
        elif draft.generation < layout.generation:
            del by_layer[at]
        elif int(draft.num_ranks.min()) >= layout.num_ranks_by_layer[layer]:
            del by_layer[at]
            folded.add(at)
            before, num_steps = means.get(layer, (draft.rows, 0))
            means[layer] = before + weight * (draft.rows - before), num_steps + 1
    oldest = drafts.newest_step - LATE_STEPS
    drafts = LoadDrafts(
        by_layer=by_layer,
        fresh=frozenset(early),
        folded=frozenset(at for at in drafts.folded | folded if at[0] > oldest),
        means=means,
        newest_step=drafts.newest_step,
    )
    job = replace(job, workload=replace(job.workload, load_drafts=drafts))
    return _with_means(job, layout, {layer for _, layer in folded})


def reset_drafts(job: JobState) -> JobState:
    """Drop the incomplete counts and keep the means: ranks restart from an earlier step."""
    return replace(
        job,
        workload=replace(
            job.workload, load_drafts=LoadDrafts(means=job.workload.load_drafts.means)
        ),
    )


def _with_means(job: JobState, layout: Layout, changed: Set[int]) -> JobState:
    """Update the job's loads, once each layer that has experts was reported at least once."""
    shape, means = job.shape, job.workload.load_drafts.means
    sparse = [layer for layer, experts in enumerate(layout.experts) if experts]
    if not changed or shape is None or not means.keys() >= set(sparse):
        return job
    rows = list(job.workload.loads) or [(0.0,) * shape.num_experts] * shape.num_layers
    for layer in changed if job.workload.loads else means:
        rows[layer] = tuple(means[layer][0].tolist())
    num_steps = min(means[layer][1] for layer in sparse)
    return replace(job, workload=replace(job.workload, loads=tuple(rows), num_load_steps=num_steps))


def _with_more(
    draft: LayerDraft | None, records: Sequence[ExpertLoadRecord], num_experts: int
) -> LayerDraft:
    """Return the draft with these records of its layer and step added; None gives a new draft."""
    generation = max(record.generation for record in records)
    if draft is None or draft.generation < generation:
        nothing = np.zeros(num_experts)
        draft = LayerDraft(generation=generation, rows=nothing, num_ranks=nothing.astype(np.int64))
    rows, num_ranks, reported = draft.rows.copy(), draft.num_ranks.copy(), dict[int, int]()
    for record in records:
        first, end = record.first_expert, record.first_expert + len(record.counts)
        known = reported.get(record.rank) or draft.reported.get(record.rank, 0)
        more = (1 << end) - (1 << first)
        if record.generation == draft.generation and not known & more:
            rows[first:end] += record.counts
            num_ranks[first:end] += record.num_ranks
            reported[record.rank] = known | more
    reported_by_rank = draft.reported.changed(reported)
    return replace(draft, rows=rows, num_ranks=num_ranks, reported=reported_by_rank)
