"""However a network breaks, whoever dies, whatever each side knows: one side at most goes on."""

import re
from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.trainer.elastic.agreement import quorum
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP, NO_GROUP, Group
from support.examples import examples


@st.composite
def splits(draw: st.DrawFn) -> tuple[Group, list[set[int]], set[int]]:
    """A group, its living ranks on any number of sides, and those that are dead."""
    ranks = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12)))
    dead = draw(st.sets(st.sampled_from(ranks)))
    sides: dict[int, set[int]] = {}
    for rank in ranks:
        if rank not in dead:
            sides.setdefault(draw(st.integers(0, 4)), set()).add(rank)
    return Group.first(1, tuple(ranks)), list(sides.values()), dead


@settings(max_examples=examples(1000))
@given(splits(), st.data())
def test_at_most_one_side_goes_on_whatever_each_knows_of_the_dead(
    split: tuple[Group, list[set[int]], set[int]], data: st.DataObject
) -> None:
    group, sides, dead = split
    views = [data.draw(st.sets(st.sampled_from(sorted(dead)))) if dead else set() for _ in sides]
    rulings = [
        quorum.decide_quorum(group, side, dict.fromkeys(view, FIRST_GROUP))
        for side, view in zip(sides, views, strict=True)
    ]
    assert sum(ruling.may_continue for ruling in rulings) <= 1


@given(splits())
def test_all_that_live_go_on_together_once_all_the_dead_are_confirmed(
    split: tuple[Group, list[set[int]], set[int]],
) -> None:
    group, sides, dead = split
    living = set().union(*sides)
    assert quorum.decide_quorum(
        group, living, dict.fromkeys(dead, FIRST_GROUP)
    ).may_continue == bool(living)
    known = quorum.decide_quorum(group, living, {})
    assert known.may_continue or 2 * len(living) <= len(group.members)


@pytest.mark.parametrize(
    ("present", "dead", "may_continue", "reason"),
    [
        ({3}, {0, 1, 2}, True, r"ranks 3 are a majority: 1 of 1"),
        ({0, 1}, {}, True, r"ranks 0 and 1 are half, with the lowest: 2 of 4"),
        ({2, 3}, {}, False, r"ranks 2 and 3 are no quorum: 2 of 4 .* 0 and 1 are dead"),
        ({2, 3}, {0}, True, "majority: 2 of 3"),
        ({1, 3}, {0, 2}, True, "majority: 2 of 2"),
        ({1, 2, 3}, {}, True, "majority: 3 of 4"),
        ({0}, {}, False, "1 of 4"),
        ({0}, {1}, False, "1 of 3"),
        ({2}, {0, 1}, True, "half, with the lowest: 1 of 2"),
        ({3}, {0, 1}, False, "1 of 2"),
        (set(), {0, 1, 2, 3}, False, "0 of 0"),
    ],
)
def test_the_rule_in_examples(
    present: set[int], dead: set[int], may_continue: bool, reason: str
) -> None:
    ruling = quorum.decide_quorum(
        Group.first(1, (0, 1, 2, 3)), present, dict.fromkeys(dead, FIRST_GROUP)
    )
    assert ruling.may_continue is may_continue
    assert re.search(reason, ruling.reason), ruling.reason


def test_who_died_on_another_side_still_counts() -> None:
    """0, 1 and 2 went on, then 0 and 1 died: 3 and 4 must not hear of a smaller electorate."""
    first = Group.first(1, (0, 1, 2, 3, 4))
    theirs = first.followed_by(2, (0, 1, 2), "verdict").standing()
    died = {0: theirs.name, 1: theirs.name}
    assert quorum.decide_quorum(theirs, {2}, died).may_continue
    assert not quorum.decide_quorum(first, {3, 4}, died).may_continue
    assert quorum.decide_quorum(first, {3, 4}, {0: FIRST_GROUP, 1: FIRST_GROUP}).may_continue


