"""The emulated links and their injected fault: declared, never hidden, as the emulated device is.

What is moved is really moved; then the rank waits until the modelled time of its bytes has passed
and reports that time. A slow link between two ranks or nodes is the same order to both sides.
"""

import math
import random
from dataclasses import dataclass, field

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.emulation.faults import wait_until
from pacekeeper.trainer.hooks.compute_timers import TransferTimer

LINK_SHARE = 0.02  # of an even step's time goes into timed transfers: less than gloo itself needs


@dataclass(slots=True, kw_only=True)
class EmulatedLinks(TransferTimer):
    """Transfers of an emulated fabric. `slowdown` is the fault: 1.0 = healthy."""

    bytes_per_s: float
    jitter: float
    seed: int
    slowdown: float = 1.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @classmethod
    def calibrated(cls, config: TrainConfig, world_size: int, *, seed: int) -> "EmulatedLinks":
        """Links on which an even share of the dispatched rows takes LINK_SHARE of a step."""
        rows = config.rows_per_step * config.row_tokens * config.experts_per_token // world_size
        moved_bytes = 2.0 * rows * config.num_layers * config.hidden_size * 4.0
        return cls(
            bytes_per_s=moved_bytes / (LINK_SHARE * config.emulated_step_s),
            jitter=config.emulated_jitter,
            seed=seed,
        )

    def _passed_s(self, num_bytes: int, began_s: float) -> float:
        modelled_s = num_bytes / self.bytes_per_s * self.slowdown
        if self.jitter > 0.0:
            modelled_s *= math.exp(self._random.gauss(-(self.jitter**2) / 2, self.jitter))
        wait_until(began_s + modelled_s)
        return modelled_s
