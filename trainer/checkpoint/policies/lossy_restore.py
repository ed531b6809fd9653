"""To go on from what is not all of one step is never silent."""

import logging
from collections.abc import Callable, Mapping

from pacekeeper.core.layout.layout import Block
from pacekeeper.trainer.checkpoint.policies.partial_experts import PartialSaves

_log = logging.getLogger(__name__)


def say_lost(
    older: Mapping[Block, int],
    step: int,
    num_lost: int,
    order: tuple[float, float],
    partial: PartialSaves,
    note: Callable[[dict[str, object]], None],
    *,
    is_speaker: bool,
) -> None:
    """Note that at `step` blocks are of the `older` steps, and what tokens are lost by that.

    `order`: the least that any order of saves is likely to lose per checkpoint, in tokens, and how
    many times that taking turns is (core/checkpoint/partial_experts.py). `partial` has taken the
    loss in; the speaker among the ranks says it in the log, too.
    """
    oldest, plt = min(older.values()), partial.plt_of_run(step)
    note(
        {
            "event": "lossy",
            "step": step,
            "older_experts": len(older),
            "oldest_step": oldest,
            "lost_tokens": num_lost,
            "plt": plt,
            "least_loss_tokens": order[0],
            "turns_ratio": order[1],
        }
    )
    if is_speaker:
        _log.warning(
            "step=%d is restored with loss: %d experts are as at earlier steps, back to %d; "
            "%d of their tokens are lost; with %d restores %.3f %% of the run's (PLT); "
            "in turn %.2f times as many are likely to be lost as in the best order",
            step,
            len(older),
            oldest,
            num_lost,
            partial.account.num_faults,
            100.0 * plt,
            order[1],
        )
