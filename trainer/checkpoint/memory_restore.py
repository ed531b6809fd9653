"""What survivors find of lost state in each other's memory: pieces of snapshots, sent where they
are wanted.

Who has what is told by all before anything is taken, so that all take the same: for a restore the
newest snapshot of which every piece is left, for lost experts the newest of each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import Account, CheckpointId, Piece, piece_name
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.in_memory import NUM_COMPLETE, Kept
from pacekeeper.trainer.checkpoint.policies.token_books import account_numbers, account_of
from pacekeeper.trainer.checkpoint.tensors import piece_shapes
from pacekeeper.trainer.distributed.checked_payload import CRC_BYTES, seal, travel, unseal
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.model.block_state_dict import ENDINGS, BlockState
from pacekeeper.trainer.model.transformer import MoETransformer

KINDS = tuple(sorted(ending[1:] for ending in ENDINGS))
_NOTHING = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What is left of one snapshot on all ranks: which of them has each piece that is wanted."""

    id: CheckpointId
    on: Mapping[Piece, tuple[int, ...]]

    def has(self, block: Block) -> bool:
        """Is all of the block there?"""
        return all(self.on[piece] for piece in _pieces((block,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a snapshot says of the run at its step."""

    num_updates: int
    last_loss: float  # NaN: of no step yet
    account: Account


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What all ranks of `fabric` have together; `kept`: this one's. All of them ask alike, and all
    of it raises PeerLost.
    """

    life: int
    model: MoETransformer
    kept: tuple[Kept, ...]
    fabric: Collectives

    def whole(self, layout: Layout) -> Stock | None:
        """The newest snapshot of which every piece is left; None: of none."""
        blocks = tuple(layout.blocks())
        return next((s for s in self._stocks(blocks) if all(map(s.has, blocks))), None)

    def newest_of(self, blocks: Iterable[Block]) -> dict[Block, Stock]:
        """Of each block the newest snapshot that has all of it, where one has."""
        wanted = tuple(sorted(blocks))
        stocks = self._stocks(wanted)
        found = ((block, next((s for s in stocks if s.has(block)), None)) for block in wanted)
        return {block: stock for block, stock in found if stock is not None}

    def facts_of(self, stock: Stock, layout: Layout) -> Facts:
        """The same on all ranks, whether or not they have any of it."""
        mine = self._kept_of(stock.id)
        size = 3 + len(account_numbers(Account(), layout))
        numbers = [0.0] * size
        if mine is not None:
            account = account_numbers(mine.account, layout)
            numbers = [1.0, mine.num_updates, mine.last_loss, *account]
        told = [row for row in self.fabric.exchange(numbers).tolist() if row[0]]
        most = [max(column) for column in zip(*told, strict=True)]
        return Facts(
            num_updates=int(most[1]), last_loss=most[2], account=account_of(most[3:], layout)
        )

    def seen(self, stock_of: Mapping[Block, Stock], layout: Layout) -> dict[Block, int]:
        """Tokens that each of these experts had seen in its stock."""
        stocks = {stock.id: stock for stock in stock_of.values()}
        routed = {i: self.facts_of(stocks[i], layout).account.routed for i in sorted(stocks)}
        return {b: routed[stock.id][b.layer][b.index] for b, stock in stock_of.items()}

    def fetch(self, stock_of: Mapping[Block, Stock], layout: Layout) -> dict[Block, BlockState]:
        """What this rank holds of these blocks in `layout`. Raises PacekeeperError where a piece
        does not fit its checksum.
        """
        fabric, dtype = self.fabric, self.model.dtype
        position = {rank: i for i, rank in enumerate(fabric.ranks)}
        outgoing: list[list[Tensor]] = [[] for _ in fabric.ranks]
        incoming: list[list[Piece]] = [[] for _ in fabric.ranks]
        sends = dict.fromkeys(fabric.ranks, 0)
        for piece in _pieces(sorted(stock_of)):
            stock = stock_of[piece.block]
            for taker in layout.holders(piece.block):
                on = stock.on[piece]
                giver = taker if taker in on else min(on, key=lambda r: (sends[r], r))
                sends[giver] += giver != taker
                if giver == fabric.rank:
                    mine = self._kept_of(stock.id)
                    assert mine is not None, "it said so"
                    rows = [t.flatten() for t in mine.pieces[piece].values()]
                    outgoing[position[taker]].append(seal(torch.cat(rows)))
                if taker == fabric.rank:
                    incoming[position[giver]].append(piece)
        lengths = [
            [self._num_values(p) * dtype.itemsize + CRC_BYTES for p in ps] for ps in incoming
        ]
        state: dict[Block, dict[str, Tensor]] = {}
        for pieces, parcels in zip(incoming, travel(outgoing, lengths, fabric), strict=True):
            for piece, parcel in zip(pieces, parcels, strict=True):
                row = unseal(parcel, dtype, piece_name(piece))
                state.setdefault(piece.block, {}).update(self._cut_up(piece, row))
        return {block: dict(sorted(tensors.items())) for block, tensors in state.items()}

    def _stocks(self, blocks: Iterable[Block]) -> list[Stock]:
        """Of all snapshots that any rank has, newest first."""
        pieces = _pieces(blocks)
        mine = [float(x) for one in self.kept for x in (one.id.generation, one.id.step)]
        mine += [_NOTHING] * (2 * NUM_COMPLETE - len(mine))
        told = self.fabric.exchange(mine).view(-1, 2).tolist()
        ids = {
            CheckpointId(life=self.life, generation=int(generation), step=int(step))
            for generation, step in told
            if step != _NOTHING
        }
        found = []
        for one in sorted(ids, reverse=True):
            own = self._kept_of(one)
            has = [float(own is not None and piece in own.pieces) for piece in pieces]
            columns = self.fabric.exchange(has).T.tolist()
            ranks = self.fabric.ranks
            on = {
                piece: tuple(rank for rank, is_here in zip(ranks, column, strict=True) if is_here)
                for piece, column in zip(pieces, columns, strict=True)
            }
            found.append(Stock(id=one, on=on))
        return found

    def _kept_of(self, one: CheckpointId) -> Kept | None:
        return next((kept for kept in self.kept if kept.id == one), None)

    def _num_values(self, piece: Piece) -> int:
        return sum(torch.Size(s).numel() for s in piece_shapes(self.model, piece).values())

    def _cut_up(self, piece: Piece, row: Tensor) -> dict[str, Tensor]:
        shapes = piece_shapes(self.model, piece)
        parts = row.split([torch.Size(shape).numel() for shape in shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}


def _pieces(blocks: Iterable[Block]) -> list[Piece]:
    return [Piece(block, kind) for block in blocks for kind in KINDS]
