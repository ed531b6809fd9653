"""A trainer of its own that takes plans: its ranks divide the rows of a step by batch shares.

The two ranks are threads, to show all in a file.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Capability, ModelShape
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.plans.consumer import PlanSession, flat_layout

RANKS, ROWS, MOST_ROWS = 2, 16, 12  # a rank has memory for 12 rows
SHAPE = ModelShape(
    num_layers=1, num_experts=0, experts_per_token=0, slots_per_rank=0, expert_bytes=0,
    dense_bytes=0, rows_per_step=ROWS,
)  # fmt: skip
_barrier, _numbers = threading.Barrier(RANKS), dict[int, tuple[int, ...]]()


class Rank:
    def __init__(self, rank: int, ring_dir: str) -> None:
        self.rank, self.rows = rank, ROWS // RANKS
        self.pace = hooks.attach(
            job="example", rank=rank, world_size=RANKS, ring_dir=ring_dir, run_id=1,
            model=SHAPE, capabilities=[Capability.BATCH_SHARES],
        )  # fmt: skip
        self.session = PlanSession(self.pace, self, flat_layout(RANKS))

    def check(self, layout: Layout) -> None:
        if layout.rows_of(ROWS)[self.rank] > MOST_ROWS:
            raise ValueError(f"rank {self.rank} has memory for {MOST_ROWS} rows")

    def apply(self, layout: Layout) -> int:
        self.rows = layout.rows_of(ROWS)[self.rank]
        return 0  # no state moves with rows

    def gather(self, own: Sequence[int]) -> list[tuple[int, ...]]:
        _numbers[self.rank] = tuple(own)
        _barrier.wait()
        told = [_numbers[rank] for rank in range(RANKS)]
        _barrier.wait()
        return told

    def train(self, steps: int) -> None:
        for step in range(steps):
            if self.session.at_boundary(step=step, gather=self.gather):
                print(f"rank {self.rank}: {self.rows} rows from step {step} on", flush=True)
            with self.pace.step(step), self.pace.micro_batch_timer(tokens=100 * self.rows):
                time.sleep(0.001 * self.rows)  # the forward and backward pass of its rows
        self.pace.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ring_dir", type=Path, help="this node's ring directory")
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    if not given.ring_dir.is_dir():
        parser.error(f"{given.ring_dir}: no such directory; name that of `pacekeeper agent`")
    for one in [Rank(rank, str(given.ring_dir)) for rank in range(RANKS)]:
        threading.Thread(target=one.train, args=(given.steps,)).start()
