"""A node for ranks of other trainers: its ring directory, and an agent that reports them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.commands import FRESH
from support.controllers import ControllerProcess


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
