"""Effective training time where something fails every ten minutes: exact windows beside others.

`python -m benchmarks.simulate_checkpoints`; minutes (`--quick`: two seeds, ten minutes only). The
setting is MoEvement's (arXiv 2412.15411, 5): a job of 12 nodes for 12 hours, failures at random,
spares that stand by. What is printed there, what is assumed and what each policy does is said in
docs/simulator.md. Ours saves by `plan_window` and goes back only where no living copy is left;
`windows` is the same without copies. The effective training time ratio is what was trained and
counts over what 12 nodes at full pace train in all the time. Prints tables over the time between
failures, and at ten minutes over what is assumed; last one line of JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint_policies import DynamicK, PartsSaved, SavingAs
from pacekeeper.core.checkpoint.sparse_window import BlockCost, Window, best_interval_s, plan_window
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.simulator.cluster.history import Change, History, NodesJoined, NodesLost
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.engine.statistics import Summary, summarize, with_interval
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.policies.base import Costs, Policy, Saving
from pacekeeper.simulator.policies.checkpoint_restart import Restarting
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper

BAR = 0.95
HOUR_S = 3600.0
# DeepSeek-MoE, 16.4 thousand million parameters, 64 routed experts in 27 of its 28 layers.
PARAMETERS, LAYERS, EXPERTS, EXPERT_PARAMETERS = 16.4e9, 27, 64, 3 * 2048 * 1408
STATE_BYTES, WEIGHT_BYTES = 12, 2  # of a parameter: master and two moments; what computes
# Its test-bed: 12 nodes of 8 A100, 80 Gb/s between them, blob storage at 40 Gb/s.
NODES, LINK_BYTES_PER_S, STORAGE_BYTES_PER_S = 12, 80e9 / 8.0, 40e9 / 8.0
SNAPSHOT_STEPS = 2.5  # all state in every step makes training so many times as slow (Gemini's way)
HELD = 0.02  # of a step that sparse checkpoints take: "at most"
HOURS, LEAST_FAILURES = 12.0, 20
SAMPLES, TOKENS = 48, 2048  # of each node in a step
# Partial experts begin with an eighth and lose 3.75 % of the tokens at most (MoC-System, 3, 6).
FIRST_EXPERTS, TOKENS_LOST = EXPERTS // 8, 0.0375
COPIES = 2  # of each expert, ours

MTBF_S = {"10 min": 600.0, "20 min": 1200.0, "1 h": HOUR_S, "2 h": 2 * HOUR_S, "6 h": 6 * HOUR_S}
PRINTED = {"moevement": 0.951, "gemini": 0.728, "checkfreq": 0.672, "moc": 0.134}  # at 10 min
EXACT = ("moevement", "windows", "ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`step_s` and `groups_s` are assumed. The first is what the model's floating-point operations
    take at 35 % of the devices' rate; the second, the new groups of NCCL, is less than Lazarus saw.
    """

    mtbf_s: float = 600.0
    step_s: float = 2.5
    groups_s: tuple[float, float] = (2.5, 7.5)
    hours: float = HOURS

    @property
    def duration_s(self) -> float:
        return self.hours * HOUR_S


def job_of(setting: Setting) -> JobModel:
    return JobModel(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        slots_per_node=ceil(COPIES * EXPERTS / NODES),
        samples_per_node=SAMPLES,
        tokens_per_sample=TOKENS,
        balanced_step_s=setting.step_s,
        expert_part=0.5,
        expert_bytes=STATE_BYTES * EXPERT_PARAMETERS,
        dense_bytes=round(STATE_BYTES * (PARAMETERS - LAYERS * EXPERTS * EXPERT_PARAMETERS)),
    )


def history_of(setting: Setting, seed: int) -> History:
    """A node fails at random times, and a spare takes its place at once."""
    draw = np.random.default_rng(seed)
    there = list(range(NODES))
    changes: list[Change] = [NodesJoined(at_s=0.0, nodes=tuple(there))]
    at_s, fresh = draw.exponential(setting.mtbf_s), NODES
    while at_s < setting.duration_s:
        lost = there.pop(int(draw.integers(NODES)))
        there.append(fresh)
        changes += [
            NodesLost(at_s=at_s, nodes=(lost,)),
            NodesJoined(at_s=at_s, nodes=(fresh,)),
        ]
        at_s, fresh = at_s + draw.exponential(setting.mtbf_s), fresh + 1
    return History(
        name="spares", num_nodes=fresh, duration_s=setting.duration_s, changes=tuple(changes)
    )


def block_costs() -> dict[Block, BlockCost]:
    """Of every block of the model; loads are even, dense blocks compute all tokens."""
    dense = (PARAMETERS - LAYERS * EXPERTS * EXPERT_PARAMETERS) / LAYERS
    expert = _cost(EXPERT_PARAMETERS, 1.0 / EXPERTS)
    found = {
        Block(BlockKind.EXPERT, layer, index): expert
        for layer in range(LAYERS)
        for index in range(EXPERTS)
    }
    return found | {Block(BlockKind.ATTENTION, layer): _cost(dense, 1.0) for layer in range(LAYERS)}


