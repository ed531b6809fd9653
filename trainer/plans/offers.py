"""Plans on offer, read once and refused if unfit, and the vote of all ranks on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pacekeeper.core.layout.codec import decode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.hooks.hooks import Hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout this rank has read and checked, and the name of its content."""

    layout: Layout
    crc: int
    source: bytes


def read_offered_plan(
    hooks: Hooks, layout: Layout, known: Plan | None, check: Callable[[Layout], None]
) -> Plan | None:
    """Return the plan on offer for the layout in force; one that does not fit is refused.

    Args:
        hooks: Attachment of this rank.
        layout: The layout in force.
        known: The plan that was read before.
        check: Raises ValueError, with the reason, for a layout that this trainer cannot follow.

    Returns:
        The plan on offer, or `known` if there is none.
    """
    offer = hooks.offered_plan()
    if offer is None or (known is not None and known.source == offer.layout_json):
        return known  # nothing, or read already
    if offer.base_generation != layout.generation:
        return known  # made for another layout: the controller will see ours and think again
    try:
        wanted = decode_layout(offer.layout_json)
        if wanted.generation != offer.generation:
            raise ValueError(f"the file holds generation {wanted.generation}")
        if wanted.ranks != layout.ranks:
            raise ValueError(
                f"the plan is for ranks {wanted.ranks}, the job runs on {layout.ranks}"
            )
        check(wanted)
    except ValueError as error:
        hooks.refuse_plan(offer.generation, str(error))
        return known
    return Plan(layout=wanted, crc=layout_crc(wanted), source=offer.layout_json)


class PlanVote(NamedTuple):
    """The plan that a rank has read and checked, and can apply; (0, 0): none."""

    generation: int = 0
    layout_crc: int = 0


def agreed_generation(votes: Sequence[PlanVote], present: int) -> int | None:
    """Return the generation of the plan that every rank can apply.

    Args:
        votes: Of all ranks. The content counts, not only the number: one number may name two plans
            where a controller was replaced.
        present: The generation in force.

    Returns:
        None if a rank has no plan or another one.
    """
    wanted = votes[0]
    is_new = wanted.generation > present
    return wanted.generation if is_new and all(vote == wanted for vote in votes) else None
