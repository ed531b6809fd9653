"""What one job of 8,192 ranks costs the controller without the network: reading, judging, deciding.

The ranks of `large_job_ranks` report to the machine in this process: all attach, a cost model is
learnt, then one rank is slow until a decision on it is asked for and made. Seconds of processor
time, so other processes change them little. `read_s` and `judge_s`: of a step, median; `worst_s`:
the longest step, in which the cost model is fitted; `decide_s`: the decision, which the controller
makes in a thread beside its loop. Prints a line for each; last line one line of JSON.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

from benchmarks.large_job_ranks import InjectedFault, PaperJob
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import (
    DecisionMade,
    NodeAttached,
    NodeReported,
    RequestDecision,
)
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert import reports

CONFIG = ControllerConfig(detector=DetectorConfig(warmup_steps=6))
MOST_STEPS = 40  # until somebody must have been found


class Fleet:
    """The job, and the machine it reports to."""

    def __init__(self, job: PaperJob) -> None:
        self.job, self.state, self.now_s = job, State(), 100.0
        self.read_s = self.judge_s = 0.0
        self.question: RequestDecision | None = None

    def send(self, node: int, data: bytes) -> None:
        """One report, both parts timed."""
        began_s = time.process_time()
        report = reports.report_from_parts(telemetry_pb2.NodeReportParts.FromString(data))
        read_s = time.process_time()
        event = NodeReported(node=f"node-{node:05d}", agent_incarnation="a", report=report)
        self.state, said = advance(self.state, event, config=CONFIG, now_s=self.now_s)
        self.judge_s += time.process_time() - read_s
        self.read_s += read_s - began_s
        for one in said:
            if isinstance(one, RequestDecision) and one.view.slow:
                self.question = one
            elif isinstance(one, RequestDecision):  # nobody is slow: nothing is decided
                answer = DecisionMade(job=one.job, asked=one.asked, decision=None)
                self.state, _ = advance(self.state, answer, config=CONFIG, now_s=self.now_s)

    def attach(self) -> float:
        """All come."""
        for node in range(self.job.num_nodes):
            hello = NodeAttached(
                node=f"node-{node:05d}", product_version="0", agent_incarnation="a"
            )
            self.state, _ = advance(self.state, hello, config=CONFIG, now_s=self.now_s)
            self.send(node, self.job.greeting(node))
        return self.read_s + self.judge_s

    def step(self, number: int) -> tuple[float, float]:
        """Seconds of reading and of judging a step of all ranks."""
        self.read_s = self.judge_s = 0.0
        self.now_s += 1.0
        for node in range(self.job.num_nodes):
            self.send(node, self.job.step(node, number))
        return self.read_s, self.judge_s


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: all reports are made here")
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=32)
    options = parser.parse_args()
    job = PaperJob(
        num_nodes=options.nodes,
        num_layers=options.layers,
        num_experts=options.experts,
        replicas=options.replicas,
    )
    fleet = Fleet(job)
    attach_s = fleet.attach()
    print(f"{job.num_ranks} ranks attach: {attach_s:.2f} s", flush=True)
    learnt = CONFIG.detector.warmup_steps + CONFIG.detector.skip_steps + 2
    rank = job.num_ranks // 2 + 1
    job.troubles.append(InjectedFault(first=learnt, rank=rank, slowdown=1.6))
    steps = []
    for number in range(MOST_STEPS):
        steps.append(fleet.step(number))
        print(f"step {number}: read {steps[-1][0]:.2f} s, judge {steps[-1][1]:.2f} s", flush=True)
        if fleet.question is not None:
            break
    question = fleet.question
    assert question is not None and set(question.view.slow) == {rank}, "it is found, alone"
    began_s = time.process_time()
    decision = decide(question.view, CONFIG.policy)
    decide_s = time.process_time() - began_s
    print(f"decision in {decide_s:.2f} s: {decision.level} {decision.text}")
    result = {
        "ranks": job.num_ranks,
        "attach_s": round(attach_s, 2),
        "read_s": round(statistics.median(read for read, _ in steps), 2),
        "judge_s": round(statistics.median(judge for _, judge in steps), 2),
        "worst_s": round(max(sum(one) for one in steps), 2),
        "found_after_steps": len(steps) - learnt,
        "decide_s": round(decide_s, 2),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
