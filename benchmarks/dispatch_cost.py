"""What a step's own split of tokens costs and brings, beside shares that were fixed by a plan.

Hosts are planned for the mean load. Per size: time to split one layer's rows and to derive one
rank's exchange, on one core; the largest load over the best possible, with shares planned for the
mean load and with this step's split; rows that travel. Loads are Dirichlet around a Zipf-like mean
from a fixed seed; one rank runs at half speed. Prints a table, last one line of JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from pacekeeper.controller.planning.experts.planner import plan_experts
from pacekeeper.controller.planning.experts.problem import alike
from pacekeeper.controller.planning.token_split.linear_program import best_value
from pacekeeper.controller.planning.token_split.proportional import token_shares
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.trainer.toy.parallel.all_to_all_splits import exchange, neighbourhoods
from pacekeeper.trainer.toy.parallel.token_balancing import (
    ReplicaIndex,
    balance_rows,
    whole_capacities,
)

SIZES = ((8, 4, 4, 2), (32, 16, 4, 8), (64, 8, 9, 8), (256, 64, 5, 8), (256, 64, 9, 8))
TOKENS_PER_RANK, CHOICES = 8192, 2
SLOW_SPEED, CONCENTRATION = 0.5, 200.0
NUM_STEPS = 30
DRIFT = 0.1  # what the plan keeps room for

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`planned`, `split`: mean over the steps of the largest load / the least possible."""

    name: str
    split_ms: float
    exchange_ms: float
    planned: float
    split: float
    travelling_share: float


def steps_of(num_experts: int, num_ranks: int) -> list[Counts]:
    """Counts [ranks, experts] of each step."""
    random = np.random.default_rng(0)
    mean = random.permutation(np.arange(1, num_experts + 1) ** -0.5)
    rows = TOKENS_PER_RANK * CHOICES
    concentration = CONCENTRATION * num_experts * mean / mean.sum()
    return [
        random.multinomial(rows, random.dirichlet(concentration), size=num_ranks)
        for _ in range(NUM_STEPS)
    ]


def measure(num_experts: int, num_ranks: int, slots: int, ranks_per_node: int) -> Result:
    """One size, over NUM_STEPS steps."""
    steps = steps_of(num_experts, num_ranks)
    speeds = {rank: SLOW_SPEED if rank == 0 else 1.0 for rank in range(num_ranks)}
    mean_load = np.mean([counts.sum(axis=0) for counts in steps], axis=0)
    cluster = alike(num_ranks, slots, ranks_per_node=ranks_per_node, speeds=tuple(speeds.values()))
    plan = plan_experts(mean_load[None], cluster, drift=DRIFT)
    hosts = [[host.rank for host in on] for on in plan.replicas[0]]
    pairs = ReplicaIndex.of(hosts, num_ranks)
    passes = neighbourhoods(pairs, [rank // ranks_per_node for rank in range(num_ranks)])
    capacity_W = whole_capacities(list(speeds.values()))
    shares = [
        [h.share for h in on] for on in token_shares(mean_load.tolist(), hosts, speeds).replicas
    ]
    speed_W = np.array(list(speeds.values()))
    split_s: list[float] = []
    exchange_s: list[float] = []
    planned: list[float] = []
    split: list[float] = []
    travelling: list[float] = []
    for counts in steps:
        begin_s = time.perf_counter()
        rows_P = balance_rows(pairs, counts, capacity_W).rows_P
        split_s.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        exchange(pairs, counts, rows_P, 1, passes)
        exchange_s.append(time.perf_counter() - begin_s)
        rows_E = counts.sum(axis=0)
        least = best_value(rows_E.tolist(), hosts, speeds).value
        fixed_P = np.concatenate(
            [apportion(int(n), of) for n, of in zip(rows_E, shares, strict=True)]
        )
        for rows, into in ((fixed_P, planned), (rows_P, split)):
            load_W = np.bincount(pairs.host_P, rows, num_ranks)
            into.append(float((load_W / speed_W).max()) / least)
        local = np.minimum(rows_P, counts[pairs.host_P, pairs.expert_P]).sum()
        travelling.append(1.0 - float(local / rows_E.sum()))
    return Result(
        name=f"{num_experts} on {num_ranks}, {slots} slots",
        split_ms=1e3 * float(np.median(split_s)),
        exchange_ms=1e3 * float(np.median(exchange_s)),
        planned=float(np.mean(planned)),
        split=float(np.mean(split)),
        travelling_share=float(np.mean(travelling)),
    )


def main() -> None:
    """Prints the table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.parse_args()
    table = Table(title="Splitting one layer's rows in every step (median times, one core)")
    for column in (
        "experts on ranks",
        "split ms",
        "exchange ms",
        "planned",
        "split",
        "travels",
    ):
        table.add_column(column, justify="left" if column.startswith("experts") else "right")
    results = [measure(*size) for size in SIZES]
    for result in results:
        table.add_row(
            result.name,
            f"{result.split_ms:.2f}",
            f"{result.exchange_ms:.2f}",
            f"{result.planned:.3f}",
            f"{result.split:.4f}",
            f"{result.travelling_share:.1%}",
        )
    Console().print(table)
    print(
        "planned, split: largest load over the least possible, mean over the steps; travels: rows"
    )
    print("that are computed on another rank than they come from")
    largest = results[-1]
    print(
        json.dumps(
            {
                "split_ms": round(largest.split_ms, 3),
                "exchange_ms": round(largest.exchange_ms, 3),
                "planned_over_least": round(largest.planned, 4),
                "split_over_least": round(largest.split, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
