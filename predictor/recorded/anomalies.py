"""What the analysis of a recorded run returns: anomalies and what-if costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from pacekeeper.core.incidents.findings import Tier

NO_LOSS = 1e-6  # of S above 1: rounding
K = TypeVar("K", int, str)


class AnomalyKind(StrEnum):
    """Kind of anomaly: a fault (compute, link, host) or work that is distributed unevenly."""

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    EXPERT_IMBALANCE = "expert_imbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One finding in a recorded run.

    Attributes:
        rank: the slow rank; None if no single rank is responsible.
        stage: of the rank; None if no stage is responsible.
        slowdown: observed over expected time; for an imbalance, over the time with even work.
        low: lower end of the 95 % confidence interval of `slowdown`.
        high: upper end.
        last_step: None if it lasts to the end of the record.
    """

    kind: AnomalyKind
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
    """How much shorter steps would be: ratios of step times, 1.0 where nothing would be gained.

    `slowdown` is S = step time / ideal step time (Lin et al., OSDI 2025, eq. 1). The maps give S
    with the real times of one part and ideal times of all others.
    """

    slowdown: float
    by_dp: Mapping[int, float] = field(default_factory=dict)
    by_stage: Mapping[int, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)
    worst_workers_share: float = 0.0  # M_W: of the loss, removed by fixing the worst 3 % of ranks
    last_stage_share: float = 0.0  # M_S: of the loss, removed by fixing the last stage
    notes: tuple[str, ...] = ()  # steps that could not be replayed, and why

    def shares(self, parts: Mapping[K, float]) -> dict[K, float]:
        """Return each part's share of the loss: (S of the part - 1) / (S - 1); {} without any loss.

        Parts overlap (a rank belongs to a stage) and mask each other: shares need not sum to 1.
        """
        lost = self.slowdown - 1.0
        if lost <= NO_LOSS:
            return {}
        return {part: (slowdown - 1.0) / lost for part, slowdown in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Result of the analysis of a trace. `what_if` is None if the trace has no timeline."""

    anomalies: tuple[Anomaly, ...]
    what_if: WhatIf | None
    notes: tuple[str, ...] = ()
