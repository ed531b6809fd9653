"""Plans that the controller offers, as a rank takes them: read once, and refused if unfit."""

from collections.abc import Callable
from dataclasses import dataclass

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
