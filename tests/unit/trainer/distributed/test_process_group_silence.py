"""Who is silent in a collective, by the clock of who waits, which may have been stopped itself."""

from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from pacekeeper.trainer.distributed import process_group as fabric_module
from pacekeeper.trainer.distributed.collectives import PeerLost
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup

TIMEOUT_S, TICK_S, STOPPED_FOR_S = 30.0, 0.1, 600.0


class Collective:
    """Ends after so many looks, in the first of which this process is stopped for a while."""

    def __init__(self, ends_after: float, stopped_s: float) -> None:
        self.now_s = 0.0
        self._left, self._stopped_s = ends_after, stopped_s

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, tick: timedelta) -> None:
        if self._left <= 0.0:
            return
        self._left -= 1.0
        self.now_s += tick.total_seconds() + self._stopped_s
        self._stopped_s = 0.0
        raise RuntimeError("Wait timed out")

    def is_completed(self) -> bool:
        return False


def wait_for(collective: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_module, "time", collective)
    fabric: Any = object.__new__(InterruptibleProcessGroup)
    fabric.generation, fabric._heard_s = 1, 0.0
    fabric._tick, fabric._timeout_s = timedelta(seconds=TICK_S), TIMEOUT_S
    fabric._is_aborted = lambda: False
    fabric._await(cast(dist.Work, collective))


def test_while_this_process_is_stopped_nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(Collective(ends_after=20, stopped_s=STOPPED_FOR_S), monkeypatch)


@pytest.mark.parametrize("stopped_s", [0.0, STOPPED_FOR_S])
def test_who_stays_silent_for_as_long_as_is_stated_is_lost(
    stopped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    collective = Collective(ends_after=float("inf"), stopped_s=stopped_s)
    with pytest.raises(PeerLost, match="silent for 30 s") as raised:
        wait_for(collective, monkeypatch)
    assert raised.value.is_silence
    waited_s = collective.now_s - stopped_s
    assert TIMEOUT_S - 2 * fabric_module.STOPPED_S < waited_s < TIMEOUT_S + 2.0
