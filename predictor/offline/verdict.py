"""What a recorded run says: findings with their reasons, and what each cost. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from pacekeeper.core.incidents.findings import Tier

NO_LOSS = 1e-6  # of S above 1: rounding

K = TypeVar("K", int, str)


class TroubleKind(StrEnum):
    """What was wrong: three kinds of fault, three kinds of work that is spread unevenly."""

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    EXPERT_IMBALANCE = "expert_imbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One finding in a recorded run.

    `rank` and `stage` are None where the trouble is nobody's in particular. `slowdown` is observed
    over expected time (for an imbalance: over the time if the work were even), between `low` and
    `high` with 95 % confidence. `last_step`: None while it lasts to the end of the record.
    """

    kind: TroubleKind
    rank: int | None
    stage: int | None
    slowdown: float
    low: float
    high: float
    first_step: int
    tier: Tier
    reason: str
    last_step: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """How much shorter steps would be: ratios of times, 1.0 where nothing would be gained.

    `slowdown` is S = step time / ideal step time (Lin et al., OSDI 2025, eq. 1); the maps give S if
    only that part had its real times and all others ideal ones.
    """

    slowdown: float
    by_dp: Mapping[int, float] = field(default_factory=dict)
    by_stage: Mapping[int, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)
    worst_workers_share: float = 0.0  # M_W: of the loss, removed by mending the worst 3 % of ranks
    last_stage_share: float = 0.0  # M_S: of the loss, removed by mending the last stage
    notes: tuple[str, ...] = ()  # steps that could not be replayed, and why

    def shares(self, parts: Mapping[K, float]) -> dict[K, float]:
        """Of the loss, each part's own: (S of the part - 1) / (S - 1); {} where nothing is lost.

        Parts overlap (a rank is of a stage), and hide each other: shares need not add up to 1.
        """
        lost = self.slowdown - 1.0
        if lost <= NO_LOSS:
            return {}
        return {part: (slowdown - 1.0) / lost for part, slowdown in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All that replay says of a trace; `what_if` is None where it has no timeline."""

    troubles: tuple[Trouble, ...]
    what_if: WhatIf | None
    notes: tuple[str, ...] = ()
