"""The other way to survive a death: torchrun starts all ranks again, from a checkpoint.

The model, batches and optimizer of our trainer with torch's own means only: a fixed even layout,
blocking collectives, `torch.save` of each rank's part every few steps. Run by `recovery_time`.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pacekeeper.core.config.loader import read_config
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.distributed.collectives import (
    Collectives,
    FabricGroup,
    LocalFabric,
    Posted,
    exchanged,
)
from pacekeeper.trainer.toy.engine.job_rules import learning_rate
from pacekeeper.trainer.toy.model.block_state_dict import ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync


@dataclass(slots=True, kw_only=True)
class World(FabricGroup):
    """The default group: all ranks."""

    rank: int
    ranks: tuple[int, ...]

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        entered_synchronously: bool = False,
    ) -> None:
        del entered_synchronously
        dist.all_to_all_single(output, input, output_splits, input_splits)

    def exchange(self, values: Sequence[float]) -> Tensor:
        return exchanged(self, values)

    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Posted:
        raise AssertionError("a single stage posts nothing")

    def group(self, ranks: tuple[int, ...], name: str = "") -> Collectives:
        return self if ranks == self.ranks else LocalFabric(self.rank)


def join() -> tuple[World, int]:
    """The group of this attempt, and its number."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    # A prefix of its own: else ranks that were started again read addresses of the last attempt.
    own = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    return World(rank=rank, ranks=tuple(range(size))), attempt


def newest(run_dir: Path, world: World) -> tuple[int, dict[str, object]]:
    """(steps done, state) of the newest checkpoint that all ranks have; nothing at the start."""
    paths = sorted(run_dir.glob(f"part-{world.rank}-*.pt"), key=lambda p: int(p.stem.split("-")[2]))
    done = int(paths[-1].stem.split("-")[2]) if paths else 0
    common = int(world.exchange([float(done)]).min())
    if not common:
        return 0, {}
    path = run_dir / f"part-{world.rank}-{common}.pt"
    state: dict[str, object] = torch.load(path)  # noqa: TID251
    return common, state


def save(
    run_dir: Path, rank: int, done: int, model: MoETransformer, optimizer: torch.optim.Optimizer
) -> None:
    """This rank's part, renamed into place; all but the last two are removed."""
    path = run_dir / f"part-{rank}-{done}.pt"
    part = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)  # noqa: TID251
    part.rename(path)
    by_age = sorted(run_dir.glob(f"part-{rank}-*.pt"), key=lambda p: int(p.stem.split("-")[2]))
    for old in by_age[:-2]:
        old.unlink()


def train(config: TrainConfig, run_dir: Path, checkpoint_steps: int) -> None:
    """Train from the newest checkpoint on; a line per step into steps-RANK.jsonl."""
    torch.set_num_threads(1)
    world, attempt = join()
    layout = even_layout(
        ranks=world.ranks,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        replicas=config.replicas,
        num_virtual_shards=config.num_heads,
    )
    corpus = Corpus.from_stdlib(config)
    model = MoETransformer(config, layout, world.rank)
    model.set_layout(layout, world)
    sync = ReplicaSync(layout, world)
    optimizer = torch.optim.AdamW(
        ordered_parameters(model), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    done, state = newest(run_dir, world)
    if state:
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
    counts = layout.rows_of(config.rows_per_step)
    first = sum(count for rank, count in counts.items() if rank < world.rank)
    rows = range(first, first + counts[world.rank])
    with (run_dir / f"steps-{world.rank}.jsonl").open("a") as log:
        for step in range(done, config.steps):
            optimizer.zero_grad()
            output = model(corpus.batch(step, rows), WorkPass(WorkMeter()))
            targets = corpus.target_tokens(step)
            balance = config.balance_loss * output.balance_sum / config.rows_per_step
            (output.loss_sum / targets + balance).backward()
            sync.synchronise(model)
            loss = float(world.exchange([float(output.loss_sum.detach())]).sum()) / targets
            optimizer.param_groups[0]["lr"] = learning_rate(config, step)
            optimizer.step()
            line = {"step": step, "attempt": attempt, "loss": loss, "pid": os.getpid()}
            log.write(json.dumps(line | {"ended_mono_s": time.monotonic()}) + "\n")
            log.flush()
            if (step + 1) % checkpoint_steps == 0:
                save(run_dir, world.rank, step + 1, model, optimizer)


def main() -> None:
    """Started by torchrun, once per rank and attempt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML, [train]")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-steps", type=int, required=True)
    arguments = parser.parse_args()
    config = read_config(TrainConfig, arguments.config.read_text(), file=str(arguments.config))
    train(config, arguments.run_dir, arguments.checkpoint_steps)


if __name__ == "__main__":
    main()
