"""Offers a plan to a rank, as its agent does: a file beside the ring, and a command in it."""

import hashlib
from pathlib import Path

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import shm_ring


def offer(ring: Path, plan: Layout, *, base: int) -> None:
    """Offer `plan`, made for generation `base`; an earlier offer is replaced."""
    data = encode_layout(plan)
    ring.with_name(shm_ring.plan_file_name(plan.generation)).write_bytes(data)
    command = shm_ring.CommandSlot(
        plan_generation=plan.generation,
        base_generation=base,
        plan_sha256=hashlib.sha256(data).digest(),
    )
    with ring.open("r+b") as file:
        file.seek(shm_ring.COMMAND_OFFSET)
        number = int.from_bytes(file.read(8), "little") + 1
        file.seek(shm_ring.COMMAND_OFFSET)
        file.write(shm_ring.encode_command(number, command))
