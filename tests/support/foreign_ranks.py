"""Ranks of other trainers as processes: what their job is like, how they run, what they told."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, Record, StepRecord
from support.forked_ranks import rest
from support.ports import free_port
from support.rings import records_in

Case = dict[str, Any]
PATIENCE_S = 400.0  # for a broken world only: some of these libraries take a minute to import
CASE: Case = {
    "job": "job",
    "kind": "plain",
    "world_size": 2,
    "steps": 5,
    "accumulates": 2,
    "zero": 0,
    # [rank][step][micro-batch] -> (sequences, their length): one number of tokens at a time for
    # all ranks, for experts are shared; who has longer sequences has more to do in attention.
    "batches": [
        [[[2, 96], [4, 40]], [[1, 64], [2, 96]]],
        [[[1, 192], [2, 80]], [[4, 16], [1, 192]]],
    ],
    "vocabulary": 64,
    "burns": [1, 1],  # by rank, from `slow_from` on; before it all burn as rank 0 does
    "slow_from": 0,
    "evaluates_after": [],
    "paces": [],  # slowness by rank, from `slow_from` on, of emulated devices; empty: none
}
S_PER_TOKEN, S_PER_SQUARE, S_PER_ROW = 1e-4, 2.5e-7, 2.5e-5


def needs(library: str, how: str) -> pytest.MarkDecorator:
    """Skip where a foreign library is missing, saying how to have it."""
    is_there = find_spec(library) is not None
    return pytest.mark.skipif(not is_there, reason=f"needs {library}: {how}")


class Burning(nn.Module):
    """A dense layer that may compute more often than it has to: a slow rank."""

    times = 1

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.times - 1):
                torch.nn.functional.gelu(self.layer(x))
        result: Tensor = self.layer(x)
        return result


class Device:
    """Takes its time for training, in proportion to the work: busy test machines tell no tales."""

    def __init__(self, case: Case, rank: int) -> None:
        self._paces, self._slow_from, self._rank = case["paces"], case["slow_from"], rank
        self._slowness = 1.0

    def begin_step(self, step: int) -> None:
        if self._paces and step >= self._slow_from:
            self._slowness = self._paces[self._rank]

    def takes_sequences(self, tokens: Tensor) -> None:
        rows, length = tokens.shape
        self._takes(rows * length * (S_PER_TOKEN + length * S_PER_SQUARE))

    def takes_rows_of(self, experts: nn.Module) -> None:
        experts.register_forward_pre_hook(lambda _, args: self._takes(len(args[0]) * S_PER_ROW))

    def _takes(self, spent_s: float) -> None:
        if self._paces and torch.is_grad_enabled():
            rest(spent_s * self._slowness)


def begin(arguments: Sequence[str]) -> tuple[Case, int]:
    """In the rank: its case and its number, with torch set up for it."""
    case, rank = json.loads(Path(arguments[1]).read_text()), int(arguments[2])
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case["world_size"]}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return case, rank


def batches_of(case: Case, rank: int, step: int) -> list[Tensor]:
    """Token sequences; few words of a large vocabulary make an expert hot."""
    shapes = case["batches"][rank][step % len(case["batches"][rank])]
    return [torch.randint(0, case["vocabulary"], tuple(shape)) for shape in shapes]


class Ranks:
    """All ranks of one case, running."""

    def __init__(self, module: str, folder: Path, **case: Any) -> None:
        self.case = {**CASE, "rings": str(folder / "rings"), "port": free_port(), **case}
        Path(self.case["rings"]).mkdir(exist_ok=True)
        file = folder / "case.json"
        file.write_text(json.dumps(self.case))
        self._log = folder / "ranks.log"
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", module, str(file), str(rank)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                for rank in range(self.case["world_size"])
            ]

    def end(self) -> None:
        """All of them came to a good end."""
        give_up_s = time.monotonic() + PATIENCE_S
        try:
            for process in self._processes:
                code = process.wait(max(0.1, give_up_s - time.monotonic()))
                assert code == 0, self._log.read_text()[-4000:]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def told(self, rank: int) -> "Told":
        (path,) = Path(self.case["rings"], self.case["job"]).glob(f"rank-*{rank}.ring")
        return Told(records_in(path))


class Told:
    """The records of one rank."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.micro_batches = [r for r in records if isinstance(r, MicroBatchRecord)]
        self.steps = [r for r in records if isinstance(r, StepRecord)]
        self.loads = [r for r in records if isinstance(r, ExpertLoadRecord)]
