"""However late messages come, whoever is frozen or killed, and however clocks drift: at no moment
may two command, a term has one leader, and when the world is kind again somebody leads soon.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.ha import lease
from pacekeeper.controller.ha.lease import Timing
from support.examples import examples
from support.lease_world import DRIFT, TIMING, Chaos, World

CALM_S = 3 * TIMING.duration_s * (1 + DRIFT)
seeds = st.integers(0, 1 << 32)


def played(world: World, until_s: float) -> dict[int, str]:
    """Who commanded in which term; terms only ascend, and nobody shares one."""
    led: dict[int, str] = {}
    terms: dict[str, int] = {}
    left: set[tuple[str, int]] = set()
    for commanders in world.play(until_s):
        for node in world.nodes:
            life, now = node.member.run_id, node.member.term
            before = terms.get(life, 0)
            if before and before != now:
                left.add((life, before))
            assert (life, now) not in left, f"{life} goes on in term {now}, which it had given up"
            terms[life] = now
        assert len(commanders) <= 1, f"at {world.true_s}: {commanders}"
        for life, term in commanders.items():
            assert led.setdefault(term, life) == life, f"term {term} is led twice"
            assert term == max(led), f"term {term} after {max(led)}"
    return led


@settings(max_examples=examples(60))
@given(seeds, st.sampled_from([2, 3, 5]), st.sampled_from([0.0, 0.2, 0.6]))
def test_never_two_and_one_a_term_and_soon_somebody(seed: int, members: int, lost: float) -> None:
    world = World(Random(seed), Chaos(until_s=60.0, lost_ratio=lost), members)
    played(world, 60.0)
    assert played(world, 60.0 + CALM_S), "in a kind world somebody leads"
    assert len(world.commanders()) == 1


def test_the_world_makes_leaders_change() -> None:
    """Else the test above would say little."""
    worlds = (World(Random(seed), Chaos(until_s=60.0)) for seed in range(10))
    assert sum(len(set(played(world, 60.0).values())) - 1 for world in worlds) >= 10


def test_without_a_margin_two_would_command() -> None:
    """The margin bears the drift of clocks: the world finds it out where it is too small."""
    bold = Timing(duration_s=5.0, renew_s=1.0, margin_s=0.01)
    with pytest.raises(AssertionError, match="at "):
        for seed in range(300):
            played(World(Random(seed), Chaos(until_s=60.0), timing=bold), 60.0)


@given(seeds, st.integers(1, lease.FARTHEST_HEARSAY))
def test_a_term_that_somebody_has_seen_is_passed(seed: int, heard: int) -> None:
    world = World(Random(seed), Chaos(until_s=0.0))
    played(world, CALM_S)
    (life,) = world.commanders()
    node = next(one for one in world.nodes if one.member.run_id == life)
    node.member = lease.observe_term(node.member, heard, node.clock_s(world.true_s))
    for commanders in world.play(world.true_s + CALM_S):
        assert len(commanders) <= 1
    assert min(world.commanders().values()) > heard or heard == 1


@settings(max_examples=examples(20))
@given(seeds, st.sampled_from([1, 1000, 1 << 20, 1 << 52, 1 << 64]))
def test_whoever_lies_about_terms_does_not_keep_leaders_from_leading(seed: int, step: int) -> None:
    """An agent always says to have seen a later term: leaders change seldom, and terms last."""
    world = World(Random(seed), Chaos(until_s=0.0))
    played(world, CALM_S)
    led: set[int] = set()
    until_s = world.true_s + 2.5 * lease.HEARSAY_EVERY_S
    for commanders in world.play(until_s):
        led |= set(commanders.values())
        for node in world.nodes:
            if term := commanders.get(node.member.run_id, 0):
                told_s = node.clock_s(world.true_s)
                node.member = lease.observe_term(node.member, term + step, told_s)
    assert len(led) <= 1 + 4 * world.num_members, "each is told a few times in so long"
    assert max(led) <= lease.HIGHEST_TERM
    assert played(world, until_s + CALM_S), "somebody leads on"


def test_a_term_beyond_all_takeovers_is_not_believed() -> None:
    world = World(Random(1), Chaos(until_s=0.0))
    played(world, CALM_S)
    (node,) = (one for one in world.nodes if one.member.term)
    for term in (node.member.term, lease.FARTHEST_HEARSAY + 2, 1 << 63):
        assert lease.observe_term(node.member, term, 1e9) == node.member
