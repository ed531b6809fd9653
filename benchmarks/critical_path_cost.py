"""How long it takes to make a step program, its graph, and to price a step, up to large sizes.

`python -m benchmarks.critical_path_cost`; less than a minute, one thread, processor time. Programs
and graphs are made once per schedule and size; each candidate of a planner costs one price per
data-parallel rank. Prints a table, last one line of JSON.
"""

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.core.layout.pipeline_schedule import Schedule, pipeline_program
from pacekeeper.predictor.cost.longest_path import path_graph
from pacekeeper.predictor.cost.pipeline_time import critical_path

CASES = (
    (Schedule.ONE_F_ONE_B, 4, 32, 1),
    (Schedule.ONE_F_ONE_B, 16, 128, 1),
    (Schedule.ZERO_BUBBLE, 64, 512, 1),
    (Schedule.INTERLEAVED, 16, 128, 4),
    (Schedule.INTERLEAVED, 64, 512, 4),
)
REPEATS = 5


def measure(
    schedule: Schedule, num_stages: int, num_microbatches: int, num_chunks: int, *, wait: bool
) -> dict[str, float | str]:
    """One case; the price is the median of some, with unequal times."""
    shape = (3, num_stages, num_microbatches, num_chunks)
    chunk_s = np.random.default_rng(0).uniform(0.8, 1.2, shape)
    began_s = time.process_time()
    program = pipeline_program(
        schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_model_chunks=num_chunks,
    )
    made_s = time.process_time()
    graph = path_graph(program, is_blocking=wait)
    linked_s = time.process_time()
    times = []
    for _ in range(REPEATS):
        at_s = time.process_time()
        price = critical_path([graph], chunk_s=[chunk_s], transfer_s=0.01)
        times.append(time.process_time() - at_s)
    return {
        "schedule": schedule.value,
        "messages": "rendezvous" if wait else "data edges",
        "stages": num_stages,
        "micro_batches": num_microbatches,
        "model_chunks": num_chunks,
        "nodes": len(graph.first),
        "program_s": made_s - began_s,
        "graph_s": linked_s - made_s,
        "price_s": float(np.median(times)),
        "bubble_share": float(price.bubble_share.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.parse_args()
    rows = [measure(*case, wait=wait) for case in CASES for wait in (False, True)]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
