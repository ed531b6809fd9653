"""What a launcher asks at the two ends of a run of a job, so that another run may follow it."""

from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.distributed.kv_store import Stores


class LauncherRun(Protocol):
    """What is left of a launcher's work when its ranks have ended."""

    run_id: int
    stores: Stores
    stop_asked_s: float  # 0: nobody asked
    is_waiting: bool  # to be let into a job that is running


class LastRung(Protocol):
    """`first_run_id`: of the job, 0 while it has had none (trainer/elastic/restart_policy.py)."""

    first_run_id: int

    def open(self, server: TCPStore) -> None:
        """Before the launchers meet; `server` is this node's store."""

    def end(self, ended: LauncherRun, code: ExitCode) -> None:
        """After this node's ranks ended with `code`, while its store is still there."""
