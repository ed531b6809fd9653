"""The process that a node's ranks are forked from: it has torch loaded, and outlives signals."""

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

# The optimizer imports dynamo at its first step: here once, else in every rank.
RANKS_NEED = ("pacekeeper.trainer.engine.train_loop", "torch._dynamo")


def rank_server(loaded: Sequence[str] = RANKS_NEED) -> ForkServerContext:
    """Start it, deaf to signals to end; processes made by what is returned are forked from it.

    Service managers, schedulers and closed terminals send them to the whole group. The ranks follow
    their launcher, in order; if their server followed a signal, the kernel would kill them with it,
    in mid-step. To SIGTERM, by which the launcher asks, a rank opens its ears itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(loaded))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()  # else it is started below, and that unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
