"""To go on from what is not all of one step is never silent."""

import logging
from collections.abc import Callable, Sequence

from pacekeeper.core.manifest import PieceEntry, saved_in
from pacekeeper.trainer.partial_saves import PartialSaves

_log = logging.getLogger(__name__)


def say_lost(
    older: Sequence[PieceEntry],
    step: int,
    num_lost: int,
    partial: PartialSaves,
    note: Callable[[dict[str, object]], None],
    *,
    is_speaker: bool,
) -> None:
    """Note which pieces are of earlier steps than `step`, and what tokens are lost by that.

    `partial` has taken it in; the speaker among the ranks says it in the log, too.
    """
    steps = {entry.piece.block: saved_in(entry.file) for entry in older}
    oldest = min(one.step for one in steps.values() if one is not None)
    plt = partial.plt_of_run(step)
    note(
        {
            "event": "lossy",
            "step": step,
            "older_experts": len(steps),
            "oldest_step": oldest,
            "lost_tokens": num_lost,
            "plt": plt,
        }
    )
    if is_speaker:
        _log.warning(
            "step=%d is restored with loss: %d experts are as at earlier steps, back to %d; "
            "%d of their tokens are lost; with %d restores %.3f %% of the run's (PLT)",
            step,
            len(steps),
            oldest,
            num_lost,
            partial.account.num_faults,
            100.0 * plt,
        )
