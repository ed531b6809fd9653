"""Ranks resume, save and sweep without pause and are killed at random moments, or files break.

After each trial: whatever has a manifest is whole unless we broke it; what we broke is named; a
reader takes the newest whole one, and it holds exactly what was saved; what retention keeps and was
whole before is whole still. Moments: SIGKILL of one of two or three ranks, or of all, anywhere, or
at a drawn line of saving, of retention in training or in `pacekeeper checkpoint gc`, or of
restoring; a disk that is full at a drawn byte (a small tmpfs where one can be mounted, else the
kernel's limit on the size of files); a file torn, flipped or removed. With --experts 1 checkpoints
are partial: a file that breaks takes all that live from it, and one that does not must be left;
with --window-steps they are exact over several steps, which are done again.
With --store s3 they lie on an object store (moto's server, in a process of its own). Prints a
table, last one line of JSON.
"""

import argparse
import contextlib
import json
import logging
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.crash_ranks import (
    BROKE,
    CONFIG,
    DOOMED_IN,
    GC_KEEPS,
    Fate,
    Rank,
    Where,
    run_trial,
)
from benchmarks.object_store import object_store
from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Manifest
from pacekeeper.core.checkpoint.safetensors_header import LENGTH_BYTES
from pacekeeper.core.errors import DataError
from pacekeeper.trainer.checkpoint.reader import (
    REJECTED_FILE,
    complete_ids,
    damages,
    ids,
    read_manifest,
)
from pacekeeper.trainer.checkpoint.retention import files_of, lent_out
from pacekeeper.trainer.checkpoint.storage import Storage, below, open_storage

LONGEST_S = 0.25  # from the start of the ranks to a kill at any moment
DAMAGES = ("torn", "flipped", "missing")
KINDS = ("any", "any", "save", "save", "retention", "retention", "restore", "restore", "gc",
         "full", *DAMAGES)  # fmt: skip
TMPFS_BYTES = 64_000_000
MOST_LEFT_BYTES = 3_000_000  # on a full disk: two checkpoints and a half


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
        inside = (entry for entry in manifest.entries if entry.file == self.path)
        return any(e.first_byte <= self.at < e.first_byte + e.size_bytes for e in inside)


