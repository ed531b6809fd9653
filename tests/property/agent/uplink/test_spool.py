"""The spool: bounded, in order, nothing acknowledged is sent again, every drop counted."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.agent.uplink.spool import Spool
from pacekeeper.core.telemetry.node_report import NodeReport

ACTIONS = st.lists(
    st.one_of(st.just("put"), st.just("next"), st.just("rewind"), st.just("ack")), max_size=80
)


@given(st.integers(1, 8), ACTIONS)
def test_any_history_keeps_order_bound_and_count(capacity: int, actions: list[str]) -> None:
    spool: Spool[NodeReport] = Spool(capacity=capacity)
    put, acked, sent = 0, 0, 0
    for action in actions:
        match action:
            case "put":
                put += 1
                spool.put(NodeReport(sequence=put, sent_mono_s=0.0))
            case "rewind":
                spool.rewind()
                sent = 0
            case "ack":
                acked = max(acked, sent)
                spool.acknowledge(sent)
            case _:
                report = spool.next_unsent()
                if report is not None:
                    assert report.sequence > sent
                    assert report.sequence > acked
                    sent = report.sequence
        assert len(spool) <= capacity
        assert spool.num_dropped <= put
    # What is neither acknowledged nor dropped comes out again after a reconnect.
    spool.rewind()
    left = []
    while (report := spool.next_unsent()) is not None:
        left.append(report.sequence)
    assert left == list(range(put - len(left) + 1, put + 1))
    assert len(left) == len(spool)


def test_a_report_that_was_acknowledged_as_refused_costs_no_other() -> None:
    spool: Spool[NodeReport] = Spool(capacity=4)
    for sequence in (1, 2, 3):
        spool.put(NodeReport(sequence=sequence, sent_mono_s=0.0))
    spool.next_unsent()
    spool.acknowledge(1)
    spool.count_rejected()
    assert (len(spool), spool.num_dropped) == (2, 1)


def test_drops_are_counted() -> None:
    spool: Spool[NodeReport] = Spool(capacity=2)
    for sequence in range(1, 6):
        spool.put(NodeReport(sequence=sequence, sent_mono_s=0.0))
    assert spool.num_dropped == 3
    first = spool.next_unsent()
    assert first is not None and first.sequence == 4


@given(
    st.integers(1, 5),
    st.integers(1, 100),
    st.lists(
        st.integers(0, 60) | st.sampled_from(["next", "ack", "far ack", "rewind"]), max_size=60
    ),
)
def test_a_list_without_bounds_agrees(
    capacity: int, capacity_bytes: int, actions: list[int | str]
) -> None:
    """The twin keeps everything that was put and cuts it to what may be left."""
    spool: Spool[NodeReport] = Spool(capacity=capacity, capacity_bytes=capacity_bytes)
    sizes: dict[int, int] = {}
    waiting: list[int] = []
    cursor = newest_sent = dropped = 0  # cursor: last number handed out on this connection
    for action in actions:
        match action:
            case int():
                sequence = len(sizes) + 1
                sizes[sequence] = action
                spool.put(NodeReport(sequence=sequence, sent_mono_s=0.0), action)
                waiting.append(sequence)
                while len(waiting) > 1 and (
                    len(waiting) > capacity or sum(sizes[n] for n in waiting) > capacity_bytes
                ):
                    waiting.pop(0)
                    dropped += 1
            case "ack" | "far ack":
                spool.acknowledge(cursor if action == "ack" else 10**6)
                upto = cursor if action == "ack" else newest_sent
                waiting = [n for n in waiting if n > upto]
            case "rewind":
                spool.rewind()
                cursor = 0
            case _:
                report = spool.next_unsent()
                left = [n for n in waiting if n > cursor]
                assert (None if report is None else report.sequence) == (left[0] if left else None)
                if report is not None:
                    cursor = report.sequence
                    newest_sent = max(newest_sent, cursor)
        assert (len(spool), spool.num_dropped) == (len(waiting), dropped)
        assert spool.num_bytes == sum(sizes[n] for n in waiting)
        assert spool.settled_sequence == (waiting[0] - 1 if waiting else len(sizes))
