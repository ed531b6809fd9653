"""What an agent sends again is passed over; what it numbered and never sent is counted."""

from pacekeeper.controller.ingest.deduplication import Sequences


def after(*numbers: int, greeting: int = 0) -> Sequences:
    """One life of one agent, all in order."""
    sequences = Sequences()
    sequences.record("n", "life", greeting, is_greeting=True)
    for number in numbers:
        sequences.record("n", "life", number)
    return sequences


def test_reports_in_order_are_all_news() -> None:
    sequences = after(1, 2, 3)
    assert sequences.is_news("n", "life", 4)
    assert (sequences.missed, sequences.repeated) == (0, 0)


def test_what_comes_again_after_a_new_stream_is_passed_over_and_counted() -> None:
    sequences = after(1, 2, 3)
    sequences.record("n", "life", 1, is_greeting=True)  # it never heard that 2 and 3 came
    assert [sequences.is_news("n", "life", number) for number in (2, 3, 4)] == [False, False, True]
    assert (sequences.missed, sequences.repeated) == (0, 2)


def test_a_gap_is_counted_with_what_is_in_it() -> None:
    assert after(1, 2, 6).missed == 3


def test_what_an_agent_gave_up_while_it_was_away_is_missed_once() -> None:
    sequences = after(1, 2)
    sequences.record("n", "life", 7, is_greeting=True)  # 3 to 7 will not come
    sequences.record("n", "life", 8)
    assert sequences.missed == 5


def test_another_life_counts_from_its_greeting_on() -> None:
    sequences = after(1, 2, 3)
    assert sequences.is_news("n", "next", 1)
    sequences.record("n", "next", 0, is_greeting=True)
    sequences.record("n", "next", 1)
    assert (sequences.missed, sequences.repeated) == (0, 0)


def test_nodes_are_told_apart() -> None:
    assert after(1, 2, 3).is_news("other", "life", 1)


def test_the_oldest_is_forgotten_beyond_the_capacity() -> None:
    sequences = Sequences(capacity=2)
    for node in ("a", "b", "a", "c"):
        sequences.record(node, "life", 5)
    assert sequences.is_news("b", "life", 5), "it was taken in longest ago"
    assert not sequences.is_news("a", "life", 5)
