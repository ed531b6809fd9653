"""Manifests: what is written is read; what was changed, torn or does not add up is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout import even_layout
from pacekeeper.core.manifest import (
    BlockEntry,
    CheckpointId,
    FileEntry,
    Manifest,
    Part,
    decode_manifest,
    decode_part,
    encode_manifest,
    encode_part,
    gather,
    part_name,
    rank_of_part,
)
from pacekeeper.core.run_identity import identity_of, other_course, other_model
from support.checkpoints import digest, manifests

ids = st.builds(
    CheckpointId,
    life=st.integers(0, 1 << 52),
    generation=st.integers(0, 1 << 20),
    step=st.integers(0, 1 << 30),
)


@given(manifests())
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert encode_manifest(decode_manifest(data)) == data


@given(manifests(), st.data())
def test_a_torn_manifest_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    text = encode_manifest(manifest)
    cut = data.draw(st.integers(0, len(text) - 2))  # the last byte is a line's end
    with pytest.raises(ValueError):
        decode_manifest(text[:cut])


@given(manifests(), st.data())
def test_a_flipped_bit_is_refused_or_says_the_same(manifest: Manifest, data: st.DataObject) -> None:
    text = bytearray(encode_manifest(manifest))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode_manifest(bytes(text))
    except ValueError:
        return
    assert found == manifest  # white space


@given(manifests())
def test_the_parts_of_all_ranks_make_the_manifest(manifest: Manifest) -> None:
    parts = []
    for file in manifest.files:
        blocks = tuple(entry for entry in manifest.blocks if entry.file == file.name)
        parts.append(decode_part(encode_part(Part(file=file, blocks=blocks))))
    files, blocks = gather(reversed(parts), manifest.layout)
    assert (files, blocks) == (manifest.files, manifest.blocks)


@given(manifests(), st.data())
def test_a_part_too_few_or_one_twice_makes_none(manifest: Manifest, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(manifest.blocks))
    rest = tuple(entry for entry in manifest.blocks if entry != lost)
    with pytest.raises(ValueError, match="blocks"):
        replace(manifest, blocks=rest)
    with pytest.raises(ValueError, match="blocks"):
        replace(manifest, blocks=(*manifest.blocks, lost))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"first_byte": 3}, "do not fill"),
        ({"size_bytes": 1}, "do not fill"),
        ({"file": "other"}, r"no such files|do not fill"),
        ({"sha256": "none"}, "not digests"),
    ],
)
@given(manifest=manifests(), data=st.data())
def test_blocks_that_do_not_lie_side_by_side_are_refused(
    entry: dict[str, object], words: str, manifest: Manifest, data: st.DataObject
) -> None:
    large = [e for e in manifest.blocks if e.size_bytes > 3]
    assume(large)
    chosen = data.draw(st.sampled_from(large))
    other = replace(chosen, **entry)  # type: ignore[arg-type]
    assume(other != chosen)
    blocks = tuple(other if e == chosen else e for e in manifest.blocks)
    with pytest.raises(ValueError, match=words):
        replace(manifest, blocks=blocks)


@given(st.lists(ids, min_size=2, max_size=5))
def test_names_of_directories_sort_as_their_ids(found: list[CheckpointId]) -> None:
    assert [CheckpointId.of_name(one.name) for one in found] == found
    ordinary = [one for one in found if one.generation < 10_000 and one.step < 10**8]
    small = [one for one in ordinary if one.life < 10**13]
    assert sorted(small) == sorted(small, key=lambda one: one.name)


@pytest.mark.parametrize("name", ["", "x", "0000000000001-g0001-step1", "1-g1-step1", "a/b"])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert CheckpointId.of_name(name) is None


def test_a_checkpoint_after_going_back_is_newer_than_those_it_went_back_behind() -> None:
    before = CheckpointId(life=5, generation=1, step=200)
    assert CheckpointId(life=5, generation=2, step=120) > before
    assert CheckpointId(life=6, generation=1, step=110) > before
    assert CheckpointId(life=5, generation=1, step=300) > before


def test_parts_have_the_number_of_their_rank() -> None:
    assert rank_of_part(part_name(12)) == 12
    assert rank_of_part("manifest.json") is None


def test_another_format_is_refused_by_its_number() -> None:
    document = {"format": 2, "sha256": "", "body": {}}
    with pytest.raises(ValueError, match="format 2, this side reads 1"):
        decode_manifest(json.dumps(document).encode())


def test_another_model_is_told_from_another_course() -> None:
    own = identity_of(TrainConfig(), 7)
    assert other_model(own, own) == other_course(own, own) == ()
    wide = identity_of(TrainConfig(hidden_size=32), 7)
    assert other_model(wide, own) == ("hidden_size: 32 there, 64 here",)
    assert other_course(wide, own) == ()
    seeded = identity_of(TrainConfig(seed=3), 8)
    assert other_model(seeded, own) == ()
    assert other_course(seeded, own) == ("seed: 3 there, 0 here", "corpus: 8 there, 7 here")


def test_a_layout_of_another_model_has_other_blocks() -> None:
    layout = even_layout(ranks=[0], num_layers=1, num_experts=2, replicas=1)
    wide = even_layout(ranks=[0], num_layers=1, num_experts=3, replicas=1)
    parts = [
        Part(
            file=FileEntry(name="a", size_bytes=9, header_sha256=digest(0)),
            blocks=(
                BlockEntry(block=block, file="a", first_byte=8, size_bytes=1, sha256=digest(1)),
            ),
        )
        for block in wide.blocks()
    ]
    with pytest.raises(ValueError, match="another model"):
        gather(parts, layout)
