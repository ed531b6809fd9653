"""Manifests: what is written is read; what was changed, torn or does not add up is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    Manifest,
    Piece,
    PieceEntry,
    RankManifest,
    TokenLedgerState,
    checkpoint_of_file,
    merge_rank_manifests,
)
from pacekeeper.core.checkpoint.manifest_codec import (
    decode_manifest,
    decode_rank_manifest,
    encode_manifest,
    encode_rank_manifest,
    encode_with_digest,
)
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from support.checkpoints import digest, manifests

ids = st.builds(
    CheckpointId,
    run_id=st.integers(0, 1 << 52),
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
def test_the_parts_of_all_ranks_and_the_one_before_make_the_manifest(manifest: Manifest) -> None:
    parts = []
    for file in manifest.files:
        if checkpoint_of_file(file.name) == manifest.id:
            pieces = tuple(entry for entry in manifest.pieces if entry.file == file.name)
            part = RankManifest(files=(file,), pieces=pieces, account=manifest.account)
            parts.append(decode_rank_manifest(encode_rank_manifest(part)))
    found = merge_rank_manifests(
        reversed(parts), manifest.layout, before(manifest) if manifest.older else None
    )
    if not parts:  # nobody counted
        found = (*found[:2], manifest.account)
    assert found == (manifest.files, manifest.pieces, manifest.account)


def before(manifest: Manifest) -> Manifest:
    """The same with all pieces in files of an older one: those it lives from, and one more."""
    older = replace(manifest.id, generation=manifest.id.generation - 1)
    own_id = replace(older, step=older.step + 1)
    at, name, pieces, lent = 8, f"{own_id.name}/x", list[PieceEntry](), set(manifest.older)
    for entry in manifest.pieces:
        if entry not in lent:
            entry, at = replace(entry, file=name, first_byte=at), at + entry.size_bytes
        pieces.append(entry)
    is_more = len(lent) < len(pieces)
    own = [FileEntry(name=name, size_bytes=at, header_sha256=digest(at))] if is_more else []
    files = [file for file in manifest.files if checkpoint_of_file(file.name) == older]
    files = sorted([*files, *own], key=lambda file: file.name)
    layout = replace(manifest.layout, generation=older.generation)
    return replace(manifest, id=own_id, layout=layout, files=tuple(files), pieces=tuple(pieces))


@given(manifests(), st.data())
def test_a_part_too_few_or_one_twice_makes_none(manifest: Manifest, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(manifest.pieces))
    rest = tuple(entry for entry in manifest.pieces if entry != lost)
    with pytest.raises(ValueError, match="pieces are not those"):
        replace(manifest, pieces=rest)
    with pytest.raises(ValueError, match="pieces are not those"):
        replace(manifest, pieces=(*manifest.pieces, lost))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"first_byte": 3}, "overlap|do not fill"),
        ({"size_bytes": 1}, "do not fill"),
        ({"file": "other"}, "no such file"),
        ({"sha256": "none"}, "not digests"),
    ],
)
@given(manifest=manifests(is_partial=False), data=st.data())
def test_blocks_that_do_not_lie_side_by_side_are_refused(
    entry: dict[str, object], words: str, manifest: Manifest, data: st.DataObject
) -> None:
    large = [e for e in manifest.pieces if e.size_bytes > 3]
    assume(large)
    chosen = data.draw(st.sampled_from(large))
    other = replace(chosen, **entry)  # type: ignore[arg-type]
    assume(other != chosen)
    pieces = tuple(other if e == chosen else e for e in manifest.pieces)
    with pytest.raises(ValueError, match=words):
        replace(manifest, pieces=pieces)


@given(manifests(is_partial=True), st.data())
def test_pieces_that_overlap_or_lie_outside_are_refused_in_older_files_too(
    manifest: Manifest, data: st.DataObject
) -> None:
    """Such files hold more than is used, so gaps are no mistake there."""
    size = {file.name: file.size_bytes for file in manifest.files}
    lent = {entry.file for entry in manifest.older}
    pairs = [
        (one, other)
        for one in manifest.pieces
        for other in manifest.pieces
        if one.piece < other.piece and one.file == other.file in lent
        if min(one.size_bytes, other.size_bytes) > 0
    ]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    moved = replace(other, first_byte=one.first_byte)
    outside = replace(other, first_byte=size[other.file])
    for wrong in (moved, outside):
        pieces = tuple(wrong if entry == other else entry for entry in manifest.pieces)
        with pytest.raises(ValueError, match="overlap or lie outside"):
            replace(manifest, pieces=pieces)


@given(st.lists(ids, min_size=2, max_size=5))
def test_names_of_directories_sort_as_their_ids(found: list[CheckpointId]) -> None:
    assert [CheckpointId.of_name(one.name) for one in found] == found
    ordinary = [one for one in found if one.generation < 10_000 and one.step < 10**8]
    small = [one for one in ordinary if one.run_id < 10**13]
    assert sorted(small) == sorted(small, key=lambda one: one.name)


@pytest.mark.parametrize("name", ["", "x", "0000000000001-g0001-step1", "1-g1-step1", "a/b"])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert CheckpointId.of_name(name) is None


def test_a_checkpoint_after_going_back_is_newer_than_those_it_went_back_behind() -> None:
    before = CheckpointId(run_id=5, generation=1, step=200)
    assert CheckpointId(run_id=5, generation=2, step=120) > before
    assert CheckpointId(run_id=6, generation=1, step=110) > before
    assert CheckpointId(run_id=5, generation=1, step=300) > before


def test_another_format_is_refused_by_its_number() -> None:
    document = {"format": 1, "sha256": "", "body": {}}
    with pytest.raises(ValueError, match=r"format 1, .*byte model.* reads format 5"):
        decode_manifest(json.dumps(document).encode())


def test_a_layout_of_another_model_has_other_blocks() -> None:
    layout = even_layout(ranks=[0], num_layers=1, num_experts=2, replicas=1)
    wide = even_layout(ranks=[0], num_layers=1, num_experts=3, replicas=1)
    parts = [
        RankManifest(
            files=(FileEntry(name="a", size_bytes=9, header_sha256=digest(0)),),
            pieces=(
                PieceEntry(
                    piece=Piece(block), file="a", first_byte=8, size_bytes=1, sha256=digest(1)
                ),
            ),
            account=TokenLedgerState(),
        )
        for block in wide.blocks()
    ]
    with pytest.raises(ValueError, match="another model"):
        merge_rank_manifests(parts, layout)


@given(manifests(), st.sampled_from(["ticket", "num_updates", "files", "layout", "account"]))
def test_an_absurd_number_behind_a_right_checksum_is_refused(manifest: Manifest, key: str) -> None:
    body = json.loads(encode_manifest(manifest))["body"]
    body[key] = float("inf")
    with pytest.raises(ValueError):
        decode_manifest(encode_with_digest(body))


def numbers_in(plain: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where whole numbers stand in a document, but for the layout, which checks its own."""
    if type(plain) is int:
        return [path]
    items: object = plain.items() if isinstance(plain, dict) else ()
    items = enumerate(plain) if isinstance(plain, list) else items
    inside = [(key, value) for key, value in items if key not in ("layout", "costs", "identity")]  # type: ignore[attr-defined]
    return [place for key, value in inside for place in numbers_in(value, (*path, key))]


