"""How often agents of a fleet report, and over what time they reconnect, by the fleet's size. Pure.

Sent to each agent in its Welcome, and to all of them when the number of agents changes materially.
"""

from dataclasses import dataclass

MIN_INTERVAL_S = 1.0
AGENTS_PER_S = 2000.0  # routine reports that a controller takes in each second
SPREAD_S_PER_AGENT = 3e-3  # 30 s at 10,000 agents: a reconnect costs about 1 ms of CPU time
MATERIAL_RATIO = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Intervals that agents keep.

    Attributes:
        report_interval_s: Least time between two routine reports of one agent.
        reconnect_spread_s: After a lost stream an agent waits for a uniform random time up to this.
    """

    report_interval_s: float
    reconnect_spread_s: float

    def differs_from(self, other: "Pacing") -> bool:
        """Whether the difference is worth a message to every agent."""
        pairs = (
            (self.report_interval_s, other.report_interval_s),
            (max(1.0, self.reconnect_spread_s), max(1.0, other.reconnect_spread_s)),
        )
        return any(max(pair) > MATERIAL_RATIO * min(pair) for pair in pairs)


def pacing_for(num_agents: int) -> Pacing:
    """The pacing of a fleet of `num_agents` connected agents."""
    return Pacing(
        report_interval_s=max(MIN_INTERVAL_S, num_agents / AGENTS_PER_S),
        reconnect_spread_s=num_agents * SPREAD_S_PER_AGENT,
    )
