"""How those that are left go on when state may have lost its last holder: the leader's decision.

Per block the freshest that is left counts: a living replica, then memory, then storage. Without
partial checkpoints a run is exact, so where anything is lost, all go back to one state.
With them experts are of different steps as it is: lost ones alone go back, and nothing that
lives is given up.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.resize.grow import resize
from pacekeeper.core.layout.resize.shrink import RecoveryPlan, ReplicationFloor
from pacekeeper.core.layout.state_owners import NO_SIZES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySources:
    """What there is to go on with beside what ranks hold. `sources`: checkpoints, and memory among
    them, newest first; asked only where they are needed. `is_partial`: experts may be of different
    steps.
    """

    sources: Callable[[], tuple[str, ...]]
    is_partial: bool


def plan_recovery(
    layout: Layout,
    staying: Collection[int],
    *,
    generation: int,
    floor: ReplicationFloor,
    has_begun: bool,
    has_frozen: bool,
    means: RecoverySources,
    state_bytes: Mapping[Block, int] = NO_SIZES,
) -> RecoveryPlan:
    """How the `staying` ranks go on from `layout`; `has_begun`: they hold what the run came to;
    `has_frozen`: they are in the middle of a replay, and hold nothing that is whole; `state_bytes`:
    of each dense block's optimizer state, by which owners are balanced.

    Raises LostStateError where state is lost for good.
    """
    go_on = partial(
        resize, layout, staying, generation=generation, floor=floor, state_bytes=state_bytes
    )
    try:
        if has_frozen:
            raise LostStateError("blocks are frozen while steps of a window are done again")
        paths = () if has_begun else means.sources()
        if not paths:
            return RecoveryPlan(layout=go_on())
    except LostStateError as error:
        paths = means.sources()
        if not paths:
            raise
        if means.is_partial and not has_frozen:
            with contextlib.suppress(LostStateError):  # what is dense has no age of its own
                filled = go_on(are_experts_filled=True)
                _log.warning("%s: lost experts come from a checkpoint", error.what)
                return RecoveryPlan(layout=filled, restore=paths, only_lost=True)
        _log.warning("%s: all go back to the newest checkpoint", error.what)
    return RecoveryPlan(layout=go_on(is_restored=True), restore=paths)
