"""Gloo groups that can be left: made anew for each generation, interrupted, and never waited for.

gloo cannot be stopped: `abort` does nothing, and destroying a group joins its threads. What works
without touching a socket: a receive that nobody answers, given 1 ms, times out, and gloo then fails
every connection of the group, so that nothing is written into its tensors any more and members that
wait for this one notice. A transfer that was under way may still hold its thread until gloo's own
timeout.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pacekeeper.trainer.groups.elastic import Backend
from pacekeeper.trainer.groups.waiting import WaitLimits

_UNUSED_TAG = 0x7FFFFFF0
_INTERRUPT_TIME = timedelta(milliseconds=1)
# Of our timeout: gloo's must never end a collective first, and ends what is stuck in the end.
GLOO_TIMEOUT_FACTOR = 2.0


class GlooConnector:
    """Connects by a new process group of gloo."""

    def connect(
        self, store: Store, position: int, size: int, limits: WaitLimits
    ) -> "GlooConnection":
        # A second longer than our own wait: that one says why.
        patience = timedelta(seconds=limits.connect_s + 1.0)
        backend = dist.ProcessGroupGloo(store, position, size, timeout=patience)
        timeout = timedelta(seconds=GLOO_TIMEOUT_FACTOR * limits.timeout_s)
        backend._set_default_timeout(timeout)
        return GlooConnection(backend)


class GlooConnection:
    """A process group of gloo, for one generation."""

    blocks_host = True

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def interrupt(self) -> None:
        fail_connections(self.backend)

    def retire(self, *, is_idle: bool) -> None:
        self.backend = None  # joins threads of gloo that may be stuck until its own timeout


def fail_connections(backend: Backend) -> None:
    """Let gloo fail all connections of a group, from any thread."""
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        try:
            backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_INTERRUPT_TIME)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
