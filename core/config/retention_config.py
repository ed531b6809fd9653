"""Settings of how much of the past the controller keeps, table `[retention]`."""

from dataclasses import dataclass

from pacekeeper.core.config.config_checks import at_least, at_most, positive

SHORTEST_STORE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """What is open, ordered or running is kept however old: open incidents, proposals that wait,
    orders that stand, jobs that run. Strikes of devices have rules of their own (90 days)."""

    # Days that the past is kept: closed incidents with their courses, decisions, proposals that
    # are over, layouts that were in force, how fast jobs went.
    history_days: float = 90.0
    # The newest of each that are kept at most.
    incidents: int = 50_000
    decisions: int = 50_000
    proposals: int = 10_000
    layouts: int = 4096
    # Bytes in the store; beyond, the oldest of these go whatever their age. A standby is sent all
    # of them when it begins to follow.
    store_bytes: int = 512 << 20
    # Days, and number, of ended jobs that `pacekeeper status` still shows.
    ended_job_days: float = 3.0
    ended_jobs: int = 512

    def __post_init__(self) -> None:
        positive(self, "history_days", "ended_job_days")
        at_most(self, 36_500.0, "history_days", "ended_job_days")
        at_least(self, 1, "incidents", "decisions", "proposals", "layouts", "ended_jobs")
        at_least(self, SHORTEST_STORE_BYTES, "store_bytes")
