"""Small healthy files of every format that replay reads, made here, as text, tables or bytes."""

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.core.telemetry.samples import HostSample
from pacekeeper.core.telemetry.trace_jsonl import (
    TraceHeader,
    attached_line,
    header_line,
    record_line,
)
from support.trace_files import device_sample

Row = dict[str, Any]
STEPS, RANKS = 6, 4


def bytedance_rows() -> list[Row]:
    """Two data-parallel ranks of two stages, three micro-batches."""
    rows: list[Row] = []
    for step in range(STEPS):
        for rank in range(RANKS):
            place = {"dp_rank": rank % 2, "stage": rank // 2, "rank": rank, "step": 10 + 3 * step}
            start = 0.0
            for at, optype in enumerate(["forward-compute", "backward-compute"] * 3):
                took = 0.1 + 0.05 * (at % 2) + 0.001 * step
                rows.append(
                    place | {"optype": optype, "start_ts": start, "duration": took,
                             "seq_id": at // 2, "mc": 0, "mb_id": at // 2}
                )  # fmt: skip
                start += took
            rows.append(
                place | {"optype": "optimizer", "start_ts": start, "duration": 0.01, "seq_id": 0,
                         "mc": -1, "mb_id": -1}
            )  # fmt: skip
    return rows


def perseus_rows() -> list[Row]:
    return [
        {
            "scheduler": scheduler, "setting": setting, "rank": rank, "iteration": iteration,
            "fwd_sum_s": 1.0 + 0.01 * iteration, "bwd_sum_s": 2.0 + 0.01 * rank,
            "state_min": 300 if setting == 0 or rank else 200, "model": "m", "pp": 4, "nmb": 8,
        }
        for setting, scheduler in enumerate(("zeus_global", "zeus_local"))
        for rank in range(RANKS)
        for iteration in range(STEPS)
    ]  # fmt: skip


def smartmoe_rows() -> list[Row]:
    return [
        {
            "rank": rank, "iteration": step, "pp_rank": rank // 2, "dp_rank": rank % 2,
            "fwd-encoder|total": 100.0 + step, "MoEMLP|total": 70.0,
            "backward-compute|total": 200.0 + rank, "MoE_L0_fwd|total": 30.0,
            "MoE_L1_fwd|total": 40.0, "MoE_L0_bwd|total": 50.0, "MoE_L1_bwd|total": 60.0,
        }
        for step in range(STEPS)
        for rank in range(RANKS)
    ]  # fmt: skip


def steps_rows() -> list[Row]:
    return [
        {"run": step % 2, "step": step // 2, "duration_s": 0.5 + 0.001 * (step % 7), "tokens": 1000}
        for step in range(200)
    ]


TABLES: dict[str, Callable[[], list[Row]]] = {
    "bytedance": bytedance_rows,
    "perseus": perseus_rows,
    "smartmoe": smartmoe_rows,
    "steps": steps_rows,
}


def native_text() -> str:
    lines = [header_line(TraceHeader(job="moe", run_id=7, node="n"))]
    for rank in range(RANKS):
        lines.append(
            attached_line(
                Attachment(job="moe", rank=rank, world_size=RANKS, pid=9 + rank, run_id=7,
                           device_uuid=f"GPU-{rank}")
            )
        )  # fmt: skip
    for step in range(STEPS):
        for rank in range(RANKS):
            lines += [
                record_line(
                    MicroBatchRecord(
                        rank=rank, step=step, micro_batch=0, generation=1, tokens=100 + rank,
                        compute_s=0.5 + 0.01 * rank, sum_len_squared=400, expert_rows=200,
                        run_queue_s=0.0, stall_s=0.01, wait_s=0.1, ended_mono_s=10.0 + step,
                    )
                ),
                record_line(
                    ExpertLoadRecord(
                        rank=rank, step=step, generation=1, layer=0, first_expert=0, counts=(3, 4)
                    )
                ),
                record_line(
                    StepRecord(rank=rank, step=step, generation=1, duration_s=0.7, tokens=400)
                ),
                record_line(device_sample(rank, 10.0 + step, is_hot=False)),
            ]  # fmt: skip
        lines.append(record_line(HostSample(sampled_s=10.0 + step, num_cores=8, load_1min=2.0)))
    return "\n".join(lines) + "\n"


def kineto_text() -> str:
    events: list[Row] = []
    for step in range(3):
        begin = 1e6 + 1000.0 * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin,
             "dur": 900.0}
        )  # fmt: skip
        for at in range(5):
            name = "ncclDevKernel" if at == 4 else f"gemm_{at}"
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "ts": begin + 100.0 * at, "dur": 80.0}
            )
    about = {"rank": 1, "world_size": 4, "pg_config": [{"pg_desc": "pp", "ranks": [0, 1]}]}
    return json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": events})


def megatron_text() -> str:
    lines = ["  seq_length ............................ 4096"]
    for step in range(1, STEPS):
        lines += [
            f" [2026-01-02] iteration {step}/ 100 | elapsed time per iteration (ms): {500 + step}.5"
            " | global batch size:    64 |",
            "times across ranks (ms):",
            *(
                line
                for name in ("forward-compute", "backward-compute")
                for line in (f"  {name}:", *(f"     rank  {r}: {90 + r}.25" for r in range(RANKS)))
            ),
        ]
    return "\n".join(lines) + "\n"


def nccl_text() -> str:
    return "".join(
        json.dumps(
            {
                "header": {"id": "0xa", "rank": rank, "n_ranks": RANKS, "nnodes": 1},
                "metadata": {"hostname": "a", "pid": 100 + rank},
                "coll_perf": {"coll": "AllReduce", "coll_sn": step, "coll_msg_size_bytes": 1024,
                              "coll_exec_time_us": 30.0 + rank},
            }
        )
        + "\n"
        for step in range(STEPS)
        for rank in range(RANKS)
    )  # fmt: skip


def routing_text() -> str:
    """A trace of routing as Megatron-LM writes it: two experts of each token, in two layers."""
    return "".join(
        json.dumps(
            {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer,
             "rank": rank, "num_tokens": 2, "topk": 2, "top_indices": [[0, 1], [step % 4, 3]]}
        )
        + "\n"
        for step in range(STEPS)
        for layer in (1, 2)
        for rank in range(RANKS)
    )  # fmt: skip


def archive_bytes() -> bytes:
    file = io.BytesIO()
    np.savez(
        file, offset=np.array([0, 100, 200]), step_delta=np.ones(200, dtype=np.int32),
        ms_delta=np.full(200, 50, dtype=np.int32),
    )  # fmt: skip
    return file.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "native": lambda: native_text().encode(),
    "kineto": lambda: kineto_text().encode(),
    "megatron-log": lambda: megatron_text().encode(),
    "megatron-routing": lambda: routing_text().encode(),
    "nccl-inspector": lambda: nccl_text().encode(),
    "archive": archive_bytes,
}


def csv_text(rows: list[Row]) -> str:
    """The rows as CSV: the header is the first row's, None is an empty cell."""
    names = list(rows[0])
    lines = [",".join(names)]
    lines += [",".join("" if row[n] is None else str(row[n]) for n in names) for row in rows]
    return "\n".join(lines) + "\n"
