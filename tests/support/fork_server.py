"""One server for all rank processes of many jobs: torch is loaded once, not once per launcher."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from pacekeeper.trainer.rank import RankSpec

PRELOADED = ["pacekeeper.trainer.supervisor", "torch._dynamo"]


def server_context() -> ForkServerContext:
    """Where launchers of tests are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def server_address() -> str:
    """Of the running server, for `share_server`."""
    forkserver.ensure_running()
    own: Any = forkserver._forkserver
    return str(own._forkserver_address)


def share_server(address: str) -> None:
    """In a process that the server forked: fork from the same one, not from one of its own."""
    own: Any = forkserver._forkserver
    own._forkserver_address = address
    own.ensure_running = forkserver.ensure_running = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaysInto:
    """A body whose words go into its launcher's log: the server that forked it knows no log."""

    log_path: str
    body: Callable[[RankSpec], None]

    def __call__(self, spec: RankSpec) -> None:
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self.body(spec)
