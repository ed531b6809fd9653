"""Numbers and checked byte strings that ranks send each other, in host memory."""

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pacekeeper.core.errors import PacekeeperError
from pacekeeper.trainer.groups.group import Group

CRC_BYTES = 8


def exchange_values(values: Sequence[float], group: Group) -> Tensor:
    """The values of all members: [members, len(values)] float64, the same on all of them.

    Args:
        values: As many on every member.
        group: Takes tensors in host memory.
    """
    mine = torch.tensor(list(values), dtype=torch.float64)
    return group.all_gather(mine) if len(mine) else mine.expand(len(group.ranks), 0)


def pack_with_crc(tensors: Iterable[Tensor]) -> Tensor:
    """The bytes of the tensors, one after the other, followed by their CRC32."""
    parts = [tensor.reshape(-1).view(torch.uint8).cpu() for tensor in tensors]
    data = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    crc = zlib.crc32(data.numpy().data)
    return torch.cat([data, torch.tensor([crc]).view(torch.uint8)])


def unpack_checked(sealed: Tensor, what: str) -> Tensor:
    """The bytes again. Raises PacekeeperError that says `what` where they are damaged."""
    data, crc = sealed[:-CRC_BYTES], sealed[-CRC_BYTES:].clone().view(torch.int64)
    if zlib.crc32(data.numpy().data) != int(crc):
        raise PacekeeperError(f"{what} arrived damaged (checksum)")
    return data


def all_to_all_bytes(
    outgoing: list[list[Tensor]], lengths: list[list[int]], group: Group
) -> list[list[Tensor]]:
    """One all-to-all of byte strings, cut up again: what came from each member, in its order.

    `lengths`: of what comes, by member. Raises what the group does.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    sent = [torch.cat(parts) if parts else empty for parts in outgoing]
    totals = [sum(some) for some in lengths]
    output = torch.empty(sum(totals), dtype=torch.uint8)
    send = [len(part) for part in sent]
    group.all_to_all_rows(output, torch.cat(sent), totals, send).wait()
    return [
        list(part.split(some)) if some else []
        for part, some in zip(output.split(totals), lengths, strict=True)
    ]