def test_a_group_that_was_only_tried_elects_nobody() -> None:
    """2 counted for two sides, and followed one: the other one's rest is no majority of its own."""
    first = Group.first(1, (0, 1, 2, 3, 4))
    tried = first.followed_by(2, (2, 3, 4), "verdict")
    assert not quorum.decide_quorum(tried, {3, 4}, {}).may_continue
    assert quorum.decide_quorum(tried.standing(), {3, 4}, {}).may_continue
    assert quorum.decide_quorum(tried, {3, 4}, {2: tried.name}).may_continue is False, (
        "0 and 1 still may live"
    )
    assert quorum.decide_quorum(tried, {3, 4}, {0: FIRST_GROUP, 2: tried.name}).may_continue


def test_newcomers_and_members_need_each_other_until_all_know_that_their_group_stood() -> None:
    """3 to 6 joined 0 to 2 and saw all votes; the others may not have: each might go on alone."""
    first = Group.first(1, (0, 1, 2))
    tried = first.followed_by(2, tuple(range(7)), "verdict")
    assert quorum.decide_quorum(tried, {0, 1, 2}, {}).may_continue, (
        "they are a majority, whatever joined"
    )
    assert not quorum.decide_quorum(tried, {3, 4, 5, 6}, {}).may_continue
    stood = tried.standing()
    assert not quorum.decide_quorum(stood, {3, 4, 5, 6}, {}).may_continue
    assert not quorum.decide_quorum(stood, {0, 1, 2}, {}).may_continue
    assert quorum.decide_quorum(stood, {0, 1, 3, 4}, {}).may_continue
    known = stood.standing()
    assert quorum.decide_quorum(known, {3, 4, 5, 6}, {}).may_continue
    assert not quorum.decide_quorum(known, {0, 1, 2}, {}).may_continue
    assert known.standing() is known


def test_newcomers_that_died_before_they_came_in_are_not_counted() -> None:
    stood = Group.first(1, (0,)).followed_by(2, (0, 1, 2, 3), "verdict").standing()
    assert not quorum.decide_quorum(stood, {0}, {1: FIRST_GROUP}).may_continue
    assert quorum.decide_quorum(stood, {0}, {1: NO_GROUP, 2: stood.name}).may_continue
    assert quorum.decide_quorum(stood, {1, 2, 3}, {0: stood.name}).may_continue, (
        "nobody else can have it"
    )


def test_two_sides_groups_have_two_names() -> None:
    first = Group.first(1, (0, 1, 2))
    names = {
        first.name,
        first.followed_by(2, (0, 1), "a").name,
        first.followed_by(2, (1, 2), "b").name,
        first.followed_by(2, (1, 2), "b").followed_by(2, (1, 2), "b").name,
    }
    assert len(names) == 4


