"""Two ranks resume, save without pause and are killed at a random moment, or files break.

After each trial: whatever has a manifest is whole unless we broke it; what we broke is named; a
reader takes the newest whole one, and it holds what was saved; nothing that was complete before is
lost but by retention. With --experts 1 checkpoints are partial: a file that breaks takes all that
live from it, and one that does not must be left. Kills are SIGKILL of one rank or both, a full disk
is the kernel's limit on the size of files, and a file is torn, flipped or removed. Prints a table,
last one line of JSON.
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
from pacekeeper.core.manifest import MANIFEST_FILE, CheckpointId, Manifest, saved_in
from pacekeeper.core.run_identity import identity_of
from pacekeeper.core.tensor_file import LENGTH_BYTES
from pacekeeper.trainer.block_state import ordered_parameters, parts_of, whole_of
from pacekeeper.trainer.checkpoint import Checkpoints, Position
from pacekeeper.trainer.checkpoint_catalog import complete_ids, damages, read_manifest
from pacekeeper.trainer.checkpoint_files import Storage, open_storage
from pacekeeper.trainer.checkpoint_retention import files_of, lent_out
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt:
    """A file that was damaged; `at`: the byte that was flipped, None: it is torn or gone."""

    path: str
    at: int | None
    header_bytes: int

    def hits(self, manifest: Manifest) -> bool:
        """Is something damaged that this checkpoint lives from?"""
        if self.path == f"{manifest.id.name}/{MANIFEST_FILE}":
            return True
        if self.path not in files_of(manifest):
            return False
        if self.at is None or self.at < self.header_bytes:
            return True
        inside = (entry for entry in manifest.pieces if entry.file == self.path)
        return any(e.first_byte <= self.at < e.first_byte + e.size_bytes for e in inside)


@dataclass(kw_only=True)
class Tally:
    """What all trials came to. `wrong`: one line for each thing that must not be."""

    trials: Counter[str] = field(default_factory=Counter)
    num_broken_off: int = 0  # directories without manifest, left by a kill
    num_verified: int = 0
    spoilt: list["Spoilt"] = field(default_factory=list)
    num_named: int = 0  # of these, by verify
    num_partial: int = 0  # restored from one that lives from others' files, too
    wrong: list[str] = field(default_factory=list)


class Rank:
    """One rank whose state is a function of the step alone."""

    def __init__(self, directory: Path, rank: int, life: int, experts: int) -> None:
        self.layout: Layout = even_layout(
            ranks=RANKS, num_layers=CONFIG.num_layers, num_experts=CONFIG.num_experts, replicas=2
        )
        config = replace(CONFIG, checkpoint_dir=str(directory), experts_per_checkpoint=experts)
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

    def resume(self) -> Manifest | None:
        """Go back to the newest one that can be read; None where there is none."""
        paths = self.checkpoints.candidates()
        if not paths:
            return None
        found = self.checkpoints.stage(paths, self.layout, LocalFabric())
        self.checkpoints.put_in_force(found)
        return found.manifest

    def is_of(self, manifest: Manifest) -> bool:
        """Does it hold of every piece exactly the state of the step at which that was saved?"""
        number = {id(p): i for i, p in enumerate(ordered_parameters(self.model))}
        parts = {"": 64, "exp_avg": 128, "exp_avg_sq": 256}
        for entry in manifest.pieces:
            block, kind, of = entry.piece.block, entry.piece.kind, saved_in(entry.file)
            for part in parts_of(self.model, block).values():
                value = part.of(whole_of(self.optimizer, part.parameter, kind))
                wanted = (0 if of is None else of.step) + number[id(part.parameter)] / parts[kind]
                if not bool((value == wanted).all()):
                    return False
        return True


def write_on(own: Rank, peer: socket.socket) -> None:
    """Resume, then save step after step, in lock-step with the peer, until one of both is gone."""
    found = own.resume()
    step = 1 + (0 if found is None else found.id.step)
    with contextlib.suppress(OSError), peer.makefile("r") as heard:
        while True:
            word = own.checkpoints.word(step, own.layout)
            peer.sendall(json.dumps(word).encode() + b"\n")
            line = heard.readline()
            if not line.endswith("\n"):
                return
            words = [word, json.loads(line)]
            own.checkpoints.hear(words if own.checkpoints.rank == 0 else words[::-1])
            own.become(step)
            at = Position(layout=own.layout, step=step, ticket=step, last_loss=float(step))
            own.checkpoints.save_if_due(at, is_storing=False)
            own.checkpoints.close()
            step += 1


def run_writers(
    directory: Path, life: int, kind: str, draw: random.Random, experts: int, longest_s: float
) -> None:
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
                write_on(Rank(directory, rank, life, experts), ends[rank])
            finally:
                os._exit(0)
        pids.append(pid)
    for end in ends:
        end.close()
    time.sleep(draw.uniform(0.0, longest_s))
    victims = draw.choice([pids, pids[:1], pids[1:]])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:  # who was left alone sees that its peer is gone
        os.waitpid(pid, 0)


def spoil(storage: Storage, manifest: Manifest, kind: str, draw: random.Random) -> Spoilt:
    """Tear, flip or remove one of the files it lives from."""
    names = [f"{manifest.id.name}/{MANIFEST_FILE}", *sorted(files_of(manifest))]
    path = Path(storage.root, name := draw.choice(names))
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data) - 1)  # the last byte of a manifest is a line's end
    header = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    match kind:
        case "torn":
            path.write_bytes(data[:at])
        case "flipped":
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        case _:
            path.unlink()
    return Spoilt(path=name, at=at if kind == "flipped" else None, header_bytes=header)


def look(storage: Storage, reader: Rank, tally: Tally) -> int:
    """Verify all, restore the newest; the step of it (0: there is none)."""
    whole = []
    for one in complete_ids(storage):
        try:
            manifest = read_manifest(storage, one)
            named = list(damages(storage, manifest))
            is_hit = any(spoilt.hits(manifest) for spoilt in tally.spoilt)
        except DataError as error:
            named = [error.what]
            path = f"{one.name}/{MANIFEST_FILE}"
            is_hit = any(spoilt.path == path for spoilt in tally.spoilt)
        tally.num_verified += 1
        tally.num_named += bool(named)
        if bool(named) != is_hit:
            tally.wrong.append(f"{one.name}: {named or 'its damage is not seen'}")
        if not named:
            whole.append(one.step)
    listed = [CheckpointId.of_name(name) for name in storage.names("")]
    lenders = lent_out(storage)
    tally.num_broken_off += sum(
        one is not None and one not in lenders and MANIFEST_FILE not in storage.names(one.name)
        for one in listed
    )
    if not whole:
        return 0
    found = reader.resume()
    step = 0 if found is None else found.id.step
    if found is None or step != max(whole) or not reader.is_of(found):
        tally.wrong.append(f"restored step {step}, newest whole one is {max(whole)}")
    tally.num_partial += found is not None and bool(found.older)
    return step


def apart(storage: Storage) -> tuple[Manifest, ...]:
    """The newest complete one and the newest before that lives from none of its files; or none."""
    found = []
    for one in complete_ids(storage):
        with contextlib.suppress(DataError):
            found.append(read_manifest(storage, one))
    others = (m for m in found if files_of(m).isdisjoint(files_of(found[0])))
    other = next(others, None)
    return () if other is None else (found[0], other)


def run(
    directory: Path, num_trials: int, seed: int, experts: int = 0, longest_s: float = LONGEST_S
) -> Tally:
    """All trials, one after the other in one directory, each from where the last one ended."""
    torch.set_num_threads(1)  # what is forked must not need the parent's threads
    draw, tally = random.Random(seed), Tally()
    storage = open_storage(f"{directory}/{CONFIG.job}")
    newest = 0
    for trial in range(1, num_trials + 1):
        kind = draw.choice(KINDS)
        tally.trials[kind] += 1
        run_writers(directory, trial, kind, draw, experts, longest_s)
        reader = Rank(directory, 0, trial, experts)
        step = look(storage, reader, tally)
        if step < newest:
            tally.wrong.append(f"trial {trial} ({kind}): step {newest} is lost, {step} is left")
        newest = step
        left = apart(storage)
        if kind in ("torn", "flipped", "missing") and left:
            tally.spoilt.append(spoil(storage, left[0], kind, draw))
            newest = look(storage, reader, tally)
            if newest < left[1].id.step and not any(s.hits(left[1]) for s in tally.spoilt):
                tally.wrong.append(f"trial {trial} ({kind}): {left[1].id.name} is lost, too")
    return tally


def main() -> None:
    """Prints the table, then one line of JSON; ends with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: all")
    parser.add_argument("--longest-s", type=float, default=LONGEST_S, help="until a kill")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what is damaged is damaged on purpose
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tally = run(directory, options.trials, options.seed, options.experts, options.longest_s)
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
                "restored_from_partial": tally.num_partial,
                "wrong": len(tally.wrong),
            }
        )
    )
    raise SystemExit(bool(tally.wrong))


if __name__ == "__main__":
    main()
