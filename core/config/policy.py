"""Settings of the policy, table `[policy]`: which findings lead to which actions."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pacekeeper.core.config.base import Ratio, Wait, one_of, settings


@settings
class PolicyConfig:
    """When a finding becomes an action."""

    # "act"; "observe": decide and report, but never offer a plan; "approve": propose plans to
    # people and offer those that they approve.
    mode: Annotated[str, one_of("act", "observe", "approve")] = "act"
    # Which plans wait for a person in that mode: "moves" (what copies state or leaves a rank out;
    # shares alone do not wait) or "all".
    approve: Annotated[str, one_of("moves", "all")] = "moves"
    # Seconds that a proposal stands. Nobody answers: it is made anew if it still pays. Denied: its
    # kind waits as long, then twice as long each time (an hour at most, unless this is more).
    approve_within_s: Wait = 900.0
    # Smallest predicted gain (share of the step time) worth a plan.
    min_gain: NonNegativeFloat = 0.05
    # The same while nobody is slow (hot experts only), and steps of loads and layout before that.
    rebalance_min_gain: NonNegativeFloat = 0.08
    settle_steps: NonNegativeInt = 40
    # Steps over which a gain must pay the cost of moving, where the duration is unknown.
    horizon_steps: PositiveInt = 200
    # Seconds one byte of state costs to move (1 / bandwidth), and one plan at the least: until the
    # job's own plans have been measured.
    move_s_per_byte: NonNegativeFloat = 2e-9
    plan_s: NonNegativeFloat = 0.1
    # Least steps between two plans of one job. Raising it damps flapping and delays relief.
    min_steps_between_plans: NonNegativeInt = 3
    # Fewest replica ranks of an expert after any plan.
    min_hosts: PositiveInt = 2
    # Fewest nodes these stand on, where an expert has so many hosts and the job so many nodes.
    min_nodes: PositiveInt = 2
    # The same of racks, where all nodes of the job have told theirs (`rack` of [agent]).
    min_racks: PositiveInt = 2
    # Likelihood that a rank fails before the next plan, until the job's own losses say more, and
    # seconds that a restart costs where an expert is lost with it: what a safer placement is worth.
    failure_probability: Ratio = 0.01
    restart_s: NonNegativeFloat = 600.0
    # Likelihood that a rack fails with all its nodes before the next plan; 0: not known, then only
    # `min_racks` speaks for racks.
    rack_failure_probability: Ratio = 0.0
    # Most bytes of state that one plan may move; 0: as many as pay.
    max_moved_bytes: NonNegativeInt = 0
    # Bytes that a rank may use of its device, for state and activations, where layers and shards
    # move; 0: what ranks report, and no limit for those that report nothing.
    memory_bytes: NonNegativeInt = 0
    # Whether a plan may leave a slow rank without work: it stands by, and comes back when a probe
    # finds it well. Only where that pays even if the rank is just as slow as is certain.
    may_leave_out: bool = True
    # Largest share of a job's ranks that may be acted on at once (circuit breaker).
    max_acted_ratio: PositiveFloat = 0.5
    # Weight of the newest step in the running mean of expert loads.
    load_ema: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
