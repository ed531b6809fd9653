"""Gradients of dense blocks: they are added up over the holders, and weights that changed are sent.

Where all holders update a block, they all-reduce its gradients. Where its optimizer state has an
owner and a mirror (ZeRO-1 by block), all send theirs to the owner, which adds them up in rank order
and sends the sums to the mirror; both make the same update, and the owner sends the weights to the
other holders: together as many bytes as an all-reduce.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import BlockKind, Layout, StateOwner
from pacekeeper.trainer.groups.group import Group, Pending
from pacekeeper.trainer.model.blocks import BlockStore, Part
from pacekeeper.trainer.parallel.block_states import TrainedBlocks
from pacekeeper.trainer.parallel.mesh.subgroup import subgroup

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's default


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the parameter's gradient, zeros where the backward pass made none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DensePart:
    """A dense block's part of a parameter, and who has it.

    Attributes:
        parameter: The parameter.
        part: The part.
        holders: Ranks that hold the block, ascending.
        place: Of the parameter in the model, equal on all ranks.
        owner: Who updates it; None: all holders.
        updated: Where this rank's optimizers update it; None: nowhere.
    """

    parameter: nn.Parameter
    part: Part
    holders: tuple[int, ...]
    place: int
    owner: StateOwner | None = None
    updated: Part | None = None

    @property
    def gradient(self) -> Tensor:
        """The part's gradient, zeros where there is none."""
        return self.part.of(gradient_of(self.parameter))

    @property
    def counter(self) -> int:
        """The rank that counts it in the norm."""
        return self.holders[0] if self.owner is None else self.owner.owner


def dense_parts(
    states: TrainedBlocks, layout: Layout, rank: int, places: Mapping[int, int]
) -> list[DensePart]:
    """Return the parts of trained parameters held here, the end of the model first.

    Args:
        states: The blocks held here.
        layout: Who holds and who updates them.
        rank: This rank.
        places: By id of a parameter, its place in the model.
    """
    found = []
    for block in states.store.blocks():
        if block.kind is BlockKind.EXPERT:
            continue
        holders = layout.holders(block)
        if rank not in holders:
            continue
        for name, part in states.store.parts(block).items():
            if isinstance(part.tensor, nn.Parameter) and part.tensor.requires_grad:
                found.append(
                    DensePart(
                        parameter=part.tensor,
                        part=part,
                        holders=holders,
                        place=places[id(part.tensor)],
                        owner=layout.state_owner_by_block.get(block),
                        updated=states.updated_part(name, part),
                    )
                )
    return sorted(found, key=lambda one: -one.place)


def updated_parts(parts: Iterable[DensePart]) -> list[DensePart]:
    """Return the parts that optimizers of this rank update, as they have them."""
    return [
        DensePart(
            parameter=one.updated.tensor,
            part=one.updated,
            holders=one.holders,
            place=one.place,
            owner=one.owner,
            updated=one.updated,
        )
        for one in parts
        if one.updated is not None and isinstance(one.updated.tensor, nn.Parameter)
    ]


class DenseBucket:
    """Gradients of parts that the same ranks hold.

    A part that has a gradient on no rank keeps none, so that no optimizer touches it: an encoder of
    images in a step of text must not decay. The host waits for that only where this rank has none.

    Args:
        parts: The parts, in the same order on all of the ranks.
        group: The ranks.
    """

    def __init__(self, parts: Sequence[DensePart], group: Group) -> None:
        self.parameters = tuple({id(one.parameter): one.parameter for one in parts}.values())
        self._parts = parts
        self._group = group
        self._uses: list[bool] = []
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def start(self, unused: Collection[int] = ()) -> None:
        self._uses = [id(one.parameter) not in unused for one in self._parts]
        rows = [one.gradient.reshape(-1) for one in self._parts]
        self._flat = torch.cat([*rows, _flags(self._uses, rows[0])])
        self._pending = self._group.all_reduce(self._flat)

    def finish(self) -> Iterator[tuple[nn.Parameter, bool]]:
        assert self._pending is not None and self._flat is not None, "finish comes after start"
        self._pending.wait()
        sizes = [one.gradient.numel() for one in self._parts]
        *rows, counts = self._flat.split([*sizes, len(sizes)])
        for part, row in zip(self._parts, rows, strict=True):
            part.gradient.copy_(row.view(part.gradient.shape))
        used = _are_used(self._uses, counts)
        self._flat = self._pending = None
        return zip((one.parameter for one in self._parts), used, strict=True)


