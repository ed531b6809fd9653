"""The spool: bounded, in order, nothing acknowledged is sent again, every drop counted."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.agent.spool import Spool
from pacekeeper.core.reports import NodeReport

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
                report = spool.next()
                if report is not None:
                    assert report.sequence > sent
                    assert report.sequence > acked
                    sent = report.sequence
        assert len(spool) <= capacity
        assert spool.num_dropped <= put
    # What is neither acknowledged nor dropped comes out again after a reconnect.
    spool.rewind()
    left = []
    while (report := spool.next()) is not None:
        left.append(report.sequence)
    assert left == list(range(put - len(left) + 1, put + 1))
    assert len(left) == len(spool)


def test_drops_are_counted() -> None:
    spool: Spool[NodeReport] = Spool(capacity=2)
    for sequence in range(1, 6):
        spool.put(NodeReport(sequence=sequence, sent_mono_s=0.0))
    assert spool.num_dropped == 3
    first = spool.next()
    assert first is not None and first.sequence == 4
