"""A plan that the controller offers, as a rank takes it: read once, and only if it could follow."""

from dataclasses import dataclass

from pacekeeper.core.layout.codec import decode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.toy.engine.job_rules import check_fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout this rank has read and checked, and the name of its content."""

    layout: Layout
    crc: int
    source: bytes


def read_offered_plan(hooks: Hooks, layout: Layout, known: Plan | None) -> Plan | None:
    """The plan on offer for `layout`, or the one that is `known`. One that does not fit is refused,
    with its reason.
    """
    offer = hooks.offered_plan()
    if offer is None or (known is not None and known.source == offer.layout_json):
        return known  # nothing, or read already
    if offer.base_generation != layout.generation:
        return known  # made for another layout: the controller will see ours and think again
    try:
        wanted = decode_layout(offer.layout_json)
        check_fits(wanted, layout, offer.generation)
    except ValueError as error:
        hooks.refuse_plan(offer.generation, str(error))
        return known
    return Plan(layout=wanted, crc=layout_crc(wanted), source=offer.layout_json)
