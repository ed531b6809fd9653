"""How long a checkpoint holds training: written beside it, against written at once, in one run.

One rank has all of the demo's model, four times what a rank of the demo copies, and trains it on
the rows that one of its four ranks has. Three kinds of steps take turns: followed by no checkpoint,
by one that training waits for to its end, and by one that is only copied. Held is the time from the
step's end to the next one's beginning; what writing beside it costs the next step is told by
itself. Prints a table, last one line of JSON. Fractions of time held are of the demo's step, of
what is slowed of a step that nothing disturbs.
"""

import argparse
import json
import logging
import tempfile
import time
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.run_identity import identity_of
from pacekeeper.trainer.block_state import ordered_parameters
from pacekeeper.trainer.checkpoint import Checkpoints, Position
from pacekeeper.trainer.checkpoint_saver import Outcome
from pacekeeper.trainer.collectives import LocalFabric
from pacekeeper.trainer.data import Corpus
from pacekeeper.trainer.model import MoETransformer
from pacekeeper.trainer.rules import first_layout
from pacekeeper.trainer.work import WorkMeter, WorkPass

WARM_STEPS = 3
NUM_RANKS = 4  # of the demo
STEP_S = TrainConfig().emulated_step_s  # of its devices, at full speed
MODES = ("none", "blocking", "beside")


@dataclass(kw_only=True)
class Times:
    """Seconds, by what followed the step. `next_s`: the steps after it."""

    held_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    held_cpu_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    next_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    size_bytes: list[int] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return median(self.next_s["none"])

    def held(self, mode: str) -> float:
        """Beyond what looking whether one is due takes, as a fraction of a step of the demo."""
        return (median(self.held_s[mode]) - median(self.held_s["none"])) / STEP_S

    @property
    def busy(self) -> float:
        """The same of the processor time in it: what a host with other work to do does not blur."""
        beside, none = self.held_cpu_s["beside"], self.held_cpu_s["none"]
        return (median(beside) - median(none)) / STEP_S

    def slowed(self, mode: str) -> float:
        """What the step after it takes longer, as a fraction of a step."""
        return median(self.next_s[mode]) / self.step_s - 1.0


class LoneRank:
    """One rank that holds the whole model and trains it alone."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.fabric = LocalFabric()
        self.layout = first_layout(config, 1)
        self.corpus = Corpus.from_stdlib(config)
        self.model = MoETransformer(config, self.layout, 0)
        self.model.set_layout(self.layout, self.fabric)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model))
        self.checkpoints = Checkpoints(
            config,
            rank=0,
            life=1,
            first_life=1,
            identity=identity_of(config, self.corpus.crc()),
            model=self.model,
            optimizer=self.optimizer,
        )
        self.step = 0

    def train(self) -> float:
        """One step; seconds it took."""
        began_s, meter = time.perf_counter(), WorkMeter()
        self.optimizer.zero_grad()
        batch = self.corpus.batch(self.step, range(self.config.rows_per_step))
        self.model(batch, WorkPass(meter)).loss_sum.backward()
        self.optimizer.step()
        self.checkpoints.partial.count(meter.routed)
        self.step += 1
        return time.perf_counter() - began_s

    def save(self, mode: str, times: Times) -> None:
        """What follows a step, as the training loop does it; `blocking` waits for the end."""
        word = self.checkpoints.word(self.step, self.layout)  # travels in the vote
        self.checkpoints.hear([word])
        at = Position(layout=self.layout, step=self.step, ticket=self.step, last_loss=0.0)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        if mode == "none":
            self.checkpoints.save_if_due(at, is_storing=True)  # is left out, and says so
        else:
            self.checkpoints.save_if_due(at, is_storing=False)
        if mode == "blocking":
            self.checkpoints.close()
        times.held_s[mode].append(time.perf_counter() - began_s)
        times.held_cpu_s[mode].append(time.thread_time() - began_cpu_s)


def run(config: TrainConfig, rounds: int) -> tuple[Times, LoneRank]:
    """All kinds in turn, `rounds` times each."""
    torch.set_num_threads(1)
    rank, times = LoneRank(config), Times()
    for _ in range(WARM_STEPS):
        rank.train()
    rank.save("blocking", Times())  # the first writes everything, whatever the settings
    for _ in range(rounds):
        for mode in MODES:
            rank.train()
            rank.save(mode, times)
            times.next_s[mode].append(rank.train())
            news = rank.checkpoints.close()  # the next kind finds the disk at rest
            times.size_bytes += [one.size_bytes for one in news if one.size_bytes]
    return times, rank


def main() -> None:
    """Prints the table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    demo = TrainConfig(checkpoint_period_steps=1, checkpoints_kept=2)
    demo = replace(demo, rows_per_step=demo.rows_per_step // NUM_RANKS)
    logging.disable(logging.WARNING)  # that one is left out, in each round
    result: dict[str, float] = {}
    table = Table(title=f"{options.rounds} checkpoints of each kind, beside a step")
    for column in ("experts", "step ms", "blocking: held %", "beside: held %", "next step %", "MB"):
        table.add_column(column, justify="right")
    for name, num_experts in (("all", 0), ("one", 1)):
        with tempfile.TemporaryDirectory() as directory:
            config = replace(demo, checkpoint_dir=directory, experts_per_checkpoint=num_experts)
            times, rank = run(config, options.rounds)
        assert rank.checkpoints.counts[Outcome.FAILED] == 0
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
    result["stall_fraction"] = result["all_beside_held_fraction"]
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
