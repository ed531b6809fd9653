"""Which layout next, if any - and why. Pure: everything it looks at is in the view.

A ladder of actions, cheapest first: token shares over expert replicas, batch shares, other
replicas. Each rung is priced; the plan with the best gain over the horizon wins, if it pays. Where
none does, replicas move for safety: experts on too few nodes, or where survivors left them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pacekeeper.controller.replica_plan import ReplicaPlan, Wishes, plan_replicas
from pacekeeper.controller.shares import Split, batch_rows
from pacekeeper.controller.spread_floor import SpreadFloor, exposed, num_narrow
from pacekeeper.controller.state import Refusal
from pacekeeper.controller.token_shares import split_layers
from pacekeeper.core.config import PolicyConfig
from pacekeeper.core.findings import Decision, Rung
from pacekeeper.core.layout import ExpertHosts, Layout
from pacekeeper.core.spread import DomainOf
from pacekeeper.core.topology import ModelShape
from pacekeeper.core.transfers import num_expert_copies
from pacekeeper.predictor.cost_model import CostModel
from pacekeeper.predictor.forecast import Forecast, Workload, forecast, replica_s, row_s

COSTLY = (Rung.MOVE_REPLICAS,)  # rungs that a probe must come before
WORTH_SAYING = 0.001  # of a step: below it no layout is called better


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a decision rests on. `slow`: open findings, rank -> slowdown.

    `node_of`: where each rank sits; one that is not named is alone on its node.
    `home`: the layout before the first open finding, None where there is nothing to go back to.
    `step_s`: the measured step under `layout`, 0 where unknown. `steps_since_plan`: steps under it.
    `unread`: slow ranks of which no probe has been read; `refuted`: those whose probe was not slow.
    `is_probing`: a probe is under way, and what is costly waits for it.
    `refusals`: of each kind of plan the last one, and until when such plans wait; `asked_s`: now.
    `is_makeshift`: the layout was made for what is over, so any better one is welcome at once;
    `by_survivors`: it stands where survivors of a death could put it in a hurry.
    """

    layout: Layout
    shape: ModelShape
    model: CostModel | None
    workload: Workload
    slow: Mapping[int, float]
    home: Layout | None
    step_s: float
    steps_since_plan: int
    is_makeshift: bool
    num_load_steps: int
    next_generation: int
    node_of: DomainOf = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    refuted: frozenset[int] = frozenset()
    is_probing: bool = False
    refusals: Mapping[Rung, Refusal] = field(default_factory=dict)
    asked_s: float = 0.0
    by_survivors: bool = False


