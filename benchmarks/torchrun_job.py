"""The other way to survive a death: torchrun starts all ranks again, from a checkpoint.

The engine's own steps, which cost what ours do, with torch's groups: a fixed layout, blocking
collectives, a blocking save of each rank's blocks every few steps. Run by `recovery_time`.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.rank_processes import end_with_parent
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import read_config
from pacekeeper.core.layout.layout import Block
from pacekeeper.trainer.checkpoint.block_states import blocks_on, read_block
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import batch_of, engine_options, make_optimizer, prepare_job
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.engine_groups import EngineGroups


def join() -> tuple[EngineGroups, int]:
    """The groups of this attempt, and its number."""
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
    return EngineGroups.from_torch(torch.device("cpu")), attempt


class Parts:
    """The files of one rank: its blocks after some steps."""

    def __init__(self, run_dir: Path, engine: Engine) -> None:
        self.run_dir, self.engine = run_dir, engine
        self.rank = engine.groups.control.rank

    def path(self, step: int) -> Path:
        return self.run_dir / f"part-{self.rank}-{step}.safetensors"

    def steps(self) -> list[int]:
        """Steps after which there is a file, ascending."""
        files = self.run_dir.glob(f"part-{self.rank}-*.safetensors")
        return sorted(int(path.stem.split("-")[2]) for path in files)

    def save(self) -> None:
        """Renamed into place; all but the last two are removed."""
        held = blocks_on(self.engine.layout, self.rank)
        tensors = {
            f"{number}/{name}": tensor.clone()  # some are shared
            for number, block in enumerate(held)
            for name, tensor in read_block(self.engine.states, block).items()
        }
        path = self.path(self.engine.num_steps)
        part = path.with_suffix(".new")
        save_file(tensors, part)
        part.rename(path)
        for step in self.steps()[:-2]:
            self.path(step).unlink()

    def load(self) -> None:
        """The newest that all ranks have; nothing at the start."""
        newest = float(max(self.steps(), default=0))
        step = int(exchange_values([newest], self.engine.groups.control).min())
        if not step:
            return
        held = blocks_on(self.engine.layout, self.rank)
        blocks = list(held)
        state: dict[Block, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in load_file(self.path(step)).items():
            number, _, own = name.partition("/")
            state[blocks[int(number)]][own] = tensor
        self.engine.states.load(held, state, step)
        self.engine.go_back(self.engine.layout, self.engine.groups, step)


def train(config: EngineConfig, run_dir: Path, checkpoint_steps: int) -> None:
    """Train from the newest checkpoint on; a line per step into steps-RANK.jsonl."""
    torch.set_num_threads(1)
    groups, attempt = join()
    rank = groups.control.rank
    job = prepare_job(config, groups.control.ranks)
    engine = Engine(
        job.skeleton,
        job.source,
        layout=job.layout,
        groups=groups,
        options=engine_options(config, job, torch.device("cpu")),
    )
    engine.add_optimizer(make_optimizer(config, engine))
    parts = Parts(run_dir, engine)
    parts.load()
    with (run_dir / f"steps-{rank}.jsonl").open("a") as log:
        for step in range(engine.num_steps, config.steps):
            rows = engine.micro_batches(config.rows_per_step, config.rows_per_microbatch)
            loss = float(engine.step(batch_of(config, job.sampler, step, rows)).loss)
            line = {"step": step, "attempt": attempt, "loss": loss, "pid": os.getpid()}
            log.write(json.dumps(line | {"ended_mono_s": time.monotonic()}) + "\n")
            log.flush()
            if (step + 1) % checkpoint_steps == 0:
                parts.save()


def main() -> None:
    """Started by torchrun, once per rank and attempt."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML, [engine]")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-steps", type=int, required=True)
    options = parser.parse_args()
    config = read_config(EngineConfig, options.config.read_text(), file=str(options.config))
    train(config, options.run_dir, options.checkpoint_steps)


if __name__ == "__main__":
    main()
