"""Two ranks resume, save without pause and are killed at a random moment, or files break.

After each trial: whatever has a manifest is whole unless we broke it; what we broke is named; a
reader takes the newest whole one, and it holds what was saved; nothing that was complete before is
lost but by retention. Kills are SIGKILL of one rank or both, a full disk is the kernel's limit on
the size of files, and a file is torn, flipped or removed. Prints a table, last one line of JSON.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Layout, even_layout
from pacekeeper.core.manifest import MANIFEST_FILE, CheckpointId
from pacekeeper.core.run_identity import identity_of
from pacekeeper.trainer.block_state import ordered_parameters
from pacekeeper.trainer.checkpoint import Checkpoints, Position
from pacekeeper.trainer.checkpoint_catalog import complete_ids, damages, read_manifest
from pacekeeper.trainer.checkpoint_files import Storage, open_storage
from pacekeeper.trainer.collectives import LocalFabric
from pacekeeper.trainer.model import MoETransformer

RANKS = (0, 1)
LONGEST_S = 0.25  # from the start of the writers to the kill
KINDS = ("kill", "kill", "kill", "full", "torn", "flipped", "missing")
CONFIG = TrainConfig(
    job="crash",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    expert_hidden_size=32,
    num_experts=4,
    row_tokens=32,
    checkpoint_period_steps=1,
    checkpoints_kept=2,
)


@dataclass(kw_only=True)
class Tally:
    """What all trials came to. `wrong`: one line for each thing that must not be."""

    trials: Counter[str] = field(default_factory=Counter)
    num_broken_off: int = 0  # directories without manifest, left by a kill
    num_verified: int = 0
    spoilt: set[CheckpointId] = field(default_factory=set)
    num_named: int = 0  # of these, by verify
    wrong: list[str] = field(default_factory=list)


class Rank:
    """One rank whose state is a function of the step alone."""

    def __init__(self, directory: Path, rank: int, life: int) -> None:
        self.layout: Layout = even_layout(
            ranks=RANKS, num_layers=CONFIG.num_layers, num_experts=CONFIG.num_experts, replicas=2
        )
        config = replace(CONFIG, checkpoint_dir=str(directory))
        self.model = MoETransformer(config, self.layout, rank)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model))
        self.checkpoints = Checkpoints(
            config,
            rank=rank,
            life=life,
            first_life=life,
            identity=identity_of(config, 0),
            model=self.model,
            optimizer=self.optimizer,
        )

    def become(self, step: int) -> None:
        """The state of `step`."""
        for i, parameter in enumerate(ordered_parameters(self.model)):
            with torch.no_grad():
                parameter.fill_(step + i / 64)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step + i / 128),
                "exp_avg_sq": torch.full_like(parameter, step + i / 256),
            }

    def resume(self) -> int:
        """Go back to the newest one that can be read; its step, 0 where there is none."""
        paths = self.checkpoints.candidates()
        if not paths:
            return 0
        found = self.checkpoints.stage(paths, self.layout, LocalFabric())
        self.checkpoints.put_in_force(found)
        return found.manifest.id.step

    def is_of(self, step: int) -> bool:
        """Does it hold exactly the state of `step`?"""
        return all(
            bool((value == step + i / part).all())
            for i, parameter in enumerate(ordered_parameters(self.model))
            for value, part in (
                (parameter, 64),
                (self.optimizer.state[parameter]["exp_avg"], 128),
                (self.optimizer.state[parameter]["exp_avg_sq"], 256),
            )
        )


def write_on(directory: Path, rank: int, life: int, peer: socket.socket) -> None:
    """Resume, then save step after step, in lock-step with the peer, until one of both is gone."""
    own = Rank(directory, rank, life)
    step = 1 + own.resume()
    with contextlib.suppress(OSError):
        while True:
            peer.sendall(b".")
            if not peer.recv(1):
                return
            own.become(step)
            at = Position(layout=own.layout, step=step, ticket=step, last_loss=float(step))
            own.checkpoints.save_if_due(at, is_storing=False)
            own.checkpoints.close()
            step += 1


def run_writers(directory: Path, life: int, kind: str, draw: random.Random) -> None:
    """Start both ranks, and end them at a random moment."""
    ends = socket.socketpair()
    pids = []
    for rank in RANKS:
        pid = os.fork()
        if pid == 0:
            ends[1 - rank].close()
            if kind == "full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                limit = draw.randrange(1, 40_000)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as many warnings as steps
            try:
                write_on(directory, rank, life, ends[rank])
            finally:
                os._exit(0)
        pids.append(pid)
    for end in ends:
        end.close()
    time.sleep(draw.uniform(0.0, LONGEST_S))
    victims = draw.choice([pids, pids[:1], pids[1:]])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:  # who was left alone sees that its peer is gone
        os.waitpid(pid, 0)


def spoil(storage: Storage, one: CheckpointId, kind: str, draw: random.Random) -> None:
    """Tear, flip or remove one of its files."""
    # What a killed rank left beside these is of no use to anybody.
    names = [n for n in storage.names(one.name) if n == MANIFEST_FILE or n.endswith(".safetensors")]
    path = Path(storage.root, one.name, draw.choice(names))
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data) - 1)  # the last byte of a manifest is a line's end
    match kind:
        case "torn":
            path.write_bytes(data[:at])
        case "flipped":
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        case _:
            path.unlink()


def look(storage: Storage, reader: Rank, tally: Tally) -> int:
    """Verify all, restore the newest; the step of it (0: there is none)."""
    whole = []
    for one in complete_ids(storage):
        try:
            named = list(damages(storage, read_manifest(storage, one)))
        except DataError as error:
            named = [error.what]
        tally.num_verified += 1
        tally.num_named += bool(named)
        if bool(named) != (one in tally.spoilt):
            tally.wrong.append(f"{one.name}: {named or 'its damage is not seen'}")
        if not named:
            whole.append(one.step)
    listed = [CheckpointId.of_name(name) for name in storage.names("")]
    tally.num_broken_off += sum(
        one is not None and MANIFEST_FILE not in storage.names(one.name) for one in listed
    )
    if not whole:
        return 0
    step = reader.resume()
    if step != max(whole) or not reader.is_of(step):
        tally.wrong.append(f"restored step {step}, newest whole one is {max(whole)}")
    return step


def run(directory: Path, num_trials: int, seed: int) -> Tally:
    """All trials, one after the other in one directory, each from where the last one ended."""
    torch.set_num_threads(1)  # what is forked must not need the parent's threads
    draw, tally = random.Random(seed), Tally()
    storage = open_storage(f"{directory}/{CONFIG.job}")
    newest = 0
    for trial in range(1, num_trials + 1):
        kind = draw.choice(KINDS)
        tally.trials[kind] += 1
        run_writers(directory, trial, kind, draw)
        reader = Rank(directory, 0, trial)
        step = look(storage, reader, tally)
        if step < newest:
            tally.wrong.append(f"trial {trial} ({kind}): step {newest} is lost, {step} is left")
        newest = step
        whole = complete_ids(storage)
        if kind in ("torn", "flipped", "missing") and len(whole) > 1:
            spoil(storage, whole[0], kind, draw)
            tally.spoilt.add(whole[0])
            newest = look(storage, reader, tally)
            if newest == 0:
                tally.wrong.append(f"trial {trial} ({kind}): the one before is lost, too")
    return tally


def main() -> None:
    """Prints the table, then one line of JSON; ends with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what is damaged is damaged on purpose
    with tempfile.TemporaryDirectory() as directory:
        tally = run(Path(directory), options.trials, options.seed)
    table = Table(title=f"{options.trials} trials, seed {options.seed}")
    for column in ("what happened", "times"):
        table.add_column(column, justify="left" if column == "what happened" else "right")
    for kind, times in sorted(tally.trials.items()):
        table.add_row(kind, str(times))
    console = Console()
    console.print(table)
    for line in tally.wrong:
        console.print(f"wrong: {line}")
    print(
        json.dumps(
            {
                "trials": options.trials,
                "broken_off": tally.num_broken_off,
                "verified": tally.num_verified,
                "damages_named": tally.num_named,
                "wrong": len(tally.wrong),
            }
        )
    )
    raise SystemExit(bool(tally.wrong))


if __name__ == "__main__":
    main()
