"""Logs of others: Megatron's console and routing, and NCCL's Inspector, whole and damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.trace import Chunk, Worker
from pacekeeper.simulator.readers.megatron import read_megatron_log, read_megatron_routing
from pacekeeper.simulator.readers.nccl_inspector import read_nccl_inspector
from pacekeeper.simulator.readers.registry import open_runs

BEGIN = "consumed samples: 64 | elapsed time per iteration (ms)"
MEGATRON = f"""
  seq_length ...................................... 4096
 [2026-01-02 03:04:05] iteration        1/     100 | {BEGIN}: 512.5 | global batch size:    64 |
times across ranks (ms):
  forward-compute:
     rank  0: 100.00
     rank  1: 120.50
  optimizer:
     rank  0: 3.00
  backward-compute:
     rank  0: 200.00
     rank  1: 240.00
 [2026-01-02 03:04:06] iteration        2/     100 | {BEGIN}: 500.0 | global batch size:    64 |
(min, max) time across ranks (ms):
    forward-compute ................................: (99.00, 120.00)
     rank  0: 7.00
"""


def test_a_megatron_log_tells_iterations_and_timers_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(MEGATRON)
    (trace,) = read_megatron_log(tmp_path / "run.log")
    assert trace.steps is not None and trace.compute is not None
    assert trace.steps.step.tolist() == [1, 2]
    assert trace.steps.duration_s.tolist() == pytest.approx([0.5125, 0.5])
    assert trace.steps.tokens.tolist() == [64 * 4096] * 2
    assert trace.workers == (Worker(rank=0), Worker(rank=1))
    assert trace.compute.chunk.tolist() == [
        Chunk.FORWARD, Chunk.BACKWARD, Chunk.FORWARD, Chunk.BACKWARD,
    ]  # fmt: skip
    assert trace.compute.compute_s.tolist() == pytest.approx([0.1, 0.2, 0.1205, 0.24])


def test_a_megatron_log_without_timers_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("\n".join(MEGATRON.splitlines()[:3]))
    (trace,) = read_megatron_log(tmp_path / "run.log")
    assert trace.compute is None
    assert "--timing-log-option all" in trace.notes[0]


def test_each_life_of_a_job_that_began_anew_is_a_run(tmp_path: Path) -> None:
    def line(number: int, took_ms: float) -> str:
        return f" [x] iteration {number}/ 100 | {BEGIN}: {took_ms} | global batch size: 64 |\n"

    before = [line(number, 500.0) for number in range(1, 8)]
    after = [line(number, 600.0) for number in range(5, 9)]  # from the checkpoint after step 4
    (tmp_path / "run.log").write_text("".join([*before, *after]))
    first, second = read_megatron_log(tmp_path / "run.log")
    assert first.steps is not None and second.steps is not None
    assert first.steps.step.tolist() == list(range(1, 8))
    assert first.steps.duration_s.tolist() == pytest.approx([0.5] * 7)
    assert second.steps.step.tolist() == list(range(5, 9))
    assert second.steps.duration_s.tolist() == pytest.approx([0.6] * 4)
    assert first.name != second.name


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(DataError, match="no line tells an elapsed time"):
        read_megatron_log(tmp_path / "x")


def collective(
    pid: int, sequence: int, spent_us: float, *, communicator: str = "0xa", num_ranks: int = 2
) -> str:
    return json.dumps(
        {
            "header": {"id": communicator, "rank": pid - 100, "n_ranks": num_ranks, "nnodes": 1},
            "metadata": {"hostname": "a", "pid": pid},
            "coll_perf": {
                "coll": "AllReduce", "coll_sn": sequence, "coll_msg_size_bytes": 1024,
                "coll_exec_time_us": spent_us,
            },
        }
    )  # fmt: skip


def test_a_collective_takes_as_long_as_for_who_came_last(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("\n".join(collective(100, n, 90.0 + n) for n in range(3)))
    (tmp_path / "1.log").write_text(
        "\n".join([*(collective(101, n, 30.0 + n) for n in range(3)), "{torn"])
    )
    trace = read_nccl_inspector([tmp_path / "0.log", tmp_path / "1.log"])
    assert trace.transfers is not None
    assert trace.groups == ((0, 1),)
    assert trace.workers == (Worker(rank=0, node="a"), Worker(rank=1, node="a"))
    assert np.allclose(trace.transfers.transfer_s, [30e-6, 31e-6, 32e-6])
    assert trace.transfers.num_bytes.tolist() == [1024.0] * 3
    assert trace.notes == ("1 damaged lines left out",)


def test_ranks_are_those_of_the_communicator_that_holds_everybody(tmp_path: Path) -> None:
    lines = [
        collective(pid, 0, 5.0, communicator=name, num_ranks=size)
        for name, size, pids in (("0xw", 4, range(100, 104)), ("0xp", 2, (102, 103)))
        for pid in pids
    ]
    (tmp_path / "all.log").write_text("\n".join(lines))
    trace = read_nccl_inspector([tmp_path / "all.log"])
    assert sorted(trace.groups) == [(0, 1, 2, 3), (2, 3)]


def test_a_file_without_collectives_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(DataError, match="no collective in it"):
        read_nccl_inspector([tmp_path / "x"])


def routing(step: int, layer: int, chosen: list[list[int]], **more: object) -> str:
    """One line as Megatron-LM's router tracer writes it."""
    head = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    sizes = {"num_tokens": len(chosen), "topk": len(chosen[0])}
    return json.dumps(head | sizes | more | {"top_indices": chosen})


def test_a_routing_trace_tells_the_loads_of_all_ranks(tmp_path: Path) -> None:
    lines = [
        routing(7, 1, [[0, 1], [0, 3]]),
        routing(7, 1, [[0, 2]]),  # the next micro-batch
        routing(7, 0, [[1, 2]], block="mtp", mtp_idx=0),
        '{"step": 7, "top',
        routing(7, 1, [[0, -1]]),
    ]
    (tmp_path / "router_trace_rank0.jsonl").write_text("\n".join(lines))
    (tmp_path / "router_trace_rank1.jsonl").write_text(routing(7, 1, [[3, 1]], rank=1) + "\n")
    (run,) = open_runs(tmp_path)
    loads = run.expert_loads
    assert run.source == "megatron-routing" and loads is not None
    assert [worker.rank for worker in run.workers] == [0, 1]
    assert loads.step.tolist() == [7] * 8
    assert loads.layer.tolist() == [1] * 4 + [2] * 4
    assert loads.expert.tolist() == [0, 1, 2, 3] * 2
    assert loads.rows.tolist() == [3, 2, 1, 2, 0, 1, 1, 0]
    assert any("2 damaged lines" in note for note in run.notes)


def test_uneven_routing_is_a_finding_of_replay(tmp_path: Path) -> None:
    lines = [routing(step, 0, [[0]] * 9 + [[expert] for expert in range(8)]) for step in range(40)]
    (tmp_path / "router_trace_rank0.jsonl").write_text("\n".join(lines))
    (finding,) = analyze(open_runs(tmp_path)[0]).anomalies
    assert finding.kind is AnomalyKind.EXPERT_IMBALANCE
    assert finding.slowdown == pytest.approx(10 / (17 / 8), rel=0.3)


def test_a_routing_trace_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(routing(0, 0, [[-1]]))
    with pytest.raises(DataError):
        read_megatron_routing([tmp_path / "x"])
