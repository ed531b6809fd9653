"""Divides `peer_timeout_s` of a frozen rank or node among the waits that follow. Pure.

The time-out counts from the freeze to the other ranks' next step. A quarter, at most 2 s, is kept
for fencing and for the next group. Of the rest a quarter, at most 2 s, is for reports of living
ranks, or twice an eighth, at most 5 s, for stores that do not answer. What is left is waited in a
collective or while a group is formed.

A collective counts from the one before it, because a rank may freeze while the others compute, but
at most a quarter of the wait: a rank that was stopped itself must not take its peers for late. A
check that comes more than a second late was a stop of this process and is not counted. Before the
first step 120 s apply, because one node may load what another has in memory. A rank that computes
for longer than the wait counts as frozen.
"""

from dataclasses import dataclass

GOING_ON_S = 2.0  # at most, to end who is fenced, to form the next group and to move in
GRACE_S = 2.0  # at most, for the others' reports after somebody's silence
ANSWER_S = 5.0  # at most, for one answer of a store that is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`timeout_s`: until the others train on; all else is part of it."""

    timeout_s: float

    @property
    def going_on_s(self) -> float:
        """What is kept for all that follows the fence."""
        return min(GOING_ON_S, self.timeout_s / 4)

    @property
    def fenced_s(self) -> float:
        """Until who has given no sign of life is fenced."""
        return self.timeout_s - self.going_on_s

    @property
    def answer_s(self) -> float:
        """For one answer of a store that survivors need: its node is gone then."""
        return min(ANSWER_S, self.fenced_s / 8)

    @property
    def grace_s(self) -> float:
        """For the others to say how far they are, once somebody was silent in a group."""
        return min(GRACE_S, self.fenced_s / 4)

    @property
    def wait_s(self) -> float:
        """For a silent member in a collective, or while a group is formed.

        After it either all can report at once, and one of them is silent; or first the store that
        they report in is, and then those of other nodes, which are all asked together.
        """
        return self.fenced_s - max(self.grace_s, 2.0 * self.answer_s)
