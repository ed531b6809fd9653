"""How long a checkpoint holds training: written beside it, against written at once, in one run.

One rank trains a small Qwen3-MoE, and holds all of it. Three kinds of steps take turns: followed
by no checkpoint, by one that training waits for to its end, and by one that is only copied. Held is
the time from the step's end to the next one's beginning; what writing beside it costs the next step
is told by itself. Then the same rank spreads a checkpoint over a window of steps; and one of two
ranks, which have the same state, makes snapshots of its half, sent to the other one's process.
Prints tables, last one line of JSON. Fractions are of a step that nothing disturbs.
"""

import argparse
import json
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.byte_jobs import byte_job, write_model
from benchmarks.stall_runs import run, run_snapshots, run_windows
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.checkpoint.async_writer import SaveStatus

MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "moe_intermediate_size": 128,
}
JOB = {
    "steps": 1 << 30,
    "rows_per_step": 8,
    "row_tokens": 128,
    "checkpoint_period_steps": 1,
    "checkpoints_kept": 2,
}


def main() -> None:
    """Prints the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--window-steps", type=int, default=4)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that one is left out, in each round
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), **MODEL)
        job = byte_job(Path(folder), **JOB)
        result = at_once(job, options.rounds)
        result |= beside(job, options.rounds, options.window_steps)
    result["stall_fraction"] = result["all_beside_held_fraction"]
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def at_once(job: EngineConfig, rounds: int) -> dict[str, float]:
    """Checkpoints of one step: blocking, and beside the training."""
    result: dict[str, float] = {}
    table = Table(title=f"{rounds} checkpoints of each kind, beside a step")
    for column in ("experts", "step ms", "blocking: held %", "beside: held %", "next step %", "MB"):
        table.add_column(column, justify="right")
    for name, num_experts in (("all", 0), ("one", 1)):
        with tempfile.TemporaryDirectory() as directory:
            config = replace(job, checkpoint_dir=directory, experts_per_checkpoint=num_experts)
            times, rank = run(config, rounds)
        assert rank.checkpoints.counts[SaveStatus.FAILED] == 0
        table.add_row(
            name,
            f"{1e3 * times.step_s:.1f}",
            f"{100 * times.held('blocking'):.1f}",
            f"{100 * times.held('beside'):.2f}",
            f"{100 * times.slowed('beside'):+.1f}",
            f"{median(times.size_bytes) / 1e6:.2f}",
        )
        result |= {
            f"{name}_blocking_held_fraction": times.held("blocking"),
            f"{name}_beside_held_fraction": times.held("beside"),
            f"{name}_beside_held_cpu_fraction": times.busy,
            f"{name}_beside_next_step_fraction": times.slowed("beside"),
            f"{name}_reduction": 1.0 - times.held("beside") / times.held("blocking"),
        }
    Console(width=110).print(table)
    return result


def beside(job: EngineConfig, rounds: int, window_steps: int) -> dict[str, float]:
    """Windows and snapshots, of which training never waits for more than the copies."""
    with tempfile.TemporaryDirectory() as directory:
        windowed = replace(job, checkpoint_dir=directory, checkpoint_window_steps=window_steps)
        turns, rank = run_windows(windowed, rounds)
    assert rank.checkpoints.counts[SaveStatus.COMPLETE] == 1 + rounds
    kept = run_snapshots(replace(job, snapshot_period_steps=1), rounds)
    table = Table(title=f"{rounds} windows of {len(turns)} steps, and as many snapshots of a half")
    for column in ("after", "held %", "next step %", "there after ms", "MB"):
        table.add_column(column, justify="left" if column == "after" else "right")
    for i, turn in enumerate(turns, 1):
        is_last = i == len(turns)
        table.add_row(
            f"step {i} of a window",
            f"{100 * turn.held:.2f}",
            f"{100 * turn.slowed:+.1f}",
            f"{1e3 * median(turn.arrive_s):.0f}" if is_last else "",
            f"{median(turn.size_bytes) / 1e6:.2f} in all" if is_last else "",
        )
    table.add_row(
        "a snapshot",
        f"{100 * kept.held:.2f}",
        f"{100 * kept.slowed:+.1f}",
        f"{1e3 * median(kept.arrive_s):.0f}",
        f"{median(kept.size_bytes) / 1e6:.2f}",
    )
    Console(width=110).print(table)
    return {
        "window_steps": len(turns),
        "window_busiest_held_fraction": max(turn.held for turn in turns),
        "window_held_fraction": sum(turn.held for turn in turns),
        "window_next_step_fraction": max(turn.slowed for turn in turns),
        "snapshot_held_fraction": kept.held,
        "snapshot_next_step_fraction": kept.slowed,
        "snapshot_there_s": median(kept.arrive_s),
    }


if __name__ == "__main__":
    main()
