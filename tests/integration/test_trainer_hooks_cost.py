"""The benchmark of the hooks runs with real processes and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOKS = {
    "step_began",
    "micro_batch",
    "expert_loads",
    "step_ended",
    "plan_offered",
    "dead_ranks",
    "plan_applied",
}


def test_the_cost_benchmark_prints_a_table_and_one_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.hook_cost", "--data", "nowhere", "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: a busy node missed the bar
    *table, last = done.stdout.splitlines()
    outcome = json.loads(last)
    assert any("plan_offered" in line for line in table)
    assert outcome["calls"] == 20
    assert set(outcome["hooks"]) == {"agent absent", "agent reading", "plan waiting"}
    p99s_us = []
    for costs in outcome["hooks"].values():
        assert set(costs) == HOOKS
        assert all(0 < c["p50_us"] <= c["p99_us"] <= c["max_us"] for c in costs.values())
        p99s_us += [costs[hook]["p99_us"] for hook in HOOKS]
    assert outcome["worst_p99_us"] == max(p99s_us)
    assert outcome["is_within_bar"] == (max(p99s_us) < outcome["bar_p99_us"])
    assert done.returncode == (0 if outcome["is_within_bar"] else 1)
