"""Byte strings that vouch for themselves, and one all-to-all of them."""

import zlib

import torch
from torch import Tensor

from pacekeeper.core.errors import PacekeeperError
from pacekeeper.trainer.distributed.collectives import Collectives

CRC_BYTES = 8


def pack_with_crc(row: Tensor) -> Tensor:
    """The row's bytes followed by their CRC32."""
    data = row.contiguous().view(torch.uint8).cpu()
    crc = zlib.crc32(data.numpy().data)
    return torch.cat([data, torch.tensor([crc]).view(torch.uint8)])


def unpack_checked(sealed: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """The row again. Raises PacekeeperError that says `what` where it is damaged."""
    data, crc = sealed[:-CRC_BYTES], sealed[-CRC_BYTES:].clone().view(torch.int64)
    if zlib.crc32(data.numpy().data) != int(crc):
        raise PacekeeperError(f"{what} arrived damaged (checksum)")
    return data.clone().view(dtype)


def all_to_all_bytes(
    outgoing: list[list[Tensor]], lengths: list[list[int]], fabric: Collectives
) -> list[list[Tensor]]:
    """One all-to-all of byte strings, cut up again: what came from each member, in its order.

    `lengths`: of what comes, by member. Raises PeerLost.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    sent = [torch.cat(parts) if parts else empty for parts in outgoing]
    totals = [sum(some) for some in lengths]
    output = torch.empty(sum(totals), dtype=torch.uint8)
    # Posted, not entered: it may be on its way beside the training, whose clock goes on.
    fabric.post(output, torch.cat(sent), totals, [len(part) for part in sent]).wait()
    return [
        list(part.split(some)) if some else []
        for part, some in zip(output.split(totals), lengths, strict=True)
    ]
