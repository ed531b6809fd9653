"""The manifest: which tensors of which block lie where, and their digests.

A checkpoint does not depend on ranks (only file names contain them), so that any layout can be
filled from it. It exists once its manifest is written. In a partial checkpoint some pieces lie in
files of older checkpoints; the manifest names each file. In a window the pieces are of several
steps, which a restore does again (core/checkpoint/sparse_window.py), so nothing is lost. JSON form:
core/checkpoint/manifest_codec.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pacekeeper.core.checkpoint.interval import SaveCosts
from pacekeeper.core.checkpoint.partial_experts import lost_tokens_by_layer
from pacekeeper.core.layout.layout import Block, BlockKind, Layout

MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"(\d{13,16})-g(\d{4,16})-step(\d{8,16})", re.ASCII)
MAX_COUNT = 1 << 53  # in a vote they travel as float64
_HEX = re.compile("[0-9a-f]{64}")
RunFingerprint = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class CheckpointId:
    """The position of a checkpoint in the history of its job; ids sort by time of creation.

    `run_id`: of the run that wrote it; `generation`: of the layout then; `step`: committed steps.
    After a restore from an earlier step, generation or run ID are higher.
    """

    run_id: int
    generation: int
    step: int

    @property
    def name(self) -> str:
        """The directory name; names sort like ids."""
        return f"{self.run_id:013d}-g{self.generation:04d}-step{self.step:08d}"

    @classmethod
    def of_name(cls, name: str) -> "CheckpointId | None":
        """The id of a directory name, or None for any other name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        run_id, generation, step = map(int, found.groups())
        if max(run_id, generation, step) > MAX_COUNT:
            return None
        own = cls(run_id=run_id, generation=generation, step=step)
        return own if own.name == name else None


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """The unit of writing: a block's weights (no `kind`), or one kind of its optimizer state.

    A block may have nothing of a kind: the piece is then empty. A large piece is cut: strip `strip`
    (0, 1, ..) of `strips` has some rows of each of its tensors.
    """

    block: Block
    kind: str = ""
    strip: int = 0
    strips: int = 1

    @property
    def whole(self) -> "Piece":
        """The uncut piece."""
        return self if self.strips == 1 else Piece(self.block, self.kind)

    def cut(self, strips: int) -> "tuple[Piece, ...]":
        """The strips of an uncut piece."""
        return tuple(Piece(self.block, self.kind, strip, strips) for strip in range(strips))

    def rows(self, num_rows: int) -> range:
        """The rows of the strip in a tensor of `num_rows` rows (first dimension), possibly none."""
        first, end = (num_rows * strip // self.strips for strip in (self.strip, self.strip + 1))
        return range(first, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file: path from the root, size, and SHA-256 of the header that places the tensors.

    The first part of the path is the name of the checkpoint that the file was written for.
    """

    name: str
    size_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceEntry:
    """The location of a piece's tensors: `size_bytes` from `first_byte` of the file, and their
    SHA-256.

    `tokens`: for an expert, the tokens routed to it in this run before it was saved. `step`: in a
    window, the steps committed when it was saved; None elsewhere.
    """

    piece: Piece
    file: str
    first_byte: int
    size_bytes: int
    sha256: str
    tokens: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedgerState:
    """Token counts of a run: `routed` to each expert, [layer][expert]; `lost` by layer.

    `lost` counts the `num_faults` restores that led to this state. Empty: not counted.
    """

    routed: tuple[tuple[int, ...], ...] = ()
    lost: tuple[int, ...] = ()
    num_faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """The files and pieces that one rank wrote, all durable before it becomes visible.

    `frozen`: in a window, weights of blocks whose state is of a later step.
    """

    files: tuple[FileEntry, ...]
    pieces: tuple[PieceEntry, ...]
    account: TokenLedgerState
    frozen: tuple[PieceEntry, ...] = ()
    costs: SaveCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStart:
    """The first step of a window: committed steps and optimizer updates at that time."""

    step: int
    num_updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint, with all pieces of its layout's blocks.

    Attributes:
        ticket: number of the transaction.
        num_updates: optimizer updates, fewer than steps where some were skipped.
        last_loss: None before the first step.
        identity: settings that the run depends on (core/config/run_fingerprint.py).
        layout: the layout when saved, for information.
        pieces: by block in the layout's order; all blocks have the same kinds, ascending, each
            whole or in all its strips.
        window: the steps from here to the id's; each block's pieces are as after one of these
            steps, and `frozen` has its weights after all earlier ones, by step, whole or in all
            strips.
        costs: of saving, for the next run.

    Raises:
        ValueError: a piece is missing or the parts contradict each other.
    """

    job: str
    id: CheckpointId
    ticket: int
    num_updates: int
    last_loss: float | None
    identity: RunFingerprint
    layout: Layout
    files: tuple[FileEntry, ...]
    pieces: tuple[PieceEntry, ...]
    account: TokenLedgerState
    window: WindowStart | None = None
    frozen: tuple[PieceEntry, ...] = ()
    costs: SaveCosts | None = None

    def __post_init__(self) -> None:
        kinds = sorted({entry.piece.kind for entry in self.pieces})
        strips = {e.piece.whole: min(e.piece.strips, len(self.pieces)) for e in self.pieces}
        whole = (Piece(block, kind) for block in self.layout.blocks() for kind in kinds)
        wanted = tuple(strip for piece in whole for strip in piece.cut(strips.get(piece, 1)))
        if not kinds or tuple(entry.piece for entry in self.pieces) != wanted:
            raise ValueError("the pieces are not those of the layout's blocks, each once, in order")
        if self.id.generation != self.layout.generation or self.num_updates < 0:
            raise ValueError("generation or number of updates is wrong")
        if [file.name for file in self.files] != sorted({file.name for file in self.files}):
            raise ValueError("files must have names of their own, in order")
        inside: dict[str, list[PieceEntry]] = {file.name: [] for file in self.files}
        for entry in self.entries:
            if entry.file not in inside:
                raise ValueError(f"no such file: {entry.file}")
            inside[entry.file].append(entry)
        for file in self.files:
            _check_file(self.id, file, inside[file.name])
        _check_window(self)
        routed = self.account.routed
        if routed and [len(counts) for counts in routed] != [len(on) for on in self.layout.experts]:
            raise ValueError("tokens are counted of other experts")
        if self.account.lost and len(self.account.lost) != self.layout.num_layers:
            raise ValueError("lost tokens are of other layers")

    @property
    def entries(self) -> tuple[PieceEntry, ...]:
        """All pieces that a restore needs."""
        return self.pieces + self.frozen

    @property
    def steps_again(self) -> int:
        """The steps that a restore does again: 0 unless the checkpoint is a window."""
        return 0 if self.window is None else self.id.step - self.window.step

    @property
    def size_bytes(self) -> int:
        """The size of all files that hold some of it."""
        return sum(file.size_bytes for file in self.files)

    @property
    def own_bytes(self) -> int:
        """The size of the files that were written for it."""
        return sum(f.size_bytes for f in self.files if checkpoint_of_file(f.name) == self.id)

    @property
    def older(self) -> tuple[PieceEntry, ...]:
        """The pieces that were saved before it, with state of an earlier step."""
        return tuple(entry for entry in self.pieces if checkpoint_of_file(entry.file) != self.id)

    @property
    def lost_tokens(self) -> tuple[int, ...]:
        """By layer: tokens routed to its experts after these were saved; empty: not counted.

        A token is lost if any piece of its expert is older.
        """
        now = self.account.routed
        saved = [list(counts) for counts in now]
        for entry in self.older if now else ():
            block = entry.piece.block
            if block.kind is BlockKind.EXPERT:
                least = min(saved[block.layer][block.index], entry.tokens)
                saved[block.layer][block.index] = least
        return lost_tokens_by_layer(now, saved)


def _check_window(found: Manifest) -> None:
    """Steps lie in the window, and all weights that a replay needs are there."""
    steps = {entry.piece.block: entry.step for entry in found.pieces}
    if any(entry.step != steps[entry.piece.block] for entry in found.pieces):
        raise ValueError("the pieces of a block are of several steps")
    frozen = [(entry.piece, entry.step) for entry in found.frozen]
    if found.window is None:
        if frozen or set(steps.values()) != {None}:
            raise ValueError("pieces are of steps of a window, but there is none")
        return
    if not 0 <= found.window.num_updates <= found.num_updates:
        raise ValueError("a window begins with more updates than it ends with")
    first, wanted = found.window.step, list[tuple[Piece, int]]()
    strips = {(e.piece.whole, e.step): min(e.piece.strips, len(frozen)) for e in found.frozen}
    for block in found.layout.blocks():
        turn = steps[block]
        if turn is None or not first <= turn <= found.id.step:
            raise ValueError(f"{block} is of step {turn}, which is not in the window")
        for step in range(first, turn):
            cut = Piece(block).cut(strips.get((Piece(block), step), 1))
            wanted += [(strip, step) for strip in cut]
    if frozen != wanted:
        raise ValueError("weights of a step of the window are missing")


def checkpoint_of_file(path: str) -> CheckpointId | None:
    """The checkpoint that a file was written for, by its path."""
    return CheckpointId.of_name(path.partition("/")[0])


def _check_file(own: CheckpointId, file: FileEntry, pieces: Sequence[PieceEntry]) -> None:
    """Pieces do not overlap and lie after the header; a file of its own is filled completely."""
    of = checkpoint_of_file(file.name)
    if of is None or of > own or file.name.count("/") != 1:
        raise ValueError(f"{file.name}: not the path of a file of this checkpoint or an older one")
    spans = sorted((p.first_byte, p.first_byte + p.size_bytes) for p in pieces)
    is_inside = bool(spans) and spans[0][0] > 0 and spans[-1][1] <= file.size_bytes
    if not is_inside or any(one[1] > other[0] for one, other in pairwise(spans)):
        raise ValueError(f"{file.name}: its pieces overlap or lie outside")
    is_full = spans[-1][1] == file.size_bytes and all(a[1] == b[0] for a, b in pairwise(spans))
    if of == own and not is_full:
        raise ValueError(f"{file.name}: its pieces do not fill it")
    digests = [file.header_sha256, *(piece.sha256 for piece in pieces)]
    if not all(_HEX.fullmatch(digest) for digest in digests):
        raise ValueError(f"{file.name}: not digests")


def block_name(block: Block) -> str:
    """The prefix of the names of a block's tensors."""
    return f"{block.kind}.{block.layer}.{block.index}"


def piece_name(piece: Piece) -> str:
    """The display name of a piece: block, kind of moments, strip."""
    kind = f".{piece.kind}" if piece.kind else ""
    strip = f" (strip {piece.strip + 1} of {piece.strips})" if piece.strips > 1 else ""
    return f"{block_name(piece.block)}{kind}{strip}"


def tensor_name(piece: Piece, tensor: str) -> str:
    """The name of a piece's tensor in a file."""
    return f"{_place(piece)}{tensor}"


def parse_tensor_name(piece: Piece, name: str) -> str | None:
    """The tensor of `piece` that is called `name` in a file; None if it is of another block."""
    place = _place(piece)
    tensor = name.removeprefix(place)
    return tensor if name.startswith(place) and "/" not in tensor else None


def _place(piece: Piece) -> str:
    strip = f"{piece.strip}of{piece.strips}/" if piece.strips > 1 else ""
    return f"{block_name(piece.block)}/{strip}"


def rank_manifest_name(rank: int) -> str:
    """The file name of the manifest of one rank's pieces."""
    return f"part-{rank}.json"


def merge_rank_manifests(
    parts: Iterable[RankManifest], layout: Layout, base: Manifest | None = None
) -> tuple[tuple[FileEntry, ...], tuple[PieceEntry, ...], TokenLedgerState]:
    """The files, pieces and token counts of a manifest from those of all ranks.

    Args:
        parts: the manifests of the ranks. Where token counts differ the highest counts: ranks that
            joined late counted less.
        layout: the layout of the checkpoint; it gives the order.
        base: an earlier checkpoint that has the pieces that no rank wrote.

    Raises:
        ValueError: a piece is not in the layout, or was written twice.
    """
    parts = tuple(parts)
    account = _together([part.account for part in parts])
    order = {block: i for i, block in enumerate(layout.blocks())}
    written: dict[Piece, PieceEntry] = {}
    for entry in (entry for part in parts for entry in part.pieces):
        if entry.piece.block not in order:
            raise ValueError("a rank manifest has blocks of another model")
        if entry.piece in written:
            raise ValueError(f"{piece_name(entry.piece)} is written twice")
        tokens = _tokens(account, entry.piece.block)
        is_told = entry.tokens == tokens  # `replace` is most of the time that a manifest costs
        written[entry.piece] = entry if is_told else replace(entry, tokens=tokens)
    over = {piece.whole for piece in written}  # however it was cut before
    before = base.pieces if base else ()
    pieces = {entry.piece: entry for entry in before if entry.piece.whole not in over} | written
    files = {file.name: file for file in base.files} if base else {}
    files |= {file.name: file for part in parts for file in part.files}
    used = {entry.file for entry in pieces.values()}
    used |= {entry.file for part in parts for entry in part.frozen}
    return (
        tuple(files[name] for name in sorted(files) if name in used),
        tuple(sorted(pieces.values(), key=lambda e: (order.get(e.piece.block, -1), e.piece))),
        account,
    )


def merge_frozen_weights(parts: Iterable[RankManifest], layout: Layout) -> tuple[PieceEntry, ...]:
    """The weights of a window's earlier steps, from what the ranks wrote, in the layout's order."""
    order = {block: i for i, block in enumerate(layout.blocks())}
    frozen = (entry for part in parts for entry in part.frozen)
    return tuple(sorted(frozen, key=lambda e: (order.get(e.piece.block, -1), e.step or 0, e.piece)))


def _tokens(account: TokenLedgerState, block: Block) -> int:
    is_counted = bool(account.routed) and block.kind is BlockKind.EXPERT
    return account.routed[block.layer][block.index] if is_counted else 0


def _together(accounts: Sequence[TokenLedgerState]) -> TokenLedgerState:
    routed = [account.routed for account in accounts if account.routed]
    lost_by = [account.lost for account in accounts if account.lost]
    return TokenLedgerState(
        routed=tuple(
            tuple(max(counts) for counts in zip(*layers, strict=True))
            for layers in zip(*routed, strict=True)
        ),
        lost=tuple(max(layer) for layer in zip(*lost_by, strict=True)),
        num_faults=max((account.num_faults for account in accounts), default=0),
    )
