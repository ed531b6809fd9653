"""The process that a node's ranks are forked from: it has torch loaded, and outlives signals."""

import multiprocessing
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext


def rank_server() -> ForkServerContext:
    """Start it, deaf to SIGTERM; processes made by what is returned are forked from it.

    Service managers and schedulers send it to the whole group. The ranks follow it in order; if
    their server followed it, the kernel would kill them with it, in mid-step.
    """
    context = multiprocessing.get_context("forkserver")
    # The optimizer imports dynamo at its first step: here once, else in every rank.
    context.set_forkserver_preload(["pacekeeper.trainer.loop", "torch._dynamo"])
    resource_tracker.ensure_running()  # else it is started below, and that unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return context
