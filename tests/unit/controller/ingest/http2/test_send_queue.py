"""What waits for one node: in order, the newest of a kind only, never more than its capacity."""

from pacekeeper.controller.ingest.http2.send_queue import Outbox


def drained(outbox: Outbox, now_s: float = 0.0) -> list[bytes]:
    """What it still holds."""
    return list(iter(lambda: outbox.next(now_s), None))


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


def test_what_may_be_said_no_more_is_left_out() -> None:
    outbox = Outbox()
    outbox.put(b"a/plan", b"a1", 7_000)
    outbox.put(b"b/plan", b"b1")
    assert drained(outbox, 7.001) == [b"b1"]
    outbox.put(b"a/plan", b"a1", 7_000)
    assert drained(outbox, 7.0) == [b"a1"]