def _cost(parameters: float, tokens: float) -> BlockCost:
    return BlockCost(
        state_bytes=round(STATE_BYTES * parameters),
        weight_bytes=round(WEIGHT_BYTES * parameters),
        tokens=tokens,
    )


def budget_bytes(costs: Mapping[Block, BlockCost]) -> float:
    """What can be copied in a step."""
    return sum(cost.state_bytes for cost in costs.values()) / SNAPSHOT_STEPS


def published_window(costs: Mapping[Block, BlockCost], budget: float) -> Window:
    """MoEvement's: as many blocks in every turn, as few turns as fit the budget (Algorithm 1).

    Raises ValueError where nothing fits.
    """
    order = sorted(costs, key=lambda block: (costs[block].tokens, block))
    for number in range(1, len(order) + 1):
        size = ceil(len(order) / number)
        starts = range(0, len(order), size)
        window = Window(turns=tuple(tuple(order[at : at + size]) for at in starts))
        if max(window.saved_bytes(costs)) <= budget:
            return window
    raise ValueError(f"no window saves {budget:.0f} bytes a step at most")


@cache
def window_steps() -> Mapping[str, int]:
    """Of MoEvement's rule and of ours, whatever a step takes: budgets are parts of a step."""
    blocks = block_costs()
    budget = budget_bytes(blocks)
    return {
        "moevement": len(published_window(blocks, budget).turns),
        "windows": len(plan_window(blocks, budget).turns),
    }


def policies(setting: Setting) -> dict[str, Policy]:
    """By the name in the result."""
    step_s, state = setting.step_s, job_of(setting).state_bytes
    stored_s = state / STORAGE_BYTES_PER_S
    from_storage = _restarting(setting, stored_s)
    from_peers = _restarting(setting, _loading_s(setting))
    at_once_s = (SNAPSHOT_STEPS - 1.0) * step_s  # one step hides its part
    windows = window_steps()
    return {
        "full": SavingAs(
            name="full",
            inner=from_storage,
            saving=Saving(stop_s=stored_s, behind_s=0.0),
            checkpoint_steps=_young_steps(stored_s, setting),
        ),
        "checkfreq": SavingAs(
            name="checkfreq",
            inner=from_storage,
            saving=Saving(stop_s=0.0, behind_s=stored_s),
            checkpoint_steps=ceil(stored_s / step_s),
        ),
        "gemini": SavingAs(
            name="gemini",
            inner=from_peers,
            saving=Saving(stop_s=at_once_s, behind_s=0.0),
            checkpoint_steps=_young_steps(at_once_s, setting),
        ),
        "moc": partial_experts(setting, _restarting(setting, stored_s / NODES)),
        "moc_all": SavingAs(
            name="moc_all",
            inner=from_peers,
            saving=Saving(stop_s=at_once_s, behind_s=0.0),
            checkpoint_steps=1,
        ),
        **{name: _windowed(name, from_peers, steps, step_s) for name, steps in windows.items()},
        "ours": _windowed("ours", _surviving(setting), windows["windows"], step_s),
    }


