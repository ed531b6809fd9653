"""How long nobody is served while a plan is made for a large model: 60 layers x 256 experts.

An event loop does what the controller's does, a little every few milliseconds; its longest pause is
what an agent or a person waits. Once the decision is made on the loop itself, once by the planner,
beside it. Prints a table, last one line of JSON.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.placement_scale import zipf_loads
from pacekeeper.controller.app.effects import Planner
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import Event, RequestDecision
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.forecast import Workload

BEAT_S = 0.002
NUM_EXPERTS = 256


def view_of(num_layers: int, num_ranks: int) -> PlanningSnapshot:
    """One of the ranks is slow, some experts are hot, two replicas of each."""
    shape = ModelShape(
        num_layers=num_layers,
        num_experts=NUM_EXPERTS,
        experts_per_token=8,
        rows_per_step=8 * num_ranks,
        slots_per_rank=-(-NUM_EXPERTS * 2 // num_ranks) + 1,
        expert_bytes=1 << 26,
        dense_bytes=1 << 30,
    )
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=NUM_EXPERTS, replicas=2
    )
    loads = zipf_loads(num_layers, NUM_EXPERTS)
    return PlanningSnapshot(
        layout=layout,
        shape=shape,
        model=None,
        workload=Workload(
            num_rows=shape.rows_per_step,
            tokens=1 << 20,
            sum_len_squared=float(1 << 30),
            loads=tuple(map(tuple, loads.tolist())),
        ),
        slow={3: 1.6},
        baseline=None,
        step_s=1.0,
        steps_since_plan=100,
        is_provisional=False,
        num_load_steps=100,
        next_generation=2,
    )


async def longest_pause_s(work: Awaitable[None]) -> tuple[float, float]:
    """(seconds the work took, the loop's longest pause meanwhile)."""
    task = asyncio.ensure_future(work)
    began_s = last_s = time.perf_counter()
    longest_s = 0.0
    while not task.done():
        await asyncio.sleep(BEAT_S)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s - BEAT_S), now_s
    return last_s - began_s, longest_s


async def on_the_loop(view: PlanningSnapshot) -> None:
    """The decision as a part of an event, as any other."""
    decide(view, PolicyConfig())


async def beside_it(view: PlanningSnapshot) -> None:
    """The decision by the controller's planner."""
    made = asyncio.Event()

    async def put(event: Event) -> None:
        made.set()

    def raise_it(what: str, error: Exception) -> None:
        raise error

    planner = Planner(policy=PolicyConfig(), put=put, on_failure=raise_it)
    planner.ask(RequestDecision(job="train", asked=1, view=view))
    await made.wait()
    planner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the model is made here")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    arguments = parser.parse_args()
    decide(view_of(1, 64), PolicyConfig())  # the first call pays the imports of the solver
    cases = []
    for num_ranks in arguments.ranks:
        view = view_of(arguments.layers, num_ranks)
        for name, work in (("on the loop", on_the_loop), ("beside it", beside_it)):
            took_s, pause_s = asyncio.run(longest_pause_s(work(view)))
            cases.append(
                {"decided": name, "ranks": num_ranks, "took_s": took_s, "pause_s": pause_s}
            )
    print("  ".join(f"{name:>12}" for name in cases[0]))
    for case in cases:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in case.values()]
        print("  ".join(f"{cell:>12}" for cell in cells))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
