"""The thread of a store: order, errors, and a limit of each call that starts with the call."""

import asyncio
import threading

import pytest

from pacekeeper.controller.storage.store_thread import StoreThread
from support.controllers import PATIENCE_S


def test_calls_run_in_order_and_their_errors_come_back() -> None:
    ran: list[int] = []

    async def scenario() -> None:
        thread = StoreThread()
        await asyncio.gather(*(thread.run(ran.append, i) for i in range(20)))
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        thread.close()

    asyncio.run(scenario())
    assert ran == list(range(20))


def test_a_call_is_cut_until_it_ends() -> None:
    """The first cut may come before there is a connection."""
    cuts = threading.Semaphore(0)

    async def scenario() -> None:
        thread = StoreThread(0.05, cuts.release)
        for _ in range(3):
            assert await thread.run(cuts.acquire, timeout=PATIENCE_S)
        assert await thread.run(lambda: all(cuts.acquire(timeout=PATIENCE_S) for _ in range(3)))
        thread.close()

    asyncio.run(scenario())


def test_a_call_that_waited_for_another_has_its_whole_limit_and_is_cut() -> None:
    """Counted from the submission, the first cut would be spent on the call before it."""
    cuts = threading.Semaphore(0)
    order: list[str] = []

    def stuck(name: str) -> None:
        assert cuts.acquire(timeout=PATIENCE_S), f"{name} was never cut"
        order.append(name)

    async def scenario() -> None:
        thread = StoreThread(0.05, cuts.release)
        await asyncio.gather(*(thread.run(stuck, name) for name in ("first", "second", "third")))
        thread.close()

    asyncio.run(scenario())
    assert order == ["first", "second", "third"]