class BrokenNetwork:
    """Ranks that decide, follow, form groups, join and die in any order, by any old partial views.

    Nothing keeps a rank from being counted by two sides, as reports in two stores do. What the
    trainer ensures is all that is ensured here: a rank follows only a verdict on its own group, a
    newcomer the first that it hears of; who is counted has left the group for good, and commits
    nothing more in it; a group stands when all its members are in it at once, and nobody sees a
    second commit before all have seen the first; a notice names the group a rank died in.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        first = Group.first(1, tuple(range(random.randint(2, 6))))
        self.groups = dict.fromkeys(first.members, first)  # each rank's own, as it knows it
        self.waiting = set(range(10, 10 + random.choice([0, 3, 8])))
        self.deaths: dict[int, str] = {}
        self.verdicts: list[tuple[Group, str, Group]] = []  # on which group, its text, what it asks
        self.parents: dict[str, str] = {}
        self.stood = [first.name]
        self.settled = {first.name}  # groups of which all members saw the first commit
        self.been = {first.name: set(first.members)}  # who has been in a group, by its name
        self.left: dict[str, set[int]] = {}  # who has left it, though it may not follow a verdict

    def step(self) -> None:
        actions = [self.decide, self.form, self.follow, self.die, self.tear]
        self.random.choices(actions, [6, 4, 2, 1, 2])[0]()

    def some(self, ranks: Iterable[int]) -> set[int]:
        part = self.random.random()
        return {rank for rank in ranks if self.random.random() < part}

    def decide(self) -> None:
        """Some side of some rank does, if it may; some that wait are to come in."""
        leader = self.random.choice([rank for rank in self.groups if rank not in self.deaths])
        heard = self.some(self.deaths)
        present = (self.some(self.groups[leader].members) | {leader}) - heard
        self.decide_as(leader, present, heard)

    def decide_as(self, leader: int, present: set[int], heard: set[int]) -> None:
        group = self.groups[leader]
        present &= self.been[group.name]
        self.left.setdefault(group.name, set()).update(present)
        if quorum.decide_quorum(
            group, present, {rank: self.deaths[rank] for rank in heard}
        ).may_continue:
            joining = self.some(self.waiting) if self.random.random() < 0.4 else set()
            text = f"{sorted(present)} {sorted(joining)} {self.random.randrange(3)}"
            members = tuple(sorted(present | joining))
            wanted = group.followed_by(group.generation + 1, members, text)
            self.parents[wanted.name] = group.name
            self.verdicts.append((group, text, wanted))

    def tear(self) -> None:
        """The living of the newest group fall into two sides, each of which does what it can."""
        newest = self.verdicts[-1][2] if self.verdicts else next(iter(self.groups.values()))
        here = {r for r, mine in self.groups.items() if mine.name == newest.name}
        here -= set(self.deaths)
        cut = self.random.choice([10, *newest.members])
        one = {rank for rank in here if rank < cut}
        for side in (one, here - one):
            if side:
                self.decide_as(self.random.choice(sorted(side)), side, self.some(self.deaths))
                self.form()

    def follow(self, share: float = 0.5) -> None:
        """Some of those that a verdict counts on, if they can."""
        for on, text, wanted in self.random.choices(self.verdicts[-6:], k=bool(self.verdicts)):
            for rank in wanted.members:
                mine = on if rank in self.waiting else self.groups.get(rank)
                is_able = rank not in self.deaths and mine is not None and mine.name == on.name
                if is_able and mine is not None and self.random.random() < share:
                    self.groups[rank] = mine.followed_by(wanted.generation, wanted.members, text)
                    self.been.setdefault(wanted.name, set()).add(rank)
                    self.waiting.discard(rank)

    def form(self) -> None:
        """All follow, if all can; some get to know that the group stood, or that all know it."""
        self.follow(share=1.0)
        for _, _, wanted in self.verdicts:
            alive = [r for r in wanted.members if r in self.groups and r not in self.deaths]
            names = {self.groups[rank].name for rank in alive}
            left = self.left.get(wanted.name, set())
            if alive == list(wanted.members) and names == {wanted.name} and not left:
                if wanted.name not in self.stood:
                    self.stood.append(wanted.name)
                if all(self.groups[rank].has_stood for rank in alive):
                    self.settled.add(wanted.name)
            for rank in self.some(set(alive) - left):
                mine, done = self.groups[rank], self.settled
                done = done if mine.has_stood else {*self.stood}
                if mine.name == wanted.name and wanted.name in done:
                    self.groups[rank] = mine.standing()

    def die(self) -> None:
        rank = self.random.choice([*self.groups, *sorted(self.waiting)])
        if rank in self.waiting:
            self.waiting.remove(rank)
            self.deaths[rank] = NO_GROUP
        elif len(self.deaths) < len(self.groups) - 1 and rank not in self.deaths:
            self.deaths[rank] = self.groups[rank].name

    def check(self) -> None:
        """Groups that stood follow one another."""
        for earlier, later in pairwise(self.stood):
            name = later
            while name != earlier and name in self.parents:
                name = self.parents[name]
            assert name == earlier, f"{earlier} and {later} both went on"


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, 2**32))
def test_at_most_one_side_goes_on_in_any_order_of_events(seed: int) -> None:
    network = BrokenNetwork(Random(seed))
    for _ in range(120):
        network.step()
    network.check()
    assert len(network.stood) <= len(network.verdicts) + 1


def test_the_broken_network_is_one_where_sides_do_go_on() -> None:
    """Else the property above would say nothing."""
    networks = [BrokenNetwork(Random(seed)) for seed in range(100)]
    for network in networks:
        for _ in range(120):
            network.step()
    assert sum(len(network.stood) for network in networks) > 300
    assert sum(len(network.deaths) for network in networks) > 100
    assert sum(rank >= 10 for network in networks for rank in network.groups) > 100
