"""Does what-if replay agree with its authors' analyser, and is uneven work named for what it is?

Traces: three production jobs with a known cause each (Lin et al., OSDI 2025), replayed here and
compared with the output of the authors' own tool on the same rows; a 64-rank mixture-of-experts
job whose variation is routing. Each is judged whole, by halves, and with its ranks renumbered.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.predictor.imbalance.analyze import imbalances
from pacekeeper.predictor.imbalance.what_if import replayed, what_if_of
from pacekeeper.predictor.recorded.anomalies import Anomaly, WhatIf
from pacekeeper.predictor.recorded.trace import ComputeTable, OpTable, Trace, compute_of
from pacekeeper.simulator.readers.bytedance import read_bytedance
from pacekeeper.simulator.readers.smartmoe import read_smartmoe

# What each trace suffers from; a slow worker is not uneven work.
MAIN_CAUSE = {"AR": None, "SE": "sequence_imbalance", "ST": "stage_imbalance"}
TABLE_WIDTH = 110
OURS = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-pp-comm": "forward_transfer",
    "backward-pp-comm": "backward_transfer",
    "optimizer-clip-main-grad": "clip_grads",
    "gc": "garbage_collection",
}


def judged(trace: Trace) -> tuple[WhatIf | None, tuple[Anomaly, ...]]:
    replay = replayed(trace)[0]
    costs = None if replay is None else what_if_of(replay)
    return costs, imbalances(trace, replay)


def named(anomalies: tuple[Anomaly, ...]) -> list[str]:
    return [
        f"{t.kind} {t.slowdown:.3f} [{t.low:.3f}, {t.high:.3f}]"
        + ("" if t.stage is None else f" stage {t.stage}")
        for t in anomalies
    ]


def variants(trace: Trace, seed: int) -> Iterator[Trace]:
    """The first and the second half of the steps; all of it with ranks and lanes renumbered."""
    main = trace.ops or trace.compute
    assert main is not None
    steps = np.unique(main.step)
    middle = steps[len(steps) // 2]
    for late in (False, True):
        yield _map(trace, lambda table, late=late: _only(table, (table.step >= middle) == late))
    random = np.random.default_rng(seed)
    ranks = [worker.rank for worker in trace.workers]
    new = dict(zip(ranks, random.permutation(ranks).tolist(), strict=True))
    moved = _map(
        trace,
        lambda table: replace(table, rank=np.vectorize(new.__getitem__)(table.rank)),
    )
    yield replace(
        moved,
        workers=tuple(replace(worker, rank=new[worker.rank]) for worker in trace.workers),
        groups=tuple(tuple(new[rank] for rank in group) for group in trace.groups),
    )


def _map(trace: Trace, change: Any) -> Trace:
    ops = None if trace.ops is None else change(trace.ops)
    compute = None if trace.compute is None else change(trace.compute)
    experts = None if trace.expert_compute is None else change(trace.expert_compute)
    compute = compute if ops is None else compute_of(ops)
    return replace(trace, ops=ops, compute=compute, expert_compute=experts)


def _only(table: OpTable | ComputeTable, kept: Any) -> Any:
    return type(table)(**{f.name: getattr(table, f.name)[kept] for f in fields(table)})


def agreement(found: WhatIf, reference: dict[str, Any]) -> dict[str, float]:
    """Greatest differences from the authors' figures; S and the parts relative."""

    def parts(ours: dict[Any, float], theirs: dict[str, float], key: Any) -> float:
        return max(abs(ours[key(name)] / value - 1.0) for name, value in theirs.items())

    def op_name(name: str) -> str:
        return OURS.get(name, name.replace("-", "_"))

    return {
        "S": found.slowdown,
        "S_reference": reference["blocking_slowdown"],
        "S_error": abs(found.slowdown / reference["blocking_slowdown"] - 1.0),
        "dp_error": parts(dict(found.by_dp), reference["blocking_decompose_by_dp_rank"], int),
        "stage_error": parts(dict(found.by_stage), reference["blocking_decompose_by_stage"], int),
        "op_error": parts(dict(found.by_op), reference["blocking_decompose_by_optype"], op_name),
        "M_W_error": abs(found.worst_workers_share - reference["M_W"]),
        "M_S_error": abs(found.last_stage_share - reference["M_S"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console, result = Console(width=TABLE_WIDTH), dict[str, Any]()
    table = Table(
        "trace", "S", "authors' S", "worst part", "M_W, M_S off by", "uneven work", "same"
    )
    folder = options.data / "bytedance_straggler"
    for name, cause in MAIN_CAUSE.items():
        trace = read_bytedance(folder / f"trace-{name}.parquet")
        reference = json.loads((folder / f"reference-{name}.json").read_text())
        found, anomalies = judged(trace)
        assert found is not None
        row: dict[str, Any] = agreement(found, reference)
        row["named"] = named(anomalies)
        row["right"] = (str(anomalies[0].kind) if anomalies else None) == cause
        row["variants_agree"] = _variants_agree(trace, anomalies, options.seed)
        result[name] = row
        table.add_row(
            name, f"{row['S']:.4f}", f"{row['S_reference']:.4f}",
            f"{max(row['dp_error'], row['stage_error'], row['op_error']):.1e}",
            f"{row['M_W_error']:.1e}, {row['M_S_error']:.1e}",
            "\n".join(row["named"]) or "none", f"{row['variants_agree']} of 3",
        )  # fmt: skip
    for path in sorted((options.data / "smartmoe_ranktimes").glob("rank_times_*.parquet")):
        trace = read_smartmoe(path)
        _, anomalies = judged(trace)
        agree = _variants_agree(trace, anomalies, options.seed)
        result[path.stem] = {
            "named": named(anomalies),
            "right": [str(t.kind) for t in anomalies][:1] == ["expert_imbalance"],
            "variants_agree": agree,
        }
        table.add_row(path.stem, "", "", "", "", "\n".join(named(anomalies)), f"{agree} of 3")
    console.print(table)
    print(json.dumps(result))


def _variants_agree(trace: Trace, anomalies: tuple[Anomaly, ...], seed: int) -> int:
    """How many of the variants name the same main cause."""
    main_kind = [t.kind for t in anomalies][:1]
    return sum(
        [t.kind for t in judged(variant)[1]][:1] == main_kind for variant in variants(trace, seed)
    )


if __name__ == "__main__":
    main()
