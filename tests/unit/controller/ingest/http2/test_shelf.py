"""What waits is counted once, as long as somebody has it, and never more than it may be."""

from pacekeeper.controller.ingest.http2.send_queue import ALWAYS_BYTES, SendBuffer


def test_a_message_counts_as_long_as_any_part_of_it_is_to_be_sent() -> None:
    shelf = SendBuffer(10 * ALWAYS_BYTES)
    message = shelf.put(bytes(3 * ALWAYS_BYTES))
    assert message is not None
    some = [message] * 1000
    rest = memoryview(message)[7:]
    assert shelf.held_bytes == 3 * ALWAYS_BYTES
    del message, some
    assert shelf.held_bytes == 3 * ALWAYS_BYTES
    del rest
    assert shelf.held_bytes == 0


def test_what_finds_no_room_is_left_out_unless_it_is_small() -> None:
    shelf = SendBuffer(4 * ALWAYS_BYTES)
    kept = [shelf.put(bytes(2 * ALWAYS_BYTES)) for _ in range(2)]
    assert shelf.put(bytes(ALWAYS_BYTES + 1)) is None
    assert shelf.held_bytes == 4 * ALWAYS_BYTES
    small = shelf.put(bytes(ALWAYS_BYTES))
    assert small == bytes(ALWAYS_BYTES)
    kept.pop()
    del small
    assert shelf.put(bytes(ALWAYS_BYTES + 1)) is not None