def partial_experts(setting: Setting, inner: Policy) -> DynamicK:
    """MoC-System by its own rules: a snapshot that does not fit into a step holds training, then it
    goes to storage, one after the other. Each number of experts may lose as much."""
    step_s, job = setting.step_s, job_of(setting)

    def saved_part(experts: int) -> float:
        of_experts = LAYERS * experts * job.expert_bytes
        return (job.dense_bytes + of_experts) / job.state_bytes

    def saving_of(experts: int) -> Saving:
        part = saved_part(experts)
        return Saving(
            stop_s=max(0.0, part * SNAPSHOT_STEPS - 1.0) * step_s,
            behind_s=part * job.state_bytes / STORAGE_BYTES_PER_S,
        )

    def lost_of(experts: int) -> float:
        """Of all tokens, by one restart (research 2.3)."""
        saving = saving_of(experts)
        between = ceil(max(step_s, saving.behind_s) / step_s)
        return between * step_s / setting.duration_s * (EXPERTS / experts - 1.0) / 2.0

    doublings = (EXPERTS // FIRST_EXPERTS).bit_length() - 1
    return DynamicK(
        name="moc",
        inner=inner,
        checkpoint_steps=1,
        num_experts=EXPERTS,
        first_experts=FIRST_EXPERTS,
        saving_of=saving_of,
        lost_of=lost_of,
        budget=TOKENS_LOST / doublings,
    )


def lost_tokens(policy: DynamicK, num_restarts: int) -> tuple[float, int]:
    """Part of all tokens lost by so many restarts, and experts of a layer saved at the end."""
    parts, lost = PartsSaved(experts=policy.first_experts), 0.0
    for _ in range(num_restarts):
        lost += policy.lost_of(parts.experts)
        parts = policy.after_restart(parts)
    return lost, parts.experts


def _restarting(setting: Setting, loading_s: float) -> Restarting:
    """All go back: who is there is found, new groups, and state."""
    low, high = (1.0 + groups_s + loading_s for groups_s in setting.groups_s)
    costs = replace(_costs(setting), restart_s=(low, high))
    return Restarting(group_size=NODES, checkpoint_steps=1, costs=costs)


def _surviving(setting: Setting) -> Pacekeeper:
    """Who lives goes on, with the spare; back to a window where no copy lives."""
    return Pacekeeper(min_hosts=COPIES, costs=_restarting(setting, _loading_s(setting)).costs)


def _loading_s(setting: Setting) -> float:
    """Of one node's part, from its peers."""
    return job_of(setting).state_bytes / NODES / LINK_BYTES_PER_S


def _costs(setting: Setting) -> Costs:
    return Costs(
        notice_s=(1.0, 1.0),
        regroup_s=setting.groups_s,
        transfer_s=0.0,
        transfer_s_per_byte=1.0 / LINK_BYTES_PER_S,
        restart_s=(0.0, 0.0),
        save_s_per_byte=1.0 / STORAGE_BYTES_PER_S,
        grow_wait_s=0.0,
    )


def _windowed(name: str, inner: Policy, window_steps: int, step_s: float) -> SavingAs:
    """Windows one after the other; the last turn is copied while the next step computes."""
    window_s = window_steps * step_s
    saving = Saving(stop_s=HELD * window_s, behind_s=window_s)
    return SavingAs(name=name, inner=inner, saving=saving, checkpoint_steps=window_steps)


def _young_steps(stop_s: float, setting: Setting) -> int:
    return max(1, round(best_interval_s(stop_s, setting.mtbf_s) / setting.step_s))


def played(
    setting: Setting, seeds: int, names: tuple[str, ...] = ()
) -> dict[str, list[SimulationResult]]:
    """Outcomes by policy, of some or of all; of one seed all meet the same failures."""
    job, routing = job_of(setting), even_routing(LAYERS, EXPERTS)
    found: dict[str, list[SimulationResult]] = {}
    for seed in range(seeds):
        history = history_of(setting, seed)
        for name, policy in policies(setting).items():
            if not names or name in names:
                outcome = simulate(history, job, routing, policy, seed=seed)
                found.setdefault(name, []).append(outcome)
    return found


def figures(
    found: Mapping[str, list[SimulationResult]], setting: Setting
) -> dict[str, dict[str, Any]]:
    rows = {row.policy: _figures(row) for row in summarize(found)}
    moc = policies(setting)["moc"]
    if "moc" in rows and isinstance(moc, DynamicK):
        lost, experts = lost_tokens(moc, round(rows["moc"]["restarts"]))
        rows["moc"] |= {"tokens_lost": lost, "experts_saved": experts}
    return rows


def _figures(row: Summary) -> dict[str, Any]:
    return {
        "ettr": round(row.fluid, 4),
        "ettr_95": row.fluid_95 and round(row.fluid_95, 4),
        "restarts": round(row.restarts, 1),
        "spent": {str(use): round(part, 4) for use, part in row.spent.items() if part},
    }


def show(title: str, cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    table = Table(title=title)
    names = list(next(iter(cells.values())))
    for head in ("", *names):
        table.add_column(head, justify="right")
    for cell, rows in cells.items():
        values = (with_interval(rows[name]["ettr_95"], rows[name]["ettr"], ".3f") for name in names)
        table.add_row(cell, *values)
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for name, mtbf_s in MTBF_S.items():
        if arguments.quick and cells:
            break
        setting = Setting(mtbf_s=mtbf_s, hours=max(HOURS, LEAST_FAILURES * mtbf_s / HOUR_S))
        cells[name] = figures(played(setting, seeds), setting)
    show("effective training time ratio, by the time between failures", cells)
    assumed = {
        **{f"a step of {step_s:g} s": Setting(step_s=step_s) for step_s in (1.25, 5.0, 10.0)},
        "groups in 5 to 15 s": Setting(groups_s=(5.0, 15.0)),
    }
    others = {
        name: figures(played(setting, seeds, EXACT), setting)
        for name, setting in assumed.items()
        if not arguments.quick
    }
    if others:
        show("the same at 10 minutes, with other assumptions", others)
    at_ten = cells["10 min"]
    result = {
        "bar": BAR,
        "ours": at_ten["ours"]["ettr"],
        "windows": at_ten["windows"]["ettr"],
        "printed": PRINTED,
        "window_steps": window_steps(),
        "seeds": seeds,
        "met": at_ten["ours"]["ettr"] >= BAR,
        "rows": cells,
        "assumed": others,
    }
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
