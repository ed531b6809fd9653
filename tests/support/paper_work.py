"""What a step is made of on paper: parts of ranks, times of pipelines, loads, what ranks say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.core.layout.codec import layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    PlanAppliedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.telemetry.shm_ring import decode_header, encode_header
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert.reports import report_from_message, report_to_message

ROW_TOKENS = 160


def held_part(layout: Layout, rank: int) -> float:
    """A rank's part of the model's dense work on a row: layers of its stage, shards of its run."""
    layers = [x for x in range(layout.num_layers) if rank in layout.ranks_of_layer(x)]
    return attention_part(layout, rank, layers[0]) * len(layers) / layout.num_layers


def attention_part(layout: Layout, rank: int, layer: int) -> float:
    """The part of a layer's attention shards that a rank holds."""
    runs = (run for stage in layout.stages_of_layer(layer) for run in stage.attention)
    held = sum(run.end - run.first for run in runs if run.rank == rank)
    return held / layout.num_attention_shards


def pipelined_s(
    layout: Layout,
    compute_s: Mapping[int, float],
    num_microbatches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> float:
    """A step with even micro-batches: the slowest stage runs all, each other one before or after.

    compute_s: of all micro-batches, by rank. Of one stage that is its slowest rank's. A micro-batch
    passes the other stages whole in 1F1B; with zero bubble (ZB-H1) f + b - w of it is left.
    """
    on_spans = [layout.ranks_of_layer(span.start) for span in layout.spans]
    stages_s = [max(compute_s[rank] for rank in ranks) for ranks in on_spans]
    slowest_s = max(stages_s)
    others_s = (sum(stages_s) - slowest_s) / num_microbatches
    return slowest_s + (others_s / 3.0 if schedule is Schedule.ZERO_BUBBLE else others_s)


def counted_loads(
    layout: Layout, rank: int, step: int, loads: Sequence[Sequence[float]], num_rows: int
) -> list[ExpertLoadRecord]:
    """Of its slice of its pipeline's tokens, in the layers it runs. loads[layer][expert]."""
    if rank in layout.standing_by:
        return []
    share = layout.rows_of(num_rows)[layout.pipelines[layout.place_of(rank)[1]].leader] / num_rows
    records = []
    for layer, layer_loads in enumerate(loads):
        held = attention_part(layout, rank, layer)
        if held:
            records.append(
                ExpertLoadRecord(
                    rank=rank,
                    step=step,
                    generation=layout.generation,
                    layer=layer,
                    first_expert=0,
                    counts=tuple(round(load * share * held) for load in layer_loads),
                )
            )
    return records


def hot_loads(random: np.random.Generator, shape: ModelShape) -> list[list[float]]:
    """Token rows per layer and expert: hot ones stay hot, and noise."""
    total = shape.rows_per_step * ROW_TOKENS * shape.experts_per_token
    loads = []
    for layer in range(shape.num_layers):
        weights = np.array([1.0 + 0.2 * ((e + layer) % 3) for e in range(shape.num_experts)])
        weights = weights * random.lognormal(0.0, 0.05, shape.num_experts)
        loads.append((weights / weights.sum() * total).tolist())
    return loads


def attachment(
    job: str, rank: int, shape: ModelShape, *, world_size: int, can_probe: bool
) -> Attachment:
    """What a rank says of itself."""
    return Attachment(
        job=job,
        rank=rank,
        world_size=world_size,
        pid=1000 + rank,
        clock=Clock.EMULATED,
        model=shape,
        can_probe=can_probe,
    )


def as_received(attachment: Attachment) -> Attachment:
    """What the controller gets of it, by way of the ring's header and the bytes of a report."""
    read = decode_header(encode_header(attachment))
    part = JobReport(job=read.job, attached=(read,))
    report = NodeReport(sequence=1, sent_mono_s=0.0, jobs=(part,))
    sent = report_to_message(report).SerializeToString()
    (job,) = report_from_message(telemetry_pb2.NodeReport.FromString(sent)).jobs
    return job.attached[0]


def end_of_step(
    layout: Layout,
    rank: int,
    step: int,
    loads: list[list[float]],
    rows: int,
    duration_s: float,
) -> tuple[Record, ...]:
    """What a rank says when a step is over: its share of the loads, and that it is."""
    end = StepRecord(
        rank=rank,
        step=step,
        generation=layout.generation,
        duration_s=duration_s,
        tokens=rows * ROW_TOKENS,
        loss=3.0,
    )
    return (*counted_loads(layout, rank, step, loads, rows), end)


def applied(
    layout: Layout, rank: int, step: int, previous: int, *, is_regroup: bool
) -> PlanAppliedRecord:
    """A rank runs this layout now."""
    return PlanAppliedRecord(
        rank=rank,
        step=step,
        generation=layout.generation,
        previous_generation=previous,
        duration_s=0.01,
        moved_bytes=0,
        is_regroup=is_regroup,
        layout_crc=layout_crc(layout),
    )


def probe_record(
    rank: int, step: int, generation: int, *, number: int, slowdown: float
) -> ProbeRecord:
    """What a device that is so slow reads."""
    return ProbeRecord(
        rank=rank,
        step=step,
        generation=generation,
        number=number,
        gemm_s=2e-3 * slowdown,
        copy_s=1e-3 * slowdown,
        exchange_s=1e-4,
        duration_s=0.02,
    )


def facts_of(report: JobReport) -> JobReport:
    """What agents keep until it is acknowledged."""
    kept = tuple(r for r in report.records if isinstance(r, PlanAppliedRecord | RankExitRecord))
    return replace(report, records=kept)


def shares_of(layout: Layout) -> Mapping[int, float]:
    """Each rank's batch share."""
    return dict(layout.batch_shares)
