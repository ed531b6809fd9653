"""One server for all processes of tests: what they import is loaded once, not in each of them.

It is a launcher's, which has loaded what commands need, too: ranks, launchers and commands are all
forked from it.
"""

import os
import signal
from multiprocessing import forkserver, reduction, spawn
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from pacekeeper.trainer.elastic.launcher import RANKS_NEED, rank_server

LOADED = (
    *RANKS_NEED,
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "pacekeeper.trainer.elastic.restart_policy",
    "pacekeeper.cli.common.lazy_group",
    "pacekeeper.agent.daemon",
    "pacekeeper.controller.app.controller",
    "pacekeeper.simulator.readers.registry",
    "scipy.optimize",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "rich.console",
    "rich.table",
)
# The server runs it as its main module: its path has no tests, from which to load one by name.
PRELOADED = Path(__file__).with_name("preloaded.py")


def server_context() -> ForkServerContext:
    """Processes that it makes are forked from the server."""
    with (
        mock.patch.dict(os.environ, GRPC_VERBOSITY="NONE"),  # as the commands set it, in time
        mock.patch.object(spawn, "get_preparation_data", lambda _: {"main_path": str(PRELOADED)}),
    ):
        return rank_server(["__main__"])


def server_address() -> str:
    """Of the running server, for `share_server`."""
    own: Any = forkserver._forkserver
    return str(own._forkserver_address)


def share_server(address: str) -> None:
    """In a process that the server forked: fork from the same one, not from one of its own."""
    own: Any = forkserver._forkserver
    own._forkserver_address = address
    own.ensure_running = forkserver.ensure_running = lambda: None


def hear_signals() -> None:
    """In a process that is no rank: be as one that was started from a terminal."""
    # The tests may have been started deaf: by nohup, or behind a shell's `&`.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGTERM})


class Handed:
    """An open file that goes along with the process that it is an argument of."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._descriptor)

    def __setstate__(self, handed: Any) -> None:
        self._descriptor = handed.detach()

    def become(self, descriptor: int) -> None:
        """In the new process: be what it has under this number."""
        os.dup2(self._descriptor, descriptor)
        os.close(self._descriptor)
