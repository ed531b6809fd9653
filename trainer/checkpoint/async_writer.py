"""One rank's part of a checkpoint, written beside the training, one at a time.

Whoever ends its part last sees all parts and publishes the manifest: nobody waits for anybody, so
nobody can hang. The steps of a window are written one after the other, its part with the last of
them. What fails is said and counted; training goes on.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.interval import SaveCosts, combine_costs
from pacekeeper.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointId,
    FileEntry,
    Manifest,
    Piece,
    PieceEntry,
    RankManifest,
    TokenLedgerState,
    merge_frozen_weights,
    merge_rank_manifests,
    rank_manifest_name,
    tensor_name,
)
from pacekeeper.core.checkpoint.manifest_codec import (
    decode_rank_manifest,
    encode_manifest,
    encode_rank_manifest,
)
from pacekeeper.core.checkpoint.safetensors_header import TensorSpec, encode_header
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import read_manifest
from pacekeeper.trainer.checkpoint.retention import Known, files_of, sweep
from pacekeeper.trainer.checkpoint.staging import THERE, Arrival
from pacekeeper.trainer.checkpoint.storage import Storage
from pacekeeper.trainer.checkpoint.tensors import DTYPE_NAMES
from pacekeeper.trainer.groups.waiting import BackgroundWorker

_NAMED_RANKS = 8  # of those that wrote nothing
_log = logging.getLogger(__name__)

Pieces = Mapping[Piece, Mapping[str, Tensor]]


class SaveStatus(StrEnum):
    """What became of a rank's part of a checkpoint."""

    COMPLETE = "complete"  # it was the last one: the checkpoint counts from now on
    WRITTEN = "written"  # others are still at it
    SKIPPED = "skipped"  # some rank was still writing the one before
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """One of them. `size_bytes`: of this rank's files; 0 where none was written. `in_memory`: of a
    snapshot, and of what is kept for another rank.
    """

    step: int
    outcome: SaveStatus
    took_s: float = 0.0
    size_bytes: int = 0
    why: str = ""
    in_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """A step of a window: how many had been committed, and the blocks whose state is yet to come,
    of which only weights are written.
    """

    step: int
    is_first: bool
    is_last: bool
    frozen: frozenset[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies in host memory of what one rank is to write; `pieces` may be empty.

    `writers`: the ranks that write something; `manifest` makes the checkpoint's from files, pieces
    and account, the same on all ranks. `is_sweeper`: this rank removes what older attempts left.
    `arrival`: of the copies, which may still be on their way from a device.
    `base`: the complete checkpoint that holds what is not written now (None: all is); `is_split`:
    experts get files of their own, which outlive the others. `turn`: it is one step of a window,
    whose writers, all steps together, are `writers`. `costs`: as this rank measured them.
    """

    id: CheckpointId
    layout: Layout
    pieces: Pieces
    writers: frozenset[int]
    manifest: Callable[..., Manifest]
    is_sweeper: bool
    account: TokenLedgerState
    arrival: Arrival = THERE
    base: CheckpointId | None = None
    is_split: bool = False
    turn: WindowStep | None = None
    costs: SaveCosts | None = None


@dataclass(slots=True, kw_only=True)
class Written:
    """What this rank has of a checkpoint in storage; `is_spoilt`: something of it failed."""

    files: list[FileEntry] = field(default_factory=list)
    pieces: list[PieceEntry] = field(default_factory=list)
    frozen: list[PieceEntry] = field(default_factory=list)
    took_s: float = 0.0
    is_spoilt: bool = False


class Saver:
    """Writes snapshots in a thread of its own. `keep`: complete checkpoints that stay."""

    def __init__(self, storage: Storage, *, rank: int, keep: int) -> None:
        self._storage = storage
        self._rank = rank
        self._keep = keep
        self._beside = BackgroundWorker("checkpoint")
        self._before: Snapshot | None = None  # without its pieces
        self._written: Written | None = None  # of the one that was begun last
        self._news: SimpleQueue[SaveResult] = SimpleQueue()
        self.has_failed = False  # the last one that is over
        self._known: Known = {}
        self._is_crowd_said = False
        self._began_s = 0.0
        self._published: Manifest | None = None  # the last one

    @property
    def is_storing(self) -> bool:
        return self._beside.is_busy

    @property
    def root(self) -> str:
        """Where it writes."""
        return self._storage.root

    @property
    def storing_s(self) -> float:
        """For how long the present one has been written; 0 where none is."""
        return time.monotonic() - self._began_s if self.is_storing else 0.0

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write it, after the earlier steps of its window; others must be over."""
        is_storing = self.is_storing
        assert not is_storing or snapshot.turn is not None, "one at a time"
        if snapshot.turn is not None and snapshot.turn.is_first:
            self.has_failed = False  # what was before is no matter of this window
        if not is_storing:
            self._began_s = time.monotonic()
        self._beside.begin(partial(self._store, snapshot))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is being written; False where that takes longer."""
        return self._beside.wait(timeout_s)

    def take_news(self) -> list[SaveResult]:
        """What happened since this was asked last."""
        found: list[SaveResult] = []
        try:
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return found

    def _store(self, snapshot: Snapshot) -> None:
        snapshot.arrival.wait()
        began_s, so_far = time.monotonic(), self._so_far(snapshot)
        if so_far.is_spoilt:
            return  # which was said
        outcome: SaveStatus | None = SaveStatus.FAILED
        why = "a bug"
        try:
            if snapshot.is_sweeper:
                missing = self._missing_before()
                self._sweep(snapshot.id)
                self._look_back(missing)
            outcome = self._written_on(snapshot, so_far)
            why = ""
            if outcome is SaveStatus.COMPLETE:
                self._sweep(snapshot.id)
        except (OSError, ValueError, DataError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            _log.warning(
                "checkpoint=%s is not written, training goes on: %s: %s; the one before stays",
                snapshot.id.name,
                self._storage.root,
                why,
            )
        finally:
            so_far.took_s += time.monotonic() - began_s
            self.has_failed = so_far.is_spoilt = outcome is SaveStatus.FAILED
            if outcome is not None:
                self._news.put(
                    SaveResult(
                        step=snapshot.id.step,
                        outcome=outcome,
                        took_s=so_far.took_s,
                        size_bytes=0 if why else sum(file.size_bytes for file in so_far.files),
                        why=why,
                    )
                )
        if outcome is SaveStatus.COMPLETE:
            costs = None if snapshot.costs is None else snapshot.costs.text()
            _log.info(
                "checkpoint=%s complete after %.3f s%s",
                snapshot.id.name,
                so_far.took_s,
                "" if costs is None else f"; {costs}",
            )

    def _so_far(self, snapshot: Snapshot) -> Written:
        """What there is of its window; nothing where it begins one, or is whole itself."""
        if snapshot.turn is None or snapshot.turn.is_first or self._written is None:
            self._written = Written()
        return self._written

    def _written_on(self, snapshot: Snapshot, so_far: Written) -> SaveStatus | None:
        """Write what this rank has of it, and the part when that is all; None: it is not."""
        if snapshot.turn is not None and not snapshot.turn.is_last:
            self._write(snapshot, so_far)
            return None
        self._before = replace(snapshot, pieces={})
        self._write(snapshot, so_far)
        if so_far.files:
            part = RankManifest(
                files=tuple(so_far.files),
                pieces=tuple(so_far.pieces),
                account=snapshot.account,
                frozen=tuple(so_far.frozen),
                costs=snapshot.costs,
            )
            name = f"{snapshot.id.name}/{rank_manifest_name(self._rank)}"
            self._storage.publish(name, encode_rank_manifest(part))
        return SaveStatus.COMPLETE if self._publish(snapshot) else SaveStatus.WRITTEN

    def _missing_before(self) -> list[int]:
        """Of which ranks nothing is there, if the one before did not become whole."""
        if self._before is None:
            return []
        try:
            names = self._storage.names(self._before.id.name)
        except OSError:
            return []  # who can not look can not write either, and says that
        missing = sorted(r for r in self._before.writers if rank_manifest_name(r) not in names)
        return [] if MANIFEST_FILE in names else missing

    def _look_back(self, missing: Sequence[int]) -> None:
        """What became of the one before, which each rank knows of its own part only."""
        if missing and self._before is not None and not self._is_crowd_said:
            _log.warning(
                "checkpoint=%s never became whole: of ranks %s nothing is in %s; "
                "unless they died, do all nodes see it?",
                self._before.id.name,
                missing[:_NAMED_RANKS],
                self._storage.root,
            )

    def _sweep(self, newest: CheckpointId) -> None:
        """What can not be removed stays: that must not keep a checkpoint from being written."""
        try:
            sweep(self._storage, newest, self._keep, self._known)
        except OSError as error:
            root, why = self._storage.root, error.strerror or str(error)
            _log.warning("an older checkpoint in %s can not be removed: %s", root, why)
        if not self._is_crowd_said and any(one.run_id > newest.run_id for one in self._known):
            self._is_crowd_said = True
            _log.warning(
                "a later launch of this job saves in %s, too, and removes what this one saves: end "
                "one of them, or give it a job name of its own",
                self._storage.root,
            )

    def _write(self, snapshot: Snapshot, so_far: Written) -> None:
        """Files with all pieces, and what lies where in them."""
        folder, turn = snapshot.id.name, snapshot.turn
        for name, pieces in _by_file(snapshot, self._rank).items():
            header = encode_header(_specs(pieces), {"checkpoint": folder})
            at, data = len(header), [memoryview(header)]
            for piece, tensors in pieces.items():
                digest, size = hashlib.sha256(), 0
                for tensor in tensors.values():
                    data.append(_bytes(tensor))
                    digest.update(data[-1])
                    size += len(data[-1])
                entry = PieceEntry(
                    piece=piece,
                    file=f"{folder}/{name}",
                    first_byte=at,
                    size_bytes=size,
                    sha256=digest.hexdigest(),
                    step=None if turn is None else turn.step,
                )
                is_frozen = turn is not None and piece.block in turn.frozen
                (so_far.frozen if is_frozen else so_far.pieces).append(entry)
                at += size
            self._storage.write(f"{folder}/{name}", data)
            told = hashlib.sha256(header).hexdigest()
            so_far.files.append(
                FileEntry(name=f"{folder}/{name}", size_bytes=at, header_sha256=told)
            )

    def _publish(self, snapshot: Snapshot) -> bool:
        """The manifest, if all parts are there; whoever else does it writes the same bytes."""
        folder = snapshot.id.name
        wanted = sorted(rank_manifest_name(rank) for rank in snapshot.writers)
        if not set(wanted) <= set(self._storage.names(folder)):
            return False
        parts = [decode_rank_manifest(self._storage.read(f"{folder}/{name}")) for name in wanted]
        base = None if snapshot.base is None else self._manifest_of(snapshot.base)
        files, pieces, account = merge_rank_manifests(parts, snapshot.layout, base)
        manifest = snapshot.manifest(
            files=files,
            pieces=pieces,
            account=account,
            frozen=merge_frozen_weights(parts, snapshot.layout),
            costs=combine_costs(part.costs for part in parts),
        )
        self._storage.publish(f"{folder}/{MANIFEST_FILE}", encode_manifest(manifest))
        self._published, self._known[manifest.id] = manifest, files_of(manifest)
        return True

    def _manifest_of(self, one: CheckpointId) -> Manifest:
        if self._published is not None and self._published.id == one:
            return self._published
        return read_manifest(self._storage, one)


def _by_file(snapshot: Snapshot, rank: int) -> dict[str, dict[Piece, Mapping[str, Tensor]]]:
    """One file, or one of the dense pieces and one of the experts'; none without a piece. Each step
    of a window has its own.
    """
    step = "" if snapshot.turn is None else f"step-{snapshot.turn.step}-"
    found: dict[str, dict[Piece, Mapping[str, Tensor]]] = {}
    for piece, tensors in snapshot.pieces.items():
        is_apart = snapshot.is_split and piece.block.kind is BlockKind.EXPERT
        name = f"{step}rank-{rank}{'-experts' if is_apart else ''}.safetensors"
        found.setdefault(name, {})[piece] = tensors
    return found


def _specs(pieces: Pieces) -> list[TensorSpec]:
    return [
        TensorSpec(
            name=tensor_name(piece, name),
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
        )
        for piece, tensors in pieces.items()
        for name, tensor in tensors.items()
    ]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
