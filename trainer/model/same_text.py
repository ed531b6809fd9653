"""All ranks of a job train on one text: known before the first step, or a redone step would differ.

Launchers compare versions of Python only; two builds of one version may differ in their libraries.
"""

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.incidents.rank_text import rank_text
from pacekeeper.trainer.distributed.collectives import Collectives, end_together


def check(crc: int, fabric: Collectives) -> None:
    """Compare the checksums of all ranks' texts. Raises ConfigError on all ranks, PeerLost."""
    told = fabric.exchange([float(crc)])[:, 0].tolist()
    others = [rank for rank, one in zip(fabric.ranks, told, strict=True) if one != told[0]]
    if not others:
        return
    end_together(fabric)
    raise ConfigError(
        f"ranks {rank_text(others)} would train on another text than rank {fabric.ranks[0]}: "
        "the standard library of their Python is not the same",
        remedy="use the same build of Python on all nodes",
    )
