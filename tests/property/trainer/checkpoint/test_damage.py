"""Whatever happens to its files: damage is named, what is restored is what was saved."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Piece
from pacekeeper.core.checkpoint.manifest_codec import encode_manifest
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.reader import complete_ids, damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.examples import examples
from support.trainees import Lone, State, assert_all_same


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Two checkpoints, of steps 1 and 2, and the states they hold."""

    lone: Lone
    pristine: Path
    states: list[State]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    lone = Lone(tmp_path_factory.mktemp("checkpoints"))
    states = lone.grow(2)
    pristine = tmp_path_factory.mktemp("pristine") / "copy"
    shutil.copytree(lone.root, pristine)
    yield Bench(lone=lone, pristine=pristine, states=states)


def spoil(path: Path, data: st.DataObject) -> bool:
    """Do one bad thing to a file; False where it stays as it was."""
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1), label="at")
    match data.draw(st.sampled_from(["flip", "cut", "grow", "zeros", "gone"]), label="how"):
        case "flip":
            bit = 1 << data.draw(st.integers(0, 7))
            path.write_bytes(before[:at] + bytes([before[at] ^ bit]) + before[at + 1 :])
        case "cut":
            path.write_bytes(before[:at])
        case "grow":
            path.write_bytes(before + b"\0" * (at + 1))
        case "zeros":  # as after a crash of a file system that delays its data
            path.write_bytes(before[:at] + b"\0" * (len(before) - at))
        case _:
            path.unlink()
            return True
    return path.read_bytes() != before


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damage_is_named_and_never_taken(bench: Bench, data: st.DataObject) -> None:
    lone = bench.lone
    shutil.rmtree(lone.root)
    shutil.copytree(bench.pristine, lone.root)
    storage = open_storage(str(lone.root))
    newest = CheckpointId(run_id=1, generation=1, step=2)
    name = data.draw(st.sampled_from([MANIFEST_FILE, "rank-0.safetensors", "part-0.json"]))
    is_spoilt = spoil(lone.root / newest.name / name, data)
    event(f"{name} is spoilt: {is_spoilt}")
    lone.restore()
    assert_all_same(lone.state(), bench.states[lone.step])
    try:
        named = list(damages(storage, read_manifest(storage, newest)))
    except DataError as error:
        named = [error.what]
    assert bool(named) == (lone.step == 1), "found by verify where it is found by restoring"
    if is_spoilt and name == "rank-0.safetensors":
        assert lone.step == 1 and all(newest.name in line for line in named)
    if name == "part-0.json":
        assert lone.step == 2, "parts have served when the manifest stands"
    if not (lone.root / newest.name / MANIFEST_FILE).exists():
        assert complete_ids(storage) == [CheckpointId(run_id=1, generation=1, step=1)]


def test_swapped_experts_are_told_by_their_names(bench: Bench) -> None:
    """A manifest that assigns the bytes of one expert to another, with all digests right."""
    lone = bench.lone
    shutil.rmtree(lone.root)
    shutil.copytree(bench.pristine, lone.root)
    storage = open_storage(str(lone.root))
    newest = CheckpointId(run_id=1, generation=1, step=2)
    manifest = read_manifest(storage, newest)
    other = {0: 1, 1: 0}
    at = {entry.piece: entry for entry in manifest.pieces}
    pieces = tuple(
        replace(at[Piece(Block(BlockKind.EXPERT, 0, other[block.index]), kind)], piece=entry.piece)
        if (block := entry.piece.block).kind is BlockKind.EXPERT and not (kind := entry.piece.kind)
        else entry
        for entry in manifest.pieces
    )
    storage.publish(
        f"{newest.name}/{MANIFEST_FILE}", encode_manifest(replace(manifest, pieces=pieces))
    )
    swapped = list(damages(storage, read_manifest(storage, newest)))
    assert len(swapped) == 2 and "expert.0.0: there lie ['expert.0.1/" in swapped[0]
    lone.restore()
    assert lone.step == 1
