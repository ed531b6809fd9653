"""Of every rank that died it stays known why, when, and since when the job goes on without it."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.rank_failures import (
    SAME_MOMENT_S,
    RankFailures,
    add_failures,
    close_failures,
    describe_failures,
    failed_ranks,
    nodes_label,
    open_failed_ranks,
    ranks_label,
)
from pacekeeper.core.incidents.rank_ranges import iter_ranks

KILLED, FAILED = "its process ended by signal 9", "its process ended by exit code 7"


def killed(*ranks: int, reason: str = KILLED) -> dict[int, str]:
    return dict.fromkeys(ranks, reason)


def test_who_dies_of_the_same_at_the_same_moment_is_one_value() -> None:
    first = add_failures((), killed(5), step=3, unix_s=10.0)
    both = add_failures(first, killed(4, 6), step=3, unix_s=10.9)
    assert both == (RankFailures(ranks=((4, 6),), reason=KILLED, step=3, unix_s=10.0),)


def test_another_reason_step_or_moment_is_another_value_in_the_order_it_was_learnt() -> None:
    known = add_failures((), killed(5), step=3, unix_s=10.0)
    known = add_failures(known, killed(1, reason=FAILED), step=3, unix_s=10.0)
    known = add_failures(known, killed(2), step=4, unix_s=10.0)
    known = add_failures(known, killed(3), step=4, unix_s=10.0 + SAME_MOMENT_S)
    assert [one.ranks for one in known] == [((5, 5),), ((1, 1),), ((2, 2),), ((3, 3),)]


def test_only_some_may_be_over_and_who_dies_then_is_not_among_them() -> None:
    known = close_failures(
        add_failures((), killed(*range(8)), 3, 10.0), {1, 2}, unix_s=10.5, step=4
    )
    assert open_failed_ranks(known) == ((0, 0), (3, 7)) and failed_ranks(known) == ((0, 7),)
    assert [(one.ranks, one.closed_step) for one in known if not one.is_open] == [(((1, 2),), 4)]
    more = add_failures(known, killed(9), 3, 10.6)
    assert open_failed_ranks(more) == ((0, 0), (3, 7), (9, 9))


def test_what_is_over_stays_as_it_was() -> None:
    once = close_failures(add_failures((), killed(1), 3, 10.0), {1}, unix_s=11.0, step=4)
    assert close_failures(once, {1}, unix_s=99.0, step=9) == once


def test_one_death_reads_as_ever_and_several_as_several() -> None:
    assert describe_failures(add_failures((), killed(3), 0, 1.0)) == f"rank 3 is dead: {KILLED}"
    several = add_failures((), killed(0, 1, 2, 9), 0, 1.0)
    assert (
        describe_failures(several) == "ranks 0-2 and 9 are dead: their processes ended by signal 9"
    )
    left = add_failures((), killed(2, 3, reason="the others went on without it"), 0, 1.0)
    assert describe_failures(left) == "ranks 2 and 3 are dead: the others went on without them"


def test_the_first_reason_comes_first_and_of_many_the_last_are_counted() -> None:
    known = add_failures((), killed(7), 0, 1.0)
    for code in range(10):
        dead = killed(*range(100 * code, 100 * code + 5), reason=f"its process ended by {code}")
        known = add_failures(known, dead, 0, 1.0 + code)
    text = describe_failures(known)
    assert text.startswith("rank 7 is dead: its process ended by signal 9; ranks 0-4 are dead: ")
    assert text.endswith("; 40 more of 8 other reasons")


def test_who_and_where_in_words() -> None:
    assert (ranks_label(((3, 3),)), ranks_label(((0, 7),))) == ("rank 3", "ranks 0-7")
    assert nodes_label([], 0) == ""
    assert nodes_label(["a"], 1) == "a"
    assert nodes_label(["a", "b", "c"], 3) == "a, b and c"
    assert nodes_label(["a", "b"], 1024) == "a, b and 1,022 more nodes"


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
    known: tuple[RankFailures, ...] = ()
    reasons: dict[int, tuple[str, int, float]] = {}
    over: set[int] = set()
    for dead, step, unix_s, gone in told:
        fresh = {rank: why for rank, why in dead.items() if rank not in reasons}
        known = close_failures(add_failures(known, fresh, step, unix_s), gone, unix_s, step)
        reasons |= {rank: (why, step, unix_s) for rank, why in fresh.items()}
        over |= gone & reasons.keys()
    for rank, (why, step, unix_s) in reasons.items():
        (own,) = [one for one in known if rank in iter_ranks(one.ranks)]
        assert (own.reason, own.step) == (why, step)
        assert abs(own.unix_s - unix_s) < SAME_MOMENT_S
        assert own.is_open == (rank not in over)
    assert set(iter_ranks(failed_ranks(known))) == reasons.keys()
