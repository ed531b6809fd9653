"""What one training step costs the controller: records of 64 to 8192 ranks through its machine.

Eight ranks report together, as the agent of one node does. A rank's step is four micro-batches, one
record of expert loads and its end. `decode_s`: from the wire's messages to values; `machine_s`: the
events through the machine, median step; `attach_event_s`: the longest event while all attach (it
reads the layout); `worst_s`: the step in which the cost model is fitted.
`--against DIR` runs another checkout too and prints how many times faster this one is. One thread;
prints a table, last one line of JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import NodeAttached, NodeReported
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    Record,
    StepRecord,
)
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert import reports

JOB = "train"
RANKS_PER_NODE = 8
MICRO_BATCHES = 4
NUM_EXPERTS = 16
# Nothing is planned here: what a plan costs is `placement_scale`.
CONFIG = ControllerConfig(
    detector=DetectorConfig(warmup_steps=4), policy=PolicyConfig(min_steps_between_plans=1 << 30)
)
SHAPE = ModelShape(
    num_layers=1,
    num_experts=NUM_EXPERTS,
    experts_per_token=2,
    rows_per_step=8192,
    slots_per_rank=2,
    expert_bytes=1 << 20,
    dense_bytes=1 << 20,
)


class Fleet:
    """A job of `num_ranks` ranks and the machine it reports to."""

    def __init__(self, num_ranks: int) -> None:
        self.nodes = [
            range(first, min(first + RANKS_PER_NODE, num_ranks))
            for first in range(0, num_ranks, RANKS_PER_NODE)
        ]
        self.num_ranks = num_ranks
        self.random = Random(num_ranks)
        self.state = State()
        self.now_s = 100.0
        self.decode_s = 0.0
        self.machine_s = 0.0
        self.worst_event_s = 0.0

    def send(self, node: int, part: JobReport) -> None:
        """One report over the wire and through the machine, both timed."""
        report = NodeReport(sequence=1, sent_mono_s=self.now_s, jobs=(part,))
        data = reports.report_to_message(report).SerializeToString()
        began_s = time.perf_counter()
        report = reports.report_from_parts(telemetry_pb2.NodeReportParts.FromString(data))
        decoded_s = time.perf_counter()
        event = NodeReported(node=f"node-{node:05d}", agent_incarnation="a", report=report)
        self.state, _ = advance(self.state, event, config=CONFIG, now_s=self.now_s)
        spent_s = time.perf_counter() - decoded_s
        self.machine_s += spent_s
        self.worst_event_s = max(self.worst_event_s, spent_s)
        self.decode_s += decoded_s - began_s

    def attach(self) -> float:
        """All agents and ranks come and say which layout they run; the machine's seconds."""
        layout = even_layout(
            ranks=range(self.num_ranks), num_layers=1, num_experts=NUM_EXPERTS, replicas=2
        )
        self.decode_s = self.machine_s = 0.0
        written, crc = ((1, encode_layout(layout)),), layout_crc(layout)
        for node, ranks in enumerate(self.nodes):
            hello = NodeAttached(
                node=f"node-{node:05d}", product_version="0", agent_incarnation="a"
            )
            self.state, _ = advance(self.state, hello, config=CONFIG, now_s=self.now_s)
            part = JobReport(
                job=JOB,
                attached=tuple(self._attachment(rank) for rank in ranks),
                records=tuple(_runs(rank, crc) for rank in ranks),
                layouts=() if node else written,
            )
            self.send(node, part)
        return self.machine_s

    def step(self, number: int) -> tuple[float, float]:
        """One step of all ranks: (seconds of decoding, seconds of the machine)."""
        self.now_s += 1.0
        self.decode_s = self.machine_s = 0.0
        order = list(enumerate(self.nodes))
        self.random.shuffle(order)  # nodes report when they come to it
        for node, ranks in order:
            records = tuple(record for rank in ranks for record in self._records(rank, number))
            self.send(node, JobReport(job=JOB, records=records))
        assert self.state.jobs[JOB].progress.step == number, (
            "the step is judged with its last record"
        )
        return self.decode_s, self.machine_s

    def _attachment(self, rank: int) -> Attachment:
        return Attachment(
            job=JOB, rank=rank, world_size=self.num_ranks, pid=1000 + rank, model=SHAPE
        )

    def _records(self, rank: int, step: int) -> list[Record]:
        tokens = self.random.randrange(1000, 1500)
        work: list[Record] = [
            MicroBatchRecord(
                rank=rank,
                step=step,
                micro_batch=micro_batch,
                generation=1,
                compute_s=0.1 + 1e-5 * tokens + self.random.uniform(0.0, 1e-3),
                tokens=tokens,
                sum_len_squared=60 * tokens,
                expert_rows=2 * tokens,
                num_active_experts=2,
            )
            for micro_batch in range(MICRO_BATCHES)
        ]
        loads = ExpertLoadRecord(
            rank=rank, step=step, generation=1, layer=0, first_expert=0, counts=(80,) * NUM_EXPERTS
        )
        end = StepRecord(rank=rank, step=step, generation=1, duration_s=0.5, tokens=5120, loss=2.0)
        return [*work, loads, end]


def _runs(rank: int, crc: int) -> Record:
    return PlanAppliedRecord(
        rank=rank,
        step=0,
        generation=1,
        previous_generation=0,
        duration_s=0.0,
        moved_bytes=0,
        is_regroup=False,
        layout_crc=crc,
    )


def measure(num_ranks: int, num_steps: int) -> dict[str, float]:
    """One size: what coming costs, what a step costs."""
    fleet = Fleet(num_ranks)
    attach_s = fleet.attach()
    attach_event_s = fleet.worst_event_s
    warm_up = CONFIG.detector.warmup_steps + CONFIG.detector.skip_steps
    worst_s = max(fleet.step(number)[1] for number in range(warm_up))
    steps = [fleet.step(number) for number in range(warm_up, warm_up + num_steps)]
    decode_s = statistics.median(decode for decode, _ in steps)
    machine_s = statistics.median(machine for _, machine in steps)
    records = num_ranks * (MICRO_BATCHES + 2)
    return {
        "ranks": num_ranks,
        "records": records,
        "attach_s": attach_s,
        "attach_event_s": attach_event_s,
        "decode_s": decode_s,
        "machine_s": machine_s,
        "worst_s": max(worst_s, *(machine for _, machine in steps)),
        "machine_us_per_record": machine_s / records * 1e6,
    }


def elsewhere(checkout: Path, arguments: list[str]) -> list[dict[str, float]]:
    """The same script on another checkout's controller."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: all records are made here")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    arguments = parser.parse_args()
    cases = [measure(num_ranks, arguments.steps) for num_ranks in arguments.ranks]
    if arguments.against is not None:
        same = ["--steps", str(arguments.steps), "--ranks", *map(str, arguments.ranks)]
        for case, other in zip(cases, elsewhere(arguments.against, same), strict=True):
            case["other_machine_s"] = other["machine_s"]
            case["times_faster"] = other["machine_s"] / case["machine_s"]
    columns = list(cases[0])
    print("  ".join(f"{name:>21}" for name in columns))
    for case in cases:
        cells = [f"{v:.4f}" if isinstance(v, float) else str(v) for v in case.values()]
        print("  ".join(f"{cell:>21}" for cell in cells))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
