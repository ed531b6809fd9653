"""Ranks write one checkpoint that transformers and another layout read, or none."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError, HostError, PacekeeperError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.export import choose_writers
from pacekeeper.trainer.groups.agreement import OtherRanksError
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.model.checkpoint_writer import CheckpointWriter
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import adamw, engine_of, held_tensors, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks

RANKS = 3


def trained(family: str, group: ThreadGroup) -> Engine:
    layout = start_layout([4, 4], group.ranks, replicas=1 + (family == "qwen3_moe"))
    engine = engine_of(family, group, layout=layout, dtype=torch.float32)
    adamw(engine)
    engine.step(micro_batches(rows_of(0)[group.rank * 2 : group.rank * 2 + 2]))
    return engine


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_checkpoint_of_three_ranks_is_read_by_one_and_by_the_library(
    family: str, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"

    def work(group: ThreadGroup) -> dict[Any, torch.Tensor]:
        engine = trained(family, group)
        engine.export(folder)
        return {(n, e): t.clone() for n, e, t in held_tensors(engine)}

    held: dict[Any, torch.Tensor] = {}
    for one in run_ranks(RANKS, work):
        held |= one
    again = Engine.from_pretrained(folder)
    read = {(n, e): t for n, e, t in held_tensors(again)}
    assert read.keys() == held.keys()
    assert all(torch.equal(read[key], value) for key, value in held.items())
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in theirs.named_parameters():
        own = again.model.get_parameter(name)
        assert torch.equal(own, parameter), name


def test_a_disk_that_is_full_on_one_rank_fails_on_all_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = tmp_path / "exported", CheckpointWriter.write

    def full(self: CheckpointWriter, block: Block, tensors: Any) -> None:
        if block == Block(BlockKind.EXPERT, 1, 1):  # on one rank
            self.abort()
            raise HostError("no space left on device")
        written(self, block, tensors)

    monkeypatch.setattr(CheckpointWriter, "write", full)

    def work(group: ThreadGroup) -> type[BaseException]:
        engine = trained("qwen3_moe", group)
        with pytest.raises(PacekeeperError) as raised:
            engine.export(folder)
        return raised.type

    ended = run_ranks(RANKS, work)
    assert (ended.count(HostError), ended.count(OtherRanksError)) == (1, RANKS - 1)
    assert list(folder.iterdir()) == []


def test_a_folder_with_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    engine = engine_of("mixtral")
    engine.export(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError):
        engine.export(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_writers_hold_most_of_what_they_write_and_share_the_rest_evenly() -> None:
    layout = start_layout([4], range(2))
    experts = tuple(Block(BlockKind.EXPERT, 0, n) for n in range(4))
    alone = choose_writers([(block,) for block in experts], layout)
    assert all(alone[block] in layout.holders(block) for block in experts)
    dense = [(Block(BlockKind.EMBEDDING),), (Block(BlockKind.HEAD),)]
    assert sorted(choose_writers(dense, layout).values()) == [0, 1]
    assert len(set(choose_writers([experts], layout).values())) == 1
    assert EngineGroups.single_process().exchange.ranks == (0,)


def test_ranks_that_lose_one_at_the_end_of_an_export_leave_no_index_of_missing_files(
    tmp_path: Path,
) -> None:
    """Rank 1 sees the loss before the lowest rank writes the index, the others after it."""
    folder = tmp_path / "exported"

    def work(group: ThreadGroup) -> bool:
        engine = trained("qwen3_moe", group)
        control, gathers = engine.groups.control, count(1)

        def gather(values: torch.Tensor) -> torch.Tensor:
            number = next(gathers)
            if number == 3:
                raise PeerLost("a member is dead")
            found = control.all_gather(values)
            if number == 2 and group.rank == 1:
                raise PeerLost("a member is dead")
            return found

        engine.groups = replace(engine.groups, control=Lossy(control, gather))
        with pytest.raises(PeerLost):
            engine.export(folder)
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) <= {path.name for path in folder.iterdir()}


class Lossy:
    """A group whose gathers are replaced."""

    def __init__(self, group: Any, gather: Any) -> None:
        self.rank, self.ranks = group.rank, group.ranks
        self.all_to_all_rows, self.all_reduce = group.all_to_all_rows, group.all_reduce
        self.all_gather, self.point_to_point = gather, group.point_to_point
