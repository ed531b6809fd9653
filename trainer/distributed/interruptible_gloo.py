"""A gloo group that can be left while it forms: a thread connects it, and may be left with it.

Nothing interrupts gloo in that, and a member that dies in the middle would be waited for until
gloo's own time-out. Torch is told of a group once its members are connected.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

GLOO_TO_LEAVE = "gloo_to_leave"  # the name of the back end
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is to be done while members connect: `is_aborted` is asked every `tick_s`; who gives up
    calls `cut_store`, so that the thread writes nothing there later and waits for nothing.
    """

    is_aborted: Callable[[], bool]
    tick_s: float
    cut_store: Callable[[], None]


def connected(
    store: Store, rank: int, size: int, timeout_s: float, waiting: Waiting
) -> dist.ProcessGroupGloo:
    """Connect the members; `rank` is the place among them. Raises RuntimeError: what gloo says, or
    why it was left.
    """
    made: SimpleQueue[dist.ProcessGroupGloo | RuntimeError] = SimpleQueue()

    def connect() -> None:
        try:
            made.put(dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout_s)))
        except RuntimeError as error:
            made.put(error)

    thread = threading.Thread(target=connect, daemon=True, name="gloo")
    thread.start()
    began_s = looked_s = time.monotonic()
    while True:
        try:
            found = made.get(timeout=_POLL_S)
        except Empty:
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                waiting.cut_store()
                raise RuntimeError("a member does not connect") from None
            if now_s - looked_s >= waiting.tick_s:
                looked_s = now_s
                if waiting.is_aborted():
                    waiting.cut_store()
                    raise RuntimeError("a member is dead") from None
            continue
        thread.join()
        if isinstance(found, RuntimeError):
            raise found
        return found


def _for_torch(wanted: _DistributedBackendOptions, waiting: Waiting) -> dist.ProcessGroupGloo:
    timeout_s = wanted.timeout.total_seconds()
    return connected(wanted.store, wanted.group_rank, wanted.group_size, timeout_s, waiting)


dist.Backend.register_backend(GLOO_TO_LEAVE, _for_torch, extended_api=True, devices=["cpu"])
