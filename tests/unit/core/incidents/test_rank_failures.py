"""Of every rank that died it stays known why, when, and since when the job goes on without it."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.rank_failures import (
    SAME_MOMENT_S,
    Deaths,
    closed,
    node_text,
    ranks_in,
    sentence,
    waiting,
    who,
    with_more,
)
from pacekeeper.core.incidents.rank_ranges import ranks_of

KILLED, FAILED = "its process ended by signal 9", "its process ended by exit code 7"


def killed(*ranks: int, reason: str = KILLED) -> dict[int, str]:
    return dict.fromkeys(ranks, reason)


def test_who_dies_of_the_same_at_the_same_moment_is_one_value() -> None:
    first = with_more((), killed(5), step=3, unix_s=10.0)
    both = with_more(first, killed(4, 6), step=3, unix_s=10.9)
    assert both == (Deaths(ranks=((4, 6),), reason=KILLED, step=3, unix_s=10.0),)


def test_another_reason_step_or_moment_is_another_value_in_the_order_it_was_learnt() -> None:
    known = with_more((), killed(5), step=3, unix_s=10.0)
    known = with_more(known, killed(1, reason=FAILED), step=3, unix_s=10.0)
    known = with_more(known, killed(2), step=4, unix_s=10.0)
    known = with_more(known, killed(3), step=4, unix_s=10.0 + SAME_MOMENT_S)
    assert [one.ranks for one in known] == [((5, 5),), ((1, 1),), ((2, 2),), ((3, 3),)]


def test_only_some_may_be_over_and_who_dies_then_is_not_among_them() -> None:
    known = closed(with_more((), killed(*range(8)), 3, 10.0), {1, 2}, unix_s=10.5, step=4)
    assert waiting(known) == ((0, 0), (3, 7)) and ranks_in(known) == ((0, 7),)
    assert [(one.ranks, one.closed_step) for one in known if not one.is_open] == [(((1, 2),), 4)]
    more = with_more(known, killed(9), 3, 10.6)
    assert waiting(more) == ((0, 0), (3, 7), (9, 9))


def test_what_is_over_stays_as_it_was() -> None:
    once = closed(with_more((), killed(1), 3, 10.0), {1}, unix_s=11.0, step=4)
    assert closed(once, {1}, unix_s=99.0, step=9) == once


def test_one_death_reads_as_ever_and_several_as_several() -> None:
    assert sentence(with_more((), killed(3), 0, 1.0)) == f"rank 3 is dead: {KILLED}"
    several = with_more((), killed(0, 1, 2, 9), 0, 1.0)
    assert sentence(several) == "ranks 0-2 and 9 are dead: their processes ended by signal 9"
    left = with_more((), killed(2, 3, reason="the others went on without it"), 0, 1.0)
    assert sentence(left) == "ranks 2 and 3 are dead: the others went on without them"


def test_the_first_reason_comes_first_and_of_many_the_last_are_counted() -> None:
    known = with_more((), killed(7), 0, 1.0)
    for code in range(10):
        dead = killed(*range(100 * code, 100 * code + 5), reason=f"its process ended by {code}")
        known = with_more(known, dead, 0, 1.0 + code)
    text = sentence(known)
    assert text.startswith("rank 7 is dead: its process ended by signal 9; ranks 0-4 are dead: ")
    assert text.endswith("; 40 more of 8 other reasons")


def test_who_and_where_in_words() -> None:
    assert (who(((3, 3),)), who(((0, 7),))) == ("rank 3", "ranks 0-7")
    assert node_text([], 0) == ""
    assert node_text(["a"], 1) == "a"
    assert node_text(["a", "b", "c"], 3) == "a, b and c"
    assert node_text(["a", "b"], 1024) == "a, b and 1,022 more nodes"


Moment = tuple[dict[int, str], int, float, set[int]]
moments = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 50), st.sampled_from([KILLED, FAILED]), min_size=1),
        st.integers(0, 2),
        st.floats(0.0, 5.0),
        st.sets(st.integers(0, 50)),
    ),
    max_size=8,
)


@given(moments)
def test_nothing_of_anybody_is_lost(
    told: list[Moment],
) -> None:
    known: tuple[Deaths, ...] = ()
    reasons: dict[int, tuple[str, int, float]] = {}
    over: set[int] = set()
    for dead, step, unix_s, gone in told:
        fresh = {rank: why for rank, why in dead.items() if rank not in reasons}
        known = closed(with_more(known, fresh, step, unix_s), gone, unix_s, step)
        reasons |= {rank: (why, step, unix_s) for rank, why in fresh.items()}
        over |= gone & reasons.keys()
    for rank, (why, step, unix_s) in reasons.items():
        (own,) = [one for one in known if rank in ranks_of(one.ranks)]
        assert (own.reason, own.step) == (why, step)
        assert abs(own.unix_s - unix_s) < SAME_MOMENT_S
        assert own.is_open == (rank not in over)
    assert set(ranks_of(ranks_in(known))) == reasons.keys()
