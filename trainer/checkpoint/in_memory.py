"""Snapshots in host memory: a rank's own part of the state, and the copy it keeps for another rank.

The level above storage. Of each piece there are three copies at most: one being filled, that of the
newest complete snapshot, and one before it, which all have while the newest may be complete on some
ranks only. Experts that a snapshot leaves out are in older ones. What a rank has of one is copied
at a step boundary; a thread sends it to its keeper, in another failure domain, over a group of its
own, while training goes on. A group that breaks takes with it what is being filled, no more.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from pacekeeper.core.checkpoint.manifest import CheckpointId, Piece, TokenLedgerState, piece_name
from pacekeeper.core.checkpoint.write_plan import (
    assign_mirrors,
    assign_writers,
    piece_holders,
)
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.trainer.checkpoint.async_writer import SaveResult, SaveStatus
from pacekeeper.trainer.checkpoint.block_states import BlockState, BlockStates
from pacekeeper.trainer.checkpoint.policies.partial_experts import account_numbers, account_of
from pacekeeper.trainer.checkpoint.staging import Arrival, HostCopies
from pacekeeper.trainer.checkpoint.tensors import copy_pieces, piece_bytes, piece_specs
from pacekeeper.trainer.groups.checked_payload import (
    CRC_BYTES,
    all_to_all_bytes,
    exchange_values,
    pack_with_crc,
    unpack_checked,
)
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.groups.waiting import BackgroundWorker

NUM_COMPLETE = 2
_log = logging.getLogger(__name__)
Pieces = Mapping[Piece, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """What one rank has of a snapshot: of the state after `id.step` steps, and of its account."""

    id: CheckpointId
    num_updates: int
    last_loss: float  # NaN: of no step yet
    account: TokenLedgerState
    pieces: Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """Of one layout: what this rank is to hold in its snapshots, and for whom."""

    own: tuple[Piece, ...]
    keeper: int | None = None
    client: int | None = None
    clients: tuple[Piece, ...] = ()

    def only(self, experts: Collection[Block] | None) -> "_Ways":
        """Of dense blocks and these experts; None: of all."""
        if experts is None:
            return self

        def of(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            return tuple(p for p in pieces if not _is_expert(p.block) or p.block in experts)

        return replace(self, own=of(self.own), clients=of(self.clients))


@dataclass(kw_only=True)
class Snapshots:
    """One rank's; use from the training thread. `note` is told what became of each."""

    rank: int
    run_id: int
    states: BlockStates
    copies: HostCopies
    note: Callable[[SaveResult], None] = lambda _: None
    kept: tuple[StoredSnapshot, ...] = ()  # complete ones, newest first
    _beside: BackgroundWorker = field(default_factory=lambda: BackgroundWorker("snapshot"))
    _is_filling: bool = False
    _news: list[tuple[StoredSnapshot | None, SaveResult]] = field(
        default_factory=list
    )  # the thread's
    _is_broken: bool = False  # this generation's group
    _ways: tuple[int, _Ways] | None = None  # by generation

    @property
    def is_copying(self) -> bool:
        """Is one being filled, or can none be before the next generation?"""
        self._take_in()
        return self._is_broken or self._is_filling

    def begin(
        self,
        layout: Layout,
        step: int,
        *,
        last_loss: float,
        account: TokenLedgerState,
        new_group: Callable[[], Group],
        domain_of: DomainOf,
        experts: Collection[Block] | None = None,
    ) -> None:
        """Copy what this rank has to, and send it on its way, in the group of `new_group`.

        All ranks begin alike, and none while any is copying. Raises what `new_group` does.
        `experts`: only these are copied, and all that is dense; None: all.
        """
        assert not self._is_filling, "one at a time"
        ways = self._ways_of(layout, domain_of).only(experts)
        pieces, arrival = self.copies.make(partial(copy_pieces, self.states, ways.own))
        new = StoredSnapshot(
            id=CheckpointId(run_id=self.run_id, generation=layout.generation, step=step),
            num_updates=self.states.num_updates,
            last_loss=last_loss,
            account=account,
            pieces=pieces,
        )
        if ways.keeper is None:
            arrival.wait()
            self._keep(new)
            return
        group = new_group()
        self._is_filling = True
        self._beside.begin(partial(self._fill, new, arrival, ways, group))

    def wait(self) -> None:
        """Until nothing is being filled."""
        self._beside.wait()
        self._take_in()

    def leave(self) -> None:
        """The group is gone, and its connections are cut: what was on its way is lost."""
        self.wait()
        self._is_broken, self._ways = False, None

    def forget(self, *, up_to: CheckpointId | None = None) -> None:
        """The run went back: what is of its course since then is no state of it any more."""
        self.kept = tuple(one for one in self.kept if up_to is not None and one.id <= up_to)

    def is_first(self, layout: Layout) -> bool:
        """Was no snapshot begun in this layout? It is to be whole then, on all ranks alike."""
        return self._ways is None or self._ways[0] != layout.generation

    def _take_in(self) -> None:
        if not self._is_filling or self._beside.is_busy:
            return
        self._is_filling = False
        for one, told in self._news:
            self.note(told)
            if one is not None:
                self._keep(one)
            self._is_broken = self._is_broken or one is None
        self._news.clear()

    def _keep(self, one: StoredSnapshot) -> None:
        """Of each piece the newest copies stay; and none that nobody copies any more."""
        number, kept = Counter[Piece](), list[StoredSnapshot]()
        for snapshot in (one, *self.kept):
            pieces = {p: t for p, t in snapshot.pieces.items() if number[p] < NUM_COMPLETE}
            number.update(list(pieces))
            is_new = snapshot.id.generation == one.id.generation or len(kept) < NUM_COMPLETE
            if is_new and (pieces or not kept):
                kept.append(replace(snapshot, pieces=pieces))
        self.kept = tuple(kept)

    def _fill(self, new: StoredSnapshot, arrival: Arrival, ways: _Ways, group: Group) -> None:
        began_s, whole, size, why = time.monotonic(), None, 0, "a bug"
        try:
            arrival.wait()
            theirs = self._swap(new.pieces, ways, group)
            size = sum(t.nbytes for part in theirs.values() for t in part.values())
            whole = replace(new, pieces={**new.pieces, **theirs})
            why = ""
        except Exception as error:  # of any backend: training goes on
            why = str(error) or type(error).__name__
            _log.warning("snapshot of step=%d is given up: %s", new.id.step, why)
        finally:
            told = SaveResult(
                step=new.id.step,
                outcome=SaveStatus.FAILED if whole is None else SaveStatus.COMPLETE,
                took_s=time.monotonic() - began_s,
                size_bytes=size,
                why=why,
                in_memory=True,
            )
            self._news.append((whole, told))

    def _swap(self, own: Pieces, ways: _Ways, group: Group) -> Pieces:
        """Give the keeper what is this rank's, take what the client has."""
        sizes = [_num_bytes(self.states, piece) for piece in ways.clients]
        parcel = pack_with_crc(t for piece in ways.own for t in own[piece].values())
        length = sum(sizes) + CRC_BYTES
        came = all_to_all_bytes(
            [[parcel] if rank == ways.keeper else [] for rank in group.ranks],
            [[length] if rank == ways.client else [] for rank in group.ranks],
            group,
        )
        (sealed,) = (one for parts in came for one in parts)
        data = unpack_checked(sealed, f"the snapshot of rank {ways.client}").split(sizes)
        return {
            piece: _cut_up(self.states, piece, part)
            for piece, part in zip(ways.clients, data, strict=True)
        }

    def _ways_of(self, layout: Layout, domain_of: DomainOf) -> _Ways:
        if self._ways is None or self._ways[0] != layout.generation:
            self._ways = layout.generation, self._looked_up(layout, domain_of)
        return self._ways[1]

    def _looked_up(self, layout: Layout, domain_of: DomainOf) -> _Ways:
        writer_of = assign_writers(layout, piece_bytes(self.states, layout))
        keeper_of = assign_mirrors(layout.ranks, domain_of)
        client = next((rank for rank, keeper in keeper_of.items() if keeper == self.rank), None)

        def of(rank: int | None) -> tuple[Piece, ...]:
            return tuple(sorted(piece for piece, writer in writer_of.items() if writer == rank))

        return _Ways(
            own=of(self.rank),
            keeper=keeper_of.get(self.rank),
            client=client,
            clients=() if client is None else of(client),
        )


