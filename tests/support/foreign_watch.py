"""A node for ranks of other trainers: its ring directory, and an agent that reports them."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacekeeper.protos import status_pb2
from support.agents import PATIENCE_S
from support.commands import FRESH
from support.controllers import ControllerProcess, until
from support.foreign_ranks import Ranks

SLOW_FROM, SLOWNESS = 40, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedNode:
    """Where its ranks attach."""

    rings: Path


@contextlib.contextmanager
def watched_node(folder: Path, controller: ControllerProcess) -> Iterator[WatchedNode]:
    """An agent process for `controller`; gone afterwards."""
    rings = folder / "rings"
    rings.mkdir()
    config = folder / "agent.toml"
    config.write_text(
        "[agent]\n"
        f'controller = "{controller.address}"\nnode = "n0"\nring_dir = "{rings}"\n'
        'metrics_listen = ""\npoll_interval_s = 0.1\n'
    )
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [*FRESH, "agent", "--config", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ},
        )
    try:
        yield WatchedNode(rings=rings)
    finally:
        agent.kill()
        agent.wait()


def incidents_of_a_slow_rank(module: str, folder: Path, **case: Any) -> list[Any]:
    """Of ranks of `module` beside a real agent and controller, what was found of any of them.

    That all computed slower together is a busy machine's doing, and no rank's.

    From its first step on rank 0 has sequences four times as long as rank 1, and words so few that
    an expert or two get nearly all; from `SLOW_FROM` on rank 1 is slow.
    """
    tokens = [256 + 64 * ((5 * step) % 7) for step in range(7)]
    case = {
        "steps": 70,
        "accumulates": 1,
        "batches": [[[[1, n]] for n in tokens], [[[4, n // 4]] for n in tokens]],
        "vocabulary": 2,
        "slow_from": SLOW_FROM,
        **case,
    }
    with ControllerProcess(folder) as controller, watched_node(folder, controller) as node:
        ranks = Ranks(module, folder, rings=str(node.rings), **case)
        try:
            ranks.end()
        finally:
            ranks.kill()

        def incidents() -> list[Any]:
            request = status_pb2.ListIncidentsRequest(job="job")
            found = controller.status.ListIncidents(request, timeout=30.0).incidents
            return [incident for incident in found if incident.HasField("rank")]

        until("somebody is found", incidents, PATIENCE_S)
        time.sleep(1.0)  # for others, if there were any
        return incidents()