@given(
    manifests(),
    st.sampled_from([-1, 1.5, True, None, "1", [], float("nan"), float("inf"), 1 << 60, 10**400]),
    st.data(),
)
def test_a_number_that_is_none_is_refused_though_it_is_sealed(
    manifest: Manifest, value: object, data: st.DataObject
) -> None:
    """Somebody made it with care: whoever reckons with it later must not be who finds out."""
    body = json.loads(encode_manifest(manifest))["body"]
    places = [place for place in numbers_in(body) if place[-1] != "step" or value is not None]
    *path, last = data.draw(st.sampled_from(places))
    inside = body
    for key in path:
        inside = inside[key]
    inside[last] = value
    with pytest.raises(ValueError):
        decode_manifest(encode_with_digest(body))


@given(manifests(), st.sampled_from([None, True, [], {}, float("nan"), float("inf")]))
def test_an_identity_holds_numbers_and_texts_only(manifest: Manifest, value: object) -> None:
    body = json.loads(encode_manifest(manifest))["body"]
    body["identity"]["seed"] = value
    with pytest.raises(ValueError, match="seed is"):
        decode_manifest(encode_with_digest(body))


@given(manifests(is_partial=True), st.data())
def test_lost_is_what_an_expert_was_routed_after_its_oldest_piece_was_saved(
    manifest: Manifest, data: st.DataObject
) -> None:
    """Weights may be older than moments, or the other way round: the oldest counts."""
    routed = tuple(tuple(900 for _ in on) for on in manifest.layout.experts)
    older = set(manifest.older)
    pieces = tuple(
        replace(entry, tokens=data.draw(st.integers(0, 900)) if entry in older else 900)
        for entry in manifest.pieces
    )
    told = replace(manifest, pieces=pieces, account=TokenLedgerState(routed=routed))
    wanted = [0] * len(routed)
    for layer, counts in enumerate(routed):
        for expert, now in enumerate(counts):
            block = Block(BlockKind.EXPERT, layer, expert)
            seen = [entry.tokens for entry in told.older if entry.piece.block == block]
            wanted[layer] += now - min([now, *seen])
    assert told.lost_tokens == tuple(wanted)