_NOTHING = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInventory:
    """What is left of one snapshot on all ranks: which of them has each piece that is wanted.

    `lacking`: blocks of which some piece is nowhere.
    """

    id: CheckpointId
    on: Mapping[Piece, tuple[int, ...]]
    lacking: frozenset[Block]

    def has(self, block: Block) -> bool:
        """Is all of the block there?"""
        return block not in self.lacking


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a snapshot says of the run at its step."""

    num_updates: int
    last_loss: float  # NaN: of no step yet
    account: TokenLedgerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What all ranks of `group` have together; `kept`: this one's. All of them ask alike, and all
    of it raises what the group does.
    """

    run_id: int
    states: BlockStates
    kept: tuple[StoredSnapshot, ...]
    group: Group

    def whole(
        self, layout: Layout, *, may_mix: bool = False
    ) -> tuple[SnapshotInventory, dict[Block, SnapshotInventory]] | None:
        """The newest snapshot of which every piece is left, and where each block is; None: none.

        `may_mix`: experts may be of older snapshots.
        """
        blocks = tuple(layout.blocks())
        stocks = self._stocks(blocks)
        for place, one in enumerate(stocks):
            found = {
                block: next((s for s in among if s.has(block)), None)
                for block in blocks
                for among in [stocks[place:] if may_mix and _is_expert(block) else [one]]
            }
            there = {block: stock for block, stock in found.items() if stock is not None}
            if len(there) == len(blocks):
                return one, there
        return None

    def newest_of(self, blocks: Iterable[Block]) -> dict[Block, SnapshotInventory]:
        """Of each block the newest snapshot that has all of it, where one has."""
        wanted = tuple(sorted(blocks))
        stocks = self._stocks(wanted)
        found = ((block, next((s for s in stocks if s.has(block)), None)) for block in wanted)
        return {block: stock for block, stock in found if stock is not None}

    def facts_of(self, stock: SnapshotInventory, layout: Layout) -> Facts:
        """The same on all ranks, whether or not they have any of it."""
        mine = self._kept_of(stock.id)
        size = 3 + len(account_numbers(TokenLedgerState(), layout))
        numbers = [0.0] * size
        if mine is not None:
            account = account_numbers(mine.account, layout)
            numbers = [1.0, mine.num_updates, mine.last_loss, *account]
        told = [row for row in exchange_values(numbers, self.group).tolist() if row[0]]
        most = [max(column) for column in zip(*told, strict=True)]
        return Facts(
            num_updates=int(most[1]), last_loss=most[2], account=account_of(most[3:], layout)
        )

    def seen(self, stock_of: Mapping[Block, SnapshotInventory], layout: Layout) -> dict[Block, int]:
        """Tokens that each of these experts had seen in its stock."""
        stocks = {stock.id: stock for stock in stock_of.values()}
        routed = {i: self.facts_of(stocks[i], layout).account.routed for i in sorted(stocks)}
        return {b: routed[stock.id][b.layer][b.index] for b, stock in stock_of.items()}

    def fetch(
        self, stock_of: Mapping[Block, SnapshotInventory], layout: Layout
    ) -> dict[Block, BlockState]:
        """What this rank holds of these blocks in `layout`. Raises PacekeeperError where a piece
        does not fit its checksum.
        """
        group = self.group
        position = {rank: i for i, rank in enumerate(group.ranks)}
        outgoing: list[list[Tensor]] = [[] for _ in group.ranks]
        incoming: list[list[Piece]] = [[] for _ in group.ranks]
        sends = dict.fromkeys(group.ranks, 0)
        for piece in self._pieces(sorted(stock_of)):
            stock = stock_of[piece.block]
            for taker in piece_holders(layout, piece):
                on = stock.on[piece]
                giver = taker if taker in on else min(on, key=lambda r: (sends[r], r))
                sends[giver] += giver != taker
                if giver == group.rank:
                    mine = self._kept_of(stock.id)
                    assert mine is not None, "it said so"
                    parcel = pack_with_crc(mine.pieces[piece].values())
                    outgoing[position[taker]].append(parcel)
                if taker == group.rank:
                    incoming[position[giver]].append(piece)
        lengths = [[_num_bytes(self.states, p) + CRC_BYTES for p in ps] for ps in incoming]
        state: dict[Block, dict[str, Tensor]] = {}
        for pieces, parcels in zip(
            incoming, all_to_all_bytes(outgoing, lengths, group), strict=True
        ):
            for piece, parcel in zip(pieces, parcels, strict=True):
                data = unpack_checked(parcel, piece_name(piece))
                state.setdefault(piece.block, {}).update(_cut_up(self.states, piece, data))
        return {block: dict(sorted(tensors.items())) for block, tensors in state.items()}

    def _stocks(self, blocks: Iterable[Block]) -> list[SnapshotInventory]:
        """Of all snapshots that any rank has, newest first."""
        pieces = self._pieces(blocks)
        mine = [float(x) for one in self.kept for x in (one.id.generation, one.id.step)]
        longest = exchange_values([len(mine)], self.group).max()
        mine += [_NOTHING] * (int(longest) - len(mine))
        told = exchange_values(mine, self.group).view(-1, 2).tolist()
        ids = {
            CheckpointId(run_id=self.run_id, generation=int(generation), step=int(step))
            for generation, step in told
            if step != _NOTHING
        }
        found = []
        for one in sorted(ids, reverse=True):
            own = self._kept_of(one)
            has = [float(own is not None and piece in own.pieces) for piece in pieces]
            columns = exchange_values(has, self.group).T.tolist()
            ranks = self.group.ranks
            on = {
                piece: tuple(rank for rank, is_here in zip(ranks, column, strict=True) if is_here)
                for piece, column in zip(pieces, columns, strict=True)
            }
            lacking = frozenset(piece.block for piece, there in on.items() if not there)
            found.append(SnapshotInventory(id=one, on=on, lacking=lacking))
        return found

    def _kept_of(self, one: CheckpointId) -> StoredSnapshot | None:
        return next((kept for kept in self.kept if kept.id == one), None)

    def _pieces(self, blocks: Iterable[Block]) -> list[Piece]:
        return [Piece(block, kind) for block in blocks for kind in self.states.kinds]


def _is_expert(block: Block) -> bool:
    return block.kind is BlockKind.EXPERT


def _num_bytes(states: BlockStates, piece: Piece) -> int:
    return sum(spec.size_bytes for spec in piece_specs(states, piece))


def _cut_up(states: BlockStates, piece: Piece, data: Tensor) -> dict[str, Tensor]:
    specs = piece_specs(states, piece)
    parts = data.split([spec.size_bytes for spec in specs])
    # A copy, as the type's alignment may differ from that of the others.
    return {
        spec.name: part.clone().view(spec.dtype).view(spec.shape)
        for spec, part in zip(specs, parts, strict=True)
    }
