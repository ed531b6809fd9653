"""What waits for one node: in order, the newest of a kind only, never more than its capacity."""

import asyncio

from pacekeeper.controller.outbox import Outbox


def drained(outbox: Outbox) -> list[bytes]:
    """Closes the outbox and reads what it still held."""

    async def read() -> list[bytes]:
        outbox.close()
        messages = []
        while (told := await outbox.get()) is not None:
            messages.append(told[1])
        return messages

    return asyncio.run(read())


def test_a_newer_message_of_the_same_job_and_kind_takes_over() -> None:
    outbox = Outbox()
    outbox.put(b"a/plan", b"a2")
    outbox.put(b"b/plan", b"b7")
    outbox.put(b"a/plan", b"a3")
    assert drained(outbox) == [b"b7", b"a3"]


def test_other_kinds_of_the_same_job_stay() -> None:
    outbox = Outbox()
    outbox.put(b"a/plan", b"a2")
    outbox.put(b"a/deaths", b"a99")
    assert drained(outbox) == [b"a2", b"a99"]


def test_beyond_the_capacity_the_oldest_goes() -> None:
    outbox = Outbox(capacity=3)
    for job in (b"a", b"b", b"c", b"d", b"e"):
        outbox.put(job, job)
    assert drained(outbox) == [b"c", b"d", b"e"]


def test_who_waits_is_woken_by_a_message_and_by_the_end() -> None:
    async def scene() -> None:
        outbox = Outbox()
        waiting = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        outbox.put(b"a/plan", b"a1", 7)
        assert await waiting == (7, b"a1")
        waiting = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        outbox.close()
        assert await waiting is None

    asyncio.run(scene())