class OwnedBucket:
    """Gradients of parts that the same ranks hold, each with an owner and perhaps a mirror.

    The sums end where optimizers of these two have the part; elsewhere there is no gradient
    afterwards.

    Args:
        parts: The parts, in the same order on all of the ranks.
        group: The ranks.
        is_whole: Whether a parameter, by its id, has no part in another bucket: its memory is free
            as soon as the bucket starts.
    """

    def __init__(
        self, parts: Sequence[DensePart], group: Group, is_whole: Mapping[int, bool]
    ) -> None:
        self.parameters = tuple({id(one.parameter): one.parameter for one in parts}.values())
        self._group = group
        self._is_whole = is_whole
        owners = [_owner_of(one).owner for one in parts]
        self._parts = [
            [one for one, owner in zip(parts, owners, strict=True) if owner == member]
            for member in group.ranks
        ]
        self._lengths = [_length(some) for some in self._parts]
        self._own = self._parts[group.ranks.index(group.rank)]
        # By member: those of this rank's that it mirrors, and those of it that this rank mirrors.
        mirrors = [_owner_of(one).mirror for one in self._own]
        self._mirrored_by = [
            [n for n, mirror in enumerate(mirrors) if mirror == member] for member in group.ranks
        ]
        self._mirrored = [
            [one for one in some if _owner_of(one).mirror == group.rank] for some in self._parts
        ]
        self._unused: Collection[int] = ()
        self._arrived: Tensor | None = None
        self._pending: Pending | None = None

    def start(self, unused: Collection[int] = ()) -> None:
        self._unused = unused
        rows = []
        for some in self._parts:
            rows += [one.gradient.reshape(-1) for one in some]
            rows.append(_flags(self._uses_of(some), self.parameters[0]))
        sent = torch.cat(rows)
        own = [self._lengths[self._group.ranks.index(self._group.rank)]] * len(self._lengths)
        self._arrived = sent.new_empty(sum(own))
        self._pending = self._group.all_to_all_rows(self._arrived, sent, own, self._lengths)
        for parameter in self.parameters:
            if self._is_whole[id(parameter)]:
                parameter.grad = None

    def finish(self) -> Iterator[tuple[nn.Parameter, bool]]:
        assert self._pending is not None and self._arrived is not None, "finish comes after start"
        self._pending.wait()
        parts = self._arrived.view(len(self._lengths), -1 if len(self._arrived) else 0)
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part
        self._arrived = self._pending = None
        rows = list(total.split([*map(_size, self._own), len(self._own)]))
        counts = rows.pop()
        found = [(self._own, rows, counts), *self._mirrored_sums(rows, counts, total)]
        for some in self._parts:
            for one in some:
                if one.updated is None or one.updated.tensor is not one.parameter:
                    one.parameter.grad = None
        result: list[tuple[nn.Parameter, bool]] = []
        for some, of_parts, uses in found:
            for one, row in zip(some, of_parts, strict=True):
                _give_gradient(one, row)
            used = _are_used(self._uses_of(some), uses)
            result += zip(map(_updated_of, some), used, strict=True)
        return iter(result)

    def _mirrored_sums(
        self, rows: Sequence[Tensor], counts: Tensor, total: Tensor
    ) -> Iterator[tuple[list[DensePart], Sequence[Tensor], Tensor]]:
        """The parts that this rank mirrors, by owner, with their sums and counts of uses."""
        sent = []
        for chosen in self._mirrored_by:
            sent += [rows[n] for n in chosen] + [counts[n : n + 1] for n in chosen]
        send = [sum(len(rows[n]) + 1 for n in chosen) for chosen in self._mirrored_by]
        receive = [_length(some) for some in self._mirrored]
        if len(self._group.ranks) == 1:
            return
        arrived = total.new_empty(sum(receive))
        sums = torch.cat(sent) if sent else total.new_empty(0)
        self._group.all_to_all_rows(arrived, sums, receive, send).wait()
        for some, of_owner in zip(self._mirrored, arrived.split(receive), strict=True):
            *of_parts, uses = of_owner.split([*map(_size, some), len(some)])
            yield some, of_parts, uses

    def _uses_of(self, parts: Iterable[DensePart]) -> list[bool]:
        return [id(one.parameter) not in self._unused for one in parts]


def _owner_of(part: DensePart) -> StateOwner:
    assert part.owner is not None, "all holders update it"
    return part.owner


def _updated_of(part: DensePart) -> nn.Parameter:
    assert part.updated is not None and isinstance(part.updated.tensor, nn.Parameter)
    return part.updated.tensor


def _size(part: DensePart) -> int:
    return part.part.of(part.parameter).numel()


def _length(parts: Sequence[DensePart]) -> int:
    """Elements of the parts in a message, with one more each for whether it was used."""
    return sum(map(_size, parts)) + len(parts)


def _give_gradient(part: DensePart, row: Tensor) -> None:
    assert part.updated is not None
    target = _updated_of(part)
    if part.updated.cut is None:
        target.grad = row.view(target.shape)
    else:
        gradient = part.updated.of(gradient_of(target))
        gradient.copy_(row.view(gradient.shape))


def _flags(values: Sequence[bool], like: Tensor) -> Tensor:
    """Return ones, and zeros for what is not; a copy of a list would wait for the device."""
    flags = like.new_ones(len(values))
    for place, value in enumerate(values):
        if not value:
            flags[place].zero_()
    return flags


def _are_used(own: Sequence[bool], counts: Tensor) -> list[bool]:
    """Return whether any rank used each part; the host waits only where this rank did not."""
    return list(own) if all(own) else [bool(count) for count in counts.tolist()]