def decide(view: View, config: PolicyConfig) -> Decision:
    """A plan with its reason and prices, or nothing with the reason.

    No plan takes an expert to fewer nodes than `min_nodes`, or than it is on; who stands on fewer
    after it is said.
    """
    num_ranks = len(view.layout.ranks)
    if len(view.slow) > config.max_acted_ratio * num_ranks:
        return _nothing(
            f"{len(view.slow)} of {num_ranks} ranks are slow: more than max_acted_ratio, a person "
            "must look"
        )
    speeds = {rank: 1.0 / view.slow.get(rank, 1.0) for rank in view.layout.ranks}
    splits = _own_splits(view, view.layout)
    priced_s = _price(view, _as_run(view.layout, splits), speeds, 0.0).step_s
    overhead_s = max(0.0, view.step_s - priced_s)
    floor = SpreadFloor(least=config.min_nodes, domain_of=view.node_of)
    now = _Now(
        speeds=speeds,
        overhead_s=overhead_s,
        current_s=priced_s + overhead_s,
        floor=floor,
        num_narrow=num_narrow(view.layout, floor),
        # What its trainer gives by itself is the best there is, if it knows the speeds.
        splits=splits if speeds == view.layout.speed_by_rank else None,
    )
    decision = _fastest(view, config, now, search := _Search(view, config, now))
    # Other shares alone would make the layout ours, and leave replicas where survivors put them.
    is_hasty = view.by_survivors and decision.rung not in COSTLY
    if is_hasty or (decision.layout is None and now.num_narrow):
        decision = _safer(view, config, now, search, decision.layout or view.layout) or decision
    more = exposed(decision.layout or view.layout, floor) + _refused(view, decision.rung)
    return replace(decision, reason=decision.reason + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """What holds under the present layout. `overhead_s`: of a step, what no forecast explains;
    `num_narrow`: experts below the floor; `splits`: the best over its hosts, where known already.
    """

    speeds: Mapping[int, float]
    overhead_s: float
    current_s: float
    floor: SpreadFloor
    num_narrow: int
    splits: tuple[Split, ...] | None


class _Search:
    """What is dear: found when it is first asked for, and once."""

    def __init__(self, view: View, config: PolicyConfig, now: _Now) -> None:
        self._view, self._config, self._now = view, config, now

    @cached_property
    def splits(self) -> Sequence[Split]:
        """The best shares over the present hosts."""
        view, now = self._view, self._now
        return now.splits or split_layers(view.layout, loads=view.workload.loads, speeds=now.speeds)

    @cached_property
    def replicas(self) -> ReplicaPlan | None:
        """Where experts would better be, None where they are well."""
        view, config, now = self._view, self._config, self._now
        limit = config.max_moved_bytes
        return plan_replicas(
            view.layout,
            self.splits,
            view.workload.loads,
            now.speeds,
            Wishes(
                slots_per_rank=view.shape.slots_per_rank,
                min_hosts=config.min_hosts,
                spread=now.floor,
                row_s=row_s(view.model, view.workload, view.layout),
                replica_s=replica_s(view.model, view.workload, view.layout),
                num_steps=config.horizon_steps,
                move_s=view.shape.expert_bytes * config.move_s_per_byte,
                restart_s=config.restart_s,
                failure_probability=config.failure_probability,
                max_copies=limit // max(1, view.shape.expert_bytes) if limit else None,
            ),
        )


def _fastest(view: View, config: PolicyConfig, now: _Now, search: _Search) -> Decision:
    """The way home, or the plan that gains most."""
    current_s = now.current_s
    home = None if view.slow else view.home
    is_away = home is not None and _is_elsewhere(view.layout, home)
    if home is not None and is_away and not _is_held(view, Rung.RETURN_HOME, home):
        price = _price(view, _as_run(home, _own_splits(view, home)), now.speeds, now.overhead_s)
        # Unless the loads have moved on meanwhile, so that it would be a step back; or it is less
        # safe than what has been mended since.
        is_safe = num_narrow(home, now.floor) <= now.num_narrow
        if is_safe and price.step_s <= current_s * (1.0 + config.min_gain):
            return _go_home(view, home, config, current_s, price)
    min_gain = config.min_gain
    if not view.slow and not view.is_makeshift:
        if view.num_load_steps < config.settle_steps:
            return _nothing("nobody is slow; loads are not settled yet")
        if view.steps_since_plan < config.settle_steps:
            return _nothing("nobody is slow; the present layout is young")
        min_gain = config.rebalance_min_gain
    best = _nothing("no layout is better")
    best_value_s = 0.0
    shares_value_s = 0.0
    for candidate in _candidates(view, now, search):
        rung, layout = candidate.rung, candidate.layout
        price = _price(view, layout, now.speeds, now.overhead_s)
        gain_s = current_s - price.step_s
        cost_s = _cost_s(view, layout, config)
        value_s = gain_s * config.horizon_steps - cost_s
        # A higher rung must be worth the disturbance of moving state: 1 % of the step at least, and
        # more than what the shares in it would bring alone, whoever refused these.
        to_beat_s = max(best_value_s, shares_value_s) if rung in COSTLY else best_value_s
        if rung not in COSTLY:
            shares_value_s = max(shares_value_s, value_s)
        is_worth = value_s > to_beat_s + 0.01 * current_s * config.horizon_steps * bool(to_beat_s)
        is_held = _is_held(view, rung, layout) or (view.is_probing and rung in COSTLY)
        if not is_worth or is_held:
            if best.layout is None and not is_held and gain_s > WORTH_SAYING * current_s:
                best = _nothing(
                    f"a better layout gains {gain_s * config.horizon_steps:.1f} s in "
                    f"{config.horizon_steps} steps and costs {cost_s:.1f} s"
                )
            continue
        if gain_s < min_gain * current_s:
            if best.layout is None:
                best = _nothing(
                    f"the best layout gains {gain_s / current_s:.1%}, less than {min_gain:.0%} of "
                    "a step"
                )
            continue
        best_value_s = value_s
        reason = _reason(view, rung, current_s, price) + candidate.proof
        best = _plan(view, rung, layout, reason, config, current_s, price)
        if rung in COSTLY:
            best = replace(best, unconfirmed=tuple(sorted(view.unread & set(view.slow))))
    return best


def _safer(
    view: View, config: PolicyConfig, now: _Now, search: _Search, shared: Layout
) -> Decision | None:
    """Other replicas for safety: they need not gain time, only not cost much.

    Where experts stand on too few nodes; and after a death, if what is less likely lost until the
    next plan is worth the copies. Batch shares are those of `shared`.
    """
    plan = search.replicas
    if plan is None:
        return None
    layout = replace(
        view.layout,
        generation=view.next_generation,
        experts=plan.experts,
        batch_shares=shared.batch_shares,
        speeds=_slow_speeds(now),
    )
    if _is_held(view, Rung.MOVE_REPLICAS, layout):
        return None
    left = num_narrow(layout, now.floor)
    saved_s = (plan.loss_now - plan.loss) * config.restart_s
    is_worth = view.by_survivors and saved_s > _cost_s(view, layout, config)
    price = _price(view, layout, now.speeds, now.overhead_s)
    is_slower = price.step_s > now.current_s * (1.0 + config.min_gain)
    if is_slower or not (left < now.num_narrow or (left == now.num_narrow and is_worth)):
        return None
    why = (
        f"experts on fewer than {config.min_nodes} nodes: {now.num_narrow} before, {left} after"
        if left < now.num_narrow
        else "survivors put experts where room was: one is lost until the next plan, likelihood "
        f"{plan.loss_now:.2g}, {plan.loss:.2g} after this one"
    )
    reason = f"{why}; a step takes {price.step_s * 1e3:.0f} ms; {plan.proof}"
    return _plan(view, Rung.MOVE_REPLICAS, layout, reason, config, now.current_s, price)


def _is_held(view: View, rung: Rung, layout: Layout) -> bool:
    """Must this plan wait? One of its kind was refused, or just this one under another name."""
    return any(
        refusal.until_s > view.asked_s
        and (kind is rung or replace(layout, generation=refusal.plan.generation) == refusal.plan)
        for kind, refusal in view.refusals.items()
    )


def _refused(view: View, decided: Rung) -> str:
    """What ranks refused and is not offered for that reason, or is now tried again."""
    texts = []
    for kind, refusal in sorted(view.refusals.items()):
        left_s = refusal.until_s - view.asked_s
        if left_s > 0.0:
            texts.append(f"; no {kind} plan for {left_s:.0f} s more: {refusal.text}")
        elif kind is decided:
            texts.append(f"; tried again: {refusal.text}")
    return "".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A layout to be priced, with what is proven of it in words."""

    rung: Rung
    layout: Layout
    proof: str = ""


def _candidates(view: View, now: _Now, search: _Search) -> list[_Candidate]:
    """The rungs of the ladder, each on top of the one before."""
    layout, speeds = view.layout, now.speeds
    rows = batch_rows(view.shape.rows_per_step, {r: speeds[r] for r, _ in layout.batch_shares})
    batch = tuple((rank, count / view.shape.rows_per_step) for rank, count in rows.items())

    def made(
        experts: tuple[tuple[ExpertHosts, ...], ...], shares: tuple[tuple[int, float], ...]
    ) -> Layout:
        return replace(
            layout,
            generation=view.next_generation,
            experts=experts,
            batch_shares=shares,
            speeds=_slow_speeds(now),
        )

    shared = tuple(split.hosts for split in search.splits)
    candidates = [
        _Candidate(rung=Rung.TOKEN_SHARES, layout=made(shared, layout.batch_shares)),
        _Candidate(rung=Rung.BATCH_SHARES, layout=made(shared, batch)),
    ]
    # State is moved for nobody whose device is well by the probe: shares are, they cost nothing.
    if not view.refuted & set(view.slow) and (plan := search.replicas):
        candidates.append(
            _Candidate(
                rung=Rung.MOVE_REPLICAS,
                layout=made(plan.experts, batch),
                proof=f"; {plan.proof}",
            )
        )
    return candidates


def _slow_speeds(now: _Now) -> tuple[tuple[int, float], ...]:
    return tuple((rank, speed) for rank, speed in sorted(now.speeds.items()) if speed < 1.0)


def _own_splits(view: View, layout: Layout) -> tuple[Split, ...] | None:
    """What the trainer gives by itself under `layout`: where it splits every step, the best there
    is for the speeds the layout says, whatever the loads were when it was planned.
    """
    if not view.shape.splits_each_step:
        return None
    return split_layers(layout, loads=view.workload.loads, speeds=layout.speed_by_rank)


def _as_run(layout: Layout, splits: tuple[Split, ...] | None) -> Layout:
    if splits is None:
        return layout
    return replace(layout, experts=tuple(split.hosts for split in splits))


def _is_elsewhere(layout: Layout, home: Layout) -> bool:
    """Is there a way home, and are we not there?"""
    here = (layout.experts, layout.batch_shares, layout.speeds)
    return home.ranks == layout.ranks and here != (home.experts, home.batch_shares, home.speeds)


def _go_home(
    view: View, home: Layout, config: PolicyConfig, current_s: float, price: Forecast
) -> Decision:
    """Priced like any plan, but not for its gain: the layout in force was meant to be undone."""
    layout = replace(home, generation=view.next_generation)
    reason = "all findings are over: back to the layout from before the first one"
    return _plan(view, Rung.RETURN_HOME, layout, reason, config, current_s, price)


def _plan(
    view: View,
    rung: Rung,
    layout: Layout,
    reason: str,
    config: PolicyConfig,
    current_s: float,
    price: Forecast,
) -> Decision:
    return Decision(
        rung=rung,
        layout=layout,
        reason=reason,
        current_step_s=current_s,
        planned_step_s=price.step_s,
        fluid_step_s=price.fluid_step_s,
        cost_s=_cost_s(view, layout, config),
        moved_bytes=_moved_bytes(view.layout, layout, view.shape),
    )


def _cost_s(view: View, layout: Layout, config: PolicyConfig) -> float:
    moved_bytes = _moved_bytes(view.layout, layout, view.shape)
    return config.plan_s + moved_bytes * config.move_s_per_byte


def _price(view: View, layout: Layout, speeds: Mapping[int, float], overhead_s: float) -> Forecast:
    return forecast(
        layout, model=view.model, workload=view.workload, speeds=speeds, overhead_s=overhead_s
    )


def _moved_bytes(old: Layout, new: Layout, shape: ModelShape) -> int:
    return num_expert_copies(old, new) * shape.expert_bytes


def _reason(view: View, rung: Rung, current_s: float, price: Forecast) -> str:
    if view.slow:
        who = ", ".join(f"rank {r} is x{s:.2f} slow" for r, s in sorted(view.slow.items()))
    elif view.is_makeshift:
        who = "the present layout was made for what is over"
    else:
        who = "some experts are hot"
    what = {
        Rung.TOKEN_SHARES: "other token shares over the expert replicas",
        Rung.BATCH_SHARES: "other token shares and batch shares",
        Rung.MOVE_REPLICAS: "other expert replicas, token shares and batch shares",
    }[rung]
    return (
        f"{who}: {what} take a step from {current_s * 1e3:.0f} to {price.step_s * 1e3:.0f} ms "
        f"(no layout can be below {price.fluid_step_s * 1e3:.0f} ms)"
    )


def _nothing(reason: str) -> Decision:
    return Decision(rung=Rung.NOTHING, layout=None, reason=reason)