@dataclass(kw_only=True)
class Tally:
    """What all trials came to. `wrong`: one line for each thing that must not be."""

    trials: Counter[str] = field(default_factory=Counter)
    killed_in: Counter[str] = field(default_factory=Counter)  # functions, at drawn lines
    num_outlived: int = 0  # the drawn line never came
    num_broken_off: int = 0  # directories without manifest, left by a kill
    num_verified: int = 0
    spoilt: list[Spoilt] = field(default_factory=list)
    num_named: int = 0  # of these, by verify
    num_partial: int = 0  # restored from one that lives from others' files, too
    num_replayed: int = 0  # restored from one whose steps were done again
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is there, newest first: `whole` by every byte, `good` as far as retention looks, and the
    step of what was restored (0: nothing).
    """

    whole: tuple[CheckpointId, ...] = ()
    good: tuple[CheckpointId, ...] = ()
    step: int = 0

    def lacks(self, before: "Found", keep: int) -> list[CheckpointId]:
        """Of the newest `keep` that were whole before, those that went though they had to stay."""
        gone = (one for one in before.whole[:keep] if one not in self.whole)
        return [one for one in gone if sum(other > one for other in self.good) < keep]


@dataclass(kw_only=True)
class Bench:
    """One directory or prefix, and all that happens in it. `disk`: a small one that can be full."""

    where: Where
    disk: Path | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def is_remote(self) -> bool:
        return "://" in self.where.root

    @property
    def storage(self) -> Storage:
        return open_storage(below(self.where.root, CONFIG.job))

    def look(self, run_id: int) -> "Found":
        """Verify all, restore the newest."""
        storage, tally = self.storage, self.tally
        whole: list[CheckpointId] = []
        good: list[CheckpointId] = []
        for one in complete_ids(storage):
            try:
                manifest = read_manifest(storage, one)
                named = list(damages(storage, manifest))
                if REJECTED_FILE not in storage.names(one.name):
                    good.append(one)
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
                whole.append(one)
        lenders = lent_out(storage)
        tally.num_broken_off += sum(
            one not in lenders and MANIFEST_FILE not in storage.names(one.name)
            for one in ids(storage)
        )
        if not whole:
            return Found(good=tuple(good))
        reader = Rank(self.where, 0, run_id)
        found = reader.resume()
        if found is None or found.manifest.id != whole[0] or not reader.is_exact(found):
            got = None if found is None else found.manifest.id.name
            tally.wrong.append(f"restored {got}, the newest whole one is {whole[0].name}")
        tally.num_partial += found is not None and bool(found.manifest.older)
        tally.num_replayed += found is not None and found.manifest.steps_again > 0
        step = 0 if found is None else found.manifest.id.step
        return Found(whole=tuple(whole), good=tuple(good), step=step)

    def run(self, run_id: int, kind: str, draw: random.Random, longest_s: float) -> str:
        """The trial's processes, from their start to their ends."""
        moments = {"full": "any"} | dict.fromkeys(DAMAGES, "save")
        fate = Fate.drawn(draw, moments.get(kind, kind), longest_s)
        if kind != "full":
            return run_trial(self.where, run_id, fate)
        left = draw.randrange(1, MOST_LEFT_BYTES)
        if self.disk is None:
            limited = replace(fate, after_s=longest_s, file_bytes=1 + left // 4)
            return run_trial(self.where, run_id, limited)
        ballast = self.disk / "ballast"
        free = int(subprocess.check_output(["df", "-B1", "--output=avail", self.disk]).split()[1])
        with ballast.open("wb") as file:
            file.write(b"\0" * max(0, free - left))
        try:
            return run_trial(self.where, run_id, replace(fate, after_s=longest_s))
        finally:
            ballast.unlink()

    def apart(self) -> tuple[Manifest, ...]:
        """The newest complete one and the newest before that lives from none of its files."""
        found = []
        for one in complete_ids(self.storage):
            with contextlib.suppress(DataError):
                found.append(read_manifest(self.storage, one))
        others = (m for m in found if files_of(m).isdisjoint(files_of(found[0])))
        other = next(others, None)
        return () if other is None else (found[0], other)

    def spoil(self, manifest: Manifest, kind: str, draw: random.Random) -> None:
        """Tear, flip or remove one of the files it lives from."""
        names = [f"{manifest.id.name}/{MANIFEST_FILE}", *sorted(files_of(manifest))]
        data = bytearray()
        while len(data) < 2:  # it is there, for others may have been damaged before
            name = draw.choice(names)
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(self.storage.read(name))
        at = draw.randrange(len(data) - 1)  # the last byte of a manifest is a line's end
        header = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        match kind:
            case "torn":
                self.storage.write(name, [bytes(data[:at])])
            case "flipped":
                data[at] ^= 1 << draw.randrange(8)
                self.storage.write(name, [bytes(data)])
            case _:
                self.storage.discard(name)
        flipped = at if kind == "flipped" else None
        self.tally.spoilt.append(Spoilt(path=name, at=flipped, header_bytes=header))


def run(bench: Bench, kinds: Sequence[str], seed: int, longest_s: float = LONGEST_S) -> Tally:
    """A trial of each of these kinds, one after the other, each from where the last one ended."""
    torch.set_num_threads(1)  # what is forked must not need the parent's threads
    draw, tally = random.Random(seed), bench.tally
    found = Found()
    for trial, kind in enumerate(kinds, 1):
        if (kind in ("gc", "restore") and not found.whole) or (kind == "full" and bench.is_remote):
            kind = "any"
        tally.trials[kind] += 1
        said = bench.run(trial, kind, draw, longest_s)
        if said.startswith(BROKE):
            tally.wrong.append(f"trial {trial} ({kind}): {said}")
        elif said:
            tally.killed_in[f"{kind}: {said}"] += 1
        elif kind in DOOMED_IN:
            tally.num_outlived += 1
        before, found = found, bench.look(trial)
        keep = GC_KEEPS if kind == "gc" else CONFIG.checkpoints_kept
        for one in found.lacks(before, keep):
            tally.wrong.append(f"trial {trial} ({kind}): {one.name} is lost")
        left = bench.apart()
        if kind in DAMAGES and left:
            bench.spoil(left[0], kind, draw)
            found = bench.look(trial)
            if found.step < left[1].id.step and not any(s.hits(left[1]) for s in tally.spoilt):
                tally.wrong.append(f"trial {trial} ({kind}): {left[1].id.name} is lost, too")
    return tally


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A tmpfs of TMPFS_BYTES there; None where this user may not mount one."""
    size = f"size={TMPFS_BYTES}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "pacekeeper-crash", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> None:
    """Prints the table, then one line of JSON; ends with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: all")
    parser.add_argument("--window-steps", type=int, default=1, help="exact, over so many steps")
    parser.add_argument("--store", choices=("disk", "s3"), default="disk")
    parser.add_argument("--longest-s", type=float, default=LONGEST_S, help="until a kill")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what is damaged is damaged on purpose
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk, root = None, str(folder)
        if options.store == "s3":
            root = f"{stack.enter_context(object_store())}/checkpoints"
        else:
            disk = stack.enter_context(small_disk(folder))
        where = Where(root=root, experts=options.experts, window_steps=options.window_steps)
        bench = Bench(where=where, disk=disk)
        kinds = random.Random(options.seed).choices(KINDS, k=options.trials)
        tally = run(bench, kinds, options.seed, options.longest_s)
    full = "tmpfs" if disk else "limit on the size of files" if options.store == "disk" else "none"
    report(tally, options, full)
    raise SystemExit(bool(tally.wrong))


def report(tally: Tally, options: argparse.Namespace, full: str) -> None:
    """Tables for people, a line for programs."""
    console = Console(width=100)
    title = f"{options.trials} trials on {options.store}, seed {options.seed}, full disk: {full}"
    for counts, name in ((tally.trials, "what happened"), (tally.killed_in, "killed in")):
        table = Table(title=title if counts is tally.trials else None)
        table.add_column(name)
        table.add_column("times", justify="right")
        for kind, times in sorted(counts.items()):
            table.add_row(kind, str(times))
        console.print(table)
    for line in tally.wrong:
        console.print(f"wrong: {line}", markup=False)
    result = {
        "trials": sum(tally.trials.values()),
        "store": options.store,
        "experts_per_checkpoint": options.experts,
        "window_steps": options.window_steps,
        "full_disk": full,
        "killed_at_drawn_lines": sum(tally.killed_in.values()),
        "outlived": tally.num_outlived,
        "broken_off": tally.num_broken_off,
        "verified": tally.num_verified,
        "files_damaged": len(tally.spoilt),
        "damages_named": tally.num_named,
        "restored_from_partial": tally.num_partial,
        "restored_by_replay": tally.num_replayed,
        "wrong": len(tally.wrong),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
