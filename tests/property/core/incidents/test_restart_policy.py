"""When everything is started again: only when all have ended, and none in a way that forbids it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents.restart_policy import (
    MAX_BACK_OFF_S,
    RESTARTABLE,
    RestartAction,
    back_off_s,
    decide_restart,
    restart_nodes,
)

nodes = st.integers(1, 4)
codes = st.sampled_from([int(code) for code in ExitCode])


@given(nodes, st.data())
def test_all_launchers_that_know_the_same_do_the_same_and_only_the_whole_job_again(
    num_nodes: int, data: st.DataObject
) -> None:
    everyone = st.integers(0, num_nodes - 1)
    ended = data.draw(st.dictionaries(everyone, codes))
    gone = data.draw(st.frozensets(everyone))
    chosen, why = decide_restart(range(num_nodes), ended, gone)
    assert why
    forbids = any(code not in RESTARTABLE for code in ended.values())
    if forbids or gone - set(ended):
        assert chosen is RestartAction.END
    else:
        assert chosen is (RestartAction.AGAIN if len(ended) == num_nodes else RestartAction.WAIT)


@given(nodes, st.data())
def test_more_notices_never_turn_an_end_into_a_restart(num_nodes: int, data: st.DataObject) -> None:
    ended = data.draw(st.dictionaries(st.integers(0, num_nodes - 1), codes))
    more = (
        ended
        | data.draw(
            st.dictionaries(st.integers(0, num_nodes - 1).filter(lambda n: n not in ended), codes)
        )
        if len(ended) < num_nodes
        else ended
    )
    if decide_restart(range(num_nodes), ended, ())[0] is RestartAction.END:
        assert decide_restart(range(num_nodes), more, ())[0] is RestartAction.END


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.NO_QUORUM, ExitCode.CONFIG, ExitCode.DATA])
def test_who_finished_lost_its_quorum_or_can_not_run_starts_nothing(code: ExitCode) -> None:
    assert decide_restart((0, 1), {0: ExitCode.INTERNAL, 1: code}, ())[0] is RestartAction.END


def test_a_launcher_that_told_its_end_and_went_on_is_not_gone() -> None:
    ended = {0: int(ExitCode.INTERNAL), 1: int(ExitCode.LOST_STATE)}
    assert decide_restart((0, 1), ended, {0})[0] is RestartAction.AGAIN


@given(nodes, st.data())
def test_two_sides_that_do_not_see_each_other_never_both_start_again(
    num_nodes: int, data: st.DataObject
) -> None:
    """Each may have gone on to its next life, where the other finds nobody."""
    began = range(num_nodes)
    part = data.draw(st.frozensets(st.sampled_from(began), min_size=1))
    ended = {node: data.draw(codes) for node in began}
    here = data.draw(st.frozensets(st.sampled_from(began)))
    one = restart_nodes(began, part, ended, here)
    other = restart_nodes(began, part, ended, set(began) - here)
    assert not (one and other)
    assert not set(one) & here and all(ended[node] in RESTARTABLE for node in one)


@given(nodes)
def test_who_is_left_starts_again_where_it_has_most_of_the_job(num_nodes: int) -> None:
    began = range(num_nodes)
    ended = dict.fromkeys(began, int(ExitCode.INTERNAL))
    assert restart_nodes(began, began, ended, ()) == tuple(began)
    if num_nodes > 2:
        assert restart_nodes(began, began, ended, {0}) == tuple(began)[1:]
    # The others went on without the last node before: it is not missed, nor is one that joined.
    lone = {0: int(ExitCode.LOST_STATE)}
    assert restart_nodes(began, {0, num_nodes}, lone, set(began) - {0}) == (0,)


@given(nodes, st.data())
def test_nodes_that_have_no_part_in_the_job_change_nothing(
    num_nodes: int, data: st.DataObject
) -> None:
    """They joined, and the others went on without them; or their numbers were never anybody's."""
    mine, strangers = st.integers(0, num_nodes - 1), st.integers(num_nodes, num_nodes + 3)
    ended, gone = data.draw(st.dictionaries(mine, codes)), data.draw(st.frozensets(mine))
    others = data.draw(st.dictionaries(strangers, codes)), data.draw(st.frozensets(strangers))
    with_them = decide_restart(range(num_nodes), ended | others[0], gone | others[1])
    assert with_them == decide_restart(range(num_nodes), ended, gone)


def test_waits_double_up_to_a_limit() -> None:
    assert [back_off_s(n) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert back_off_s(50) == MAX_BACK_OFF_S