def dense_buckets(
    parts: Iterable[DensePart], group: Group, bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[int, DenseBucket | OwnedBucket]]:
    """Make buckets of parts with the same holders, in the given order.

    What one rank alone holds needs none, unless its optimizer has it in another tensor.

    Args:
        parts: Of this rank, in the same order on all ranks that hold them.
        group: All ranks.
        bucket_bytes: From which on a bucket is full.

    Returns:
        The place of the first parameter of each bucket in the model, and the bucket.
    """
    by_holders: dict[tuple[tuple[int, ...], torch.dtype, bool], list[list[DensePart]]] = {}
    num_buckets: dict[int, int] = {}
    filled_bytes: dict[tuple[tuple[int, ...], torch.dtype, bool], int] = {}  # of the last bucket
    for part in parts:
        is_here = part.updated is None or part.updated.tensor is part.parameter
        if len(part.holders) < 2 and is_here:
            num_buckets[id(part.parameter)] = 2  # it is as good as in another
            continue
        key = part.holders, part.parameter.dtype, part.owner is not None
        cuts = by_holders.setdefault(key, [[]])
        if filled_bytes.get(key, 0) >= bucket_bytes:
            cuts.append([])
            filled_bytes[key] = 0
        cuts[-1].append(part)
        num_bytes = _size(part) * part.parameter.element_size()
        filled_bytes[key] = filled_bytes.get(key, 0) + num_bytes
    order = sorted(by_holders.items(), key=lambda one: (one[0][0], one[0][2]))
    for cut in (cut for _, cuts in order for cut in cuts):
        for number in {id(one.parameter) for one in cut}:
            num_buckets[number] = num_buckets.get(number, 0) + 1
    is_whole = {number: count == 1 for number, count in num_buckets.items()}
    found: list[tuple[int, DenseBucket | OwnedBucket]] = []
    for (holders, _, is_owned), cuts in order:
        members = subgroup(group, holders)
        found += [
            (
                min(one.place for one in cut),
                OwnedBucket(cut, members, is_whole) if is_owned else DenseBucket(cut, members),
            )
            for cut in cuts
        ]
    return found


@dataclass(slots=True, eq=False)
class WeightMessage:
    """Weights of some blocks, from the rank that updated them to those that did not."""

    source: int
    receivers: tuple[int, ...]
    parts: list[Tensor] = field(default_factory=list)
    _is_sent: bool = False
    _flat: Tensor | None = None
    _pending: Pending | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def start(self, group: Group) -> None:
        self._is_sent = group.rank == self.source
        if self._is_sent:
            flat = torch.cat([part.reshape(-1) for part in self.parts])
            sends = [(rank, flat) for rank in self.receivers]
            self._flat, self._pending = flat, group.point_to_point(sends, [])
        else:
            flat = self.parts[0].new_empty(sum(part.numel() for part in self.parts))
            self._flat, self._pending = flat, group.point_to_point([], [(self.source, flat)])

    def finish(self) -> None:
        assert self._flat is not None and self._pending is not None, "finish comes after start"
        self._pending.wait()
        if not self._is_sent:
            rows = self._flat.split([part.numel() for part in self.parts])
            for part, row in zip(self.parts, rows, strict=True):
                part.copy_(row.view(part.shape))
        self._flat = self._pending = None


def weight_messages(
    store: BlockStore, layout: Layout, living: Collection[int], rank: int
) -> list[WeightMessage]:
    """Return the messages that this rank sends or receives, in one order on all ranks.

    Where an owner is dead, its mirror sends; of a block that has neither, nobody does.

    Args:
        store: The blocks held here; the messages are valid until it holds others.
        layout: Who holds and who updates them.
        living: Ranks that live.
        rank: This rank.
    """
    found: dict[tuple[int, tuple[int, ...], str], list[WeightMessage]] = {}
    for block, owner in layout.state_owner_by_block.items():
        holders = [one for one in layout.holders(block) if one in living]
        source = next((one for one in owner.ranks if one in holders), None)
        receivers = tuple(one for one in holders if one not in owner.ranks)
        if source is None or not receivers or rank not in (source, *receivers):
            continue
        for part in store.parts(block).values():
            if isinstance(part.tensor, nn.Parameter) and part.tensor.requires_grad:
                tensor = part.of(part.tensor.detach())
                cuts = found.setdefault((source, receivers, str(tensor.dtype)), [])
                if not cuts or cuts[-1].num_bytes >= BUCKET_BYTES:
                    cuts.append(WeightMessage(source, receivers))
                cuts[-1].parts.append(tensor)
    return [message for _, cuts in sorted(found.items()) for message in cuts]


def send_weights(messages: Iterable[WeightMessage], group: Group) -> None:
    """Send the weights of dense blocks from their owners to the holders that do not update them.

    All ranks of the layout that live call it together; it may be repeated.

    Args:
        messages: From `weight_messages`.
        group: Ranks that live.
    """
    under_way: list[WeightMessage] = []
    for message in messages:
        message.start(group)
        under_way.append(message)
        if len(under_way) > 1:
            under_way.pop(0).finish()
    for message in under_way:
        message.finish()
