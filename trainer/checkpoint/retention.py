"""Which checkpoints stay, and which files of older ones they live from. No torch.

A manifest that stands names only files that stand: manifests that go are gone, durably, before any
file goes that they name. Whoever deletes may be killed after any file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pacekeeper.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointId,
    Manifest,
    checkpoint_of_file,
)
from pacekeeper.core.checkpoint.manifest_codec import decode_manifest
from pacekeeper.trainer.checkpoint.reader import REJECTED_FILE, ids
from pacekeeper.trainer.checkpoint.storage import Storage

Known = dict[CheckpointId, frozenset[str]]  # paths of the files that each lives from


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What may go: `manifests` of these checkpoints, then `files` (their paths) and what is left of
    the directories `whole`.
    """

    manifests: tuple[CheckpointId, ...]
    files: tuple[str, ...]
    whole: tuple[CheckpointId, ...]


def removable(
    storage: Storage, newest: CheckpointId, keep: int, known: Known | None = None
) -> Removal:
    """What `newest`, complete or being written, makes useless. Raises OSError.

    `keep` complete ones stay, and where the newest lives from files of others, two more: the newest
    that has no file in common with it, for a file that breaks must not take all, and the one that
    will follow it there. Those that were rejected or whose manifest is damaged do not count: they
    must not push out what is whole. Where none is known to be good, none is known to be useless. Of
    directories without a manifest the older ones go: nobody writes there any more. Files stay while
    a checkpoint that stays names them. `known`: files of checkpoints that were read before, and are
    added to: manifests never change, and reading them costs the time of whoever trains beside.
    """
    known = {} if known is None else known
    there = {one: storage.names(one.name) for one in ids(storage)}
    complete = [one for one, names in there.items() if MANIFEST_FILE in names]
    held: dict[CheckpointId, frozenset[str]] = {}
    for one in complete:
        files = known.get(one) or _named_by(storage, one)
        if files is not None:
            held[one] = files
    known.clear()
    known.update(held)
    good = [one for one in held if REJECTED_FILE not in there[one]]
    staying = _legs(good, held)
    oldest = min(good[:keep], default=None)
    going = [one for one in complete if oldest and one < oldest and one not in staying]
    needed = frozenset[str]().union(*(held[one] for one in held if one not in going))
    broken = [one for one in there if one < newest and one not in complete]
    parts: list[str] = []
    whole: list[CheckpointId] = []
    for one in (*going, *broken):
        names = [f"{one.name}/{name}" for name in there[one]]
        if needed.isdisjoint(names):
            whole.append(one)
        else:
            manifest = f"{one.name}/{MANIFEST_FILE}"
            parts += [name for name in names if name not in needed and name != manifest]
    return Removal(manifests=tuple(going), files=tuple(parts), whole=tuple(whole))


def sweep(
    storage: Storage, newest: CheckpointId, keep: int, known: Known | None = None
) -> list[str]:
    """Delete what is `removable`; the names of the directories that went entirely.

    Raises OSError where one can not be removed, after it tried the others.
    """
    found = removable(storage, newest, keep, known)
    trouble: OSError | None = None
    stuck: set[CheckpointId] = set()
    for one in found.manifests:
        try:
            storage.discard(f"{one.name}/{MANIFEST_FILE}")
        except OSError as error:
            trouble = error
            stuck.add(one)
    held = frozenset[str]().union(*(_named_by(storage, one) or () for one in stuck))
    lenders = {checkpoint_of_file(path) for path in held} | stuck
    for path in found.files:
        try:
            if path not in held:  # what a manifest names that can not go must stay, too
                storage.discard(path)
        except OSError as error:
            trouble = error
    gone = []
    for one in found.whole:
        try:
            if one not in lenders:
                storage.remove(one.name)
                gone.append(one.name)
        except OSError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return gone


def _named_by(storage: Storage, one: CheckpointId) -> frozenset[str] | None:
    """The files that a checkpoint lives from; None where its manifest is damaged or gone.

    Raises OSError where storage does not answer: what it names may not go for that.
    """
    try:
        manifest = decode_manifest(storage.read(f"{one.name}/{MANIFEST_FILE}"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return files_of(manifest) if manifest.id == one else None


def files_of(manifest: Manifest) -> frozenset[str]:
    """The paths of the files it lives from."""
    return frozenset(file.name for file in manifest.files)


def _legs(
    good: Sequence[CheckpointId], held: Mapping[CheckpointId, frozenset[str]]
) -> list[CheckpointId]:
    """The newest that has no file in common with the newest of all, and the next to become it; none
    where that lives from its own files only.
    """
    if not good or all(checkpoint_of_file(path) == good[0] for path in held[good[0]]):
        return []
    apart = [one for one in good[1:] if held[one].isdisjoint(held[good[0]])][:1]
    waiting = [one for one in good if not apart or one > apart[0]][-1:]
    return apart + waiting


def lent_out(storage: Storage) -> dict[CheckpointId, int]:
    """Directories without a manifest that complete checkpoints live from: how many name them.

    Raises OSError.
    """
    there = {one: storage.names(one.name) for one in ids(storage)}
    found: dict[CheckpointId, int] = {}
    for one, names in there.items():
        if MANIFEST_FILE not in names:
            continue
        files = _named_by(storage, one) or frozenset[str]()
        for lender in {checkpoint_of_file(path) for path in files} - {one, None}:
            if lender is not None and MANIFEST_FILE not in there.get(lender, ()):
                found[lender] = found.get(lender, 0) + 1
    return found
