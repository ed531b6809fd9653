"""Which layout next, if any - and why. Pure: everything it looks at is in the view.

A ladder of actions, cheapest first: token shares over expert replicas, batch shares, other
replicas; where there are stages or tensor groups also other runs of shards, other layers, a rank
left out. Each rung is priced; the plan with the best gain over the horizon wins, if it pays. Where
none does, replicas move for safety: experts on too few nodes or in too few racks, or where
survivors left them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pacekeeper.controller.policy import cordons
from pacekeeper.controller.policy.candidates import CandidateSearch
from pacekeeper.controller.policy.failure_domains import (
    SpreadFloor,
    exposed,
    floor_of,
    num_narrow,
    untold,
)
from pacekeeper.controller.policy.pricing import Price, Pricing
from pacekeeper.controller.policy.repartition_candidates import Candidate
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import (
    STATE_MOVING_LEVELS,
    ConsideredLayout,
    Decision,
    MitigationLevel,
)
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import Layout

WORTH_SAYING = 0.001  # of a step: below it no layout is called better
WORTH_MORE = 0.01  # of a step: what a rung has to bring beyond the cheaper ones
WHAT: Mapping[MitigationLevel, str] = {
    MitigationLevel.TOKEN_SHARES: "other token shares over the expert replicas",
    MitigationLevel.BATCH_SHARES: "other token shares and batch shares",
    MitigationLevel.MOVE_REPLICAS: "other expert replicas, token shares and batch shares",
    MitigationLevel.TENSOR_SHARDS: "other shards in tensor groups, token shares and batch shares",
    MitigationLevel.MOVE_LAYERS: "other stages, shards, expert replicas and shares",
    MitigationLevel.LEAVE_OUT: "work for fewer ranks",
}


def decide(view: PlanningSnapshot, config: PolicyConfig) -> Decision:
    """A plan with its reason and prices, or nothing with the reason.

    No plan takes an expert to fewer nodes than `min_nodes`, or than it is on, nor so with racks;
    who stands on fewer after it is said.
    """
    num_ranks = len(view.layout.ranks)
    if len(view.slow) > config.max_acted_ratio * num_ranks:
        return _nothing(
            f"{len(view.slow)} of {num_ranks} ranks are slow: more than max_acted_ratio, a person "
            "must look"
        )
    try:
        pricing = Pricing(view, config)
    except ValueError as error:
        return _nothing(f"no layout can be priced beside the present one: {error}")
    floor = floor_of(view, config)
    now = _Now(
        config=config, pricing=pricing, floor=floor, num_narrow=num_narrow(view.layout, floor)
    )
    if view.approved is not None:
        return _priced_again(view, now, view.approved)
    search = CandidateSearch(view, config, pricing, floor)
    decision, kept = _without_cordoned(view, now)
    if decision is None:
        decision = _fastest(view, now, search)
    # Other shares alone would make the layout ours, and leave replicas where survivors put them.
    is_hasty = view.by_survivors and decision.rung not in STATE_MOVING_LEVELS
    if is_hasty or (decision.layout is None and now.num_narrow):
        decision = _safer(view, now, search, decision.layout or view.layout) or decision
    left = exposed(decision.layout or view.layout, floor) + untold(view, config)
    more = _refused(view, decision.rung) + kept
    if decision.layout is not None and decision.rung not in (
        MitigationLevel.RETURN_HOME,
        MitigationLevel.ROLL_BACK,
    ):
        decision = replace(decision, layout=cordons.marked(decision.layout, view))
    return replace(decision, reason=decision.reason + more, exposed=left)


SAME_TIME = 1e-9  # relative: two forecasts of a step that differ by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """What holds under the present layout. `num_narrow`: experts below the floor."""

    config: PolicyConfig
    pricing: Pricing
    floor: SpreadFloor
    num_narrow: int

    def plan(self, rung: MitigationLevel, layout: Layout, reason: str, price: Price) -> Decision:
        """A decision with its prices."""
        return Decision(
            rung=rung,
            layout=layout,
            reason=reason,
            current_step_s=self.pricing.current_s,
            planned_step_s=price.step_s,
            fluid_step_s=price.fluid_step_s,
            cost_s=self.pricing.cost_s(layout),
            moved_bytes=self.pricing.moved(layout).total_bytes,
        )


def _without_cordoned(view: PlanningSnapshot, now: _Now) -> tuple[Decision | None, str]:
    """The plan that leaves cordoned ranks out, or none, and why they keep their work."""
    ranks = cordons.leaving(view)
    if not ranks:
        return None, ""
    who = f"ranks {format_ranks(ranks)} are cordoned"
    layout, why = cordons.left_out(view, now.config)
    if layout is not None and _is_held(view, MitigationLevel.LEAVE_OUT, layout):
        layout, why = None, "such plans wait"
    if layout is None:
        return None, f"; {who} and keep their work: {why}"
    price = now.pricing.price(layout)
    reason = (
        f"{who}: without them a step goes from {now.pricing.current_s * 1e3:.0f} to "
        f"{price.step_s * 1e3:.0f} ms"
    )
    return now.plan(MitigationLevel.LEAVE_OUT, layout, reason, price), ""


def _fastest(view: PlanningSnapshot, now: _Now, search: CandidateSearch) -> Decision:
    """One of the ways back, or the plan that gains most."""
    back = _gone_home(view, now) or _rolled_back(view, now)
    if back is not None:
        return back
    config = now.config
    min_gain = config.min_gain
    if not view.slow and not view.is_makeshift:
        if view.num_load_steps < config.settle_steps:
            return _nothing("nobody is slow; loads are not settled yet")
        if view.steps_since_plan < config.settle_steps:
            return _nothing("nobody is slow; the present layout is young")
        min_gain = config.rebalance_min_gain
    return _best_of(view, now, search, min_gain)


def _best_of(
    view: PlanningSnapshot, now: _Now, search: CandidateSearch, min_gain: float
) -> Decision:
    """Of all rungs the plan that gains most over the horizon, if it gains enough."""
    config, current_s = now.config, now.pricing.current_s
    best = _nothing("no layout is better")
    best_value_s = 0.0
    shares_value_s = 0.0
    priced: list[_Priced] = []
    is_proposed = config.mode == "approve" and config.approve == "moves"
    for candidate in search.candidates():
        rung, layout = candidate.rung, candidate.layout
        if is_proposed and rung in STATE_MOVING_LEVELS and best.layout is not None:
            break  # what needs nobody's word comes first; the others are proposed on top of it
        price = now.pricing.price(layout)
        gain_s = current_s - price.step_s
        cost_s = now.pricing.cost_s(layout)
        value_s = gain_s * config.horizon_steps - cost_s
        # A higher rung must be worth the disturbance of moving state: 1 % of a step of the best so
        # far, and more than what the shares in it would bring alone, whoever refused these.
        to_beat_s = (
            max(best_value_s, shares_value_s) if rung in STATE_MOVING_LEVELS else best_value_s
        )
        if rung not in STATE_MOVING_LEVELS:
            shares_value_s = max(shares_value_s, value_s)
        step_s = best.planned_step_s if best.layout is not None else current_s
        margin_s = WORTH_MORE * step_s * config.horizon_steps * bool(to_beat_s)
        waits = _why_wait(view, now, candidate, gain_s=gain_s, cost_s=cost_s)
        one = _Priced(
            layout=layout,
            told=ConsideredLayout(
                rung=rung,
                planned_step_s=price.step_s,
                cost_s=cost_s,
                moved_bytes=now.pricing.moved(layout).total_bytes,
                why_not="",
            ),
        )
        if value_s <= to_beat_s + margin_s or waits is not None:
            figures = (
                f"gains {gain_s * config.horizon_steps:.1f} s in {config.horizon_steps} steps and "
                f"costs {cost_s:.1f} s"
            )
            is_beaten = waits is None and value_s > 0.0
            held = "; what is cheaper brings as much" if is_beaten else waits or ""
            priced.append(one.passed("plans of its kind wait" if waits == "" else figures + held))
            if best.layout is None and gain_s > WORTH_SAYING * current_s and waits != "":
                best = _nothing(f"a better layout {figures}{waits or ''}")
            continue
        if gain_s < min_gain * current_s:
            less = f"gains {gain_s / current_s:.1%}, less than {min_gain:.0%} of a step"
            priced.append(one.passed(less))
            if best.layout is None:
                best = _nothing(f"the best layout {less}")
            continue
        best_value_s = value_s
        priced.append(one)
        best = now.plan(rung, layout, _reason(view, now, rung, price) + candidate.proof, price)
        if rung in STATE_MOVING_LEVELS:
            best = replace(best, unconfirmed=tuple(sorted(view.unread & set(view.slow))))
    return replace(best, considered=tuple(one.beside(best.layout) for one in priced))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A candidate with its price; `told` says what spoke against it so far."""

    layout: Layout
    told: ConsideredLayout

    def passed(self, why: str) -> "_Priced":
        """It is not taken."""
        return replace(self, told=replace(self.told, why_not=why))

    def beside(self, chosen: Layout | None) -> ConsideredLayout:
        """For people, once it is known which one was taken."""
        is_beaten = not self.told.why_not and self.layout is not chosen
        return replace(self.told, why_not="another gains more") if is_beaten else self.told


def _why_wait(
    view: PlanningSnapshot, now: _Now, candidate: Candidate, *, gain_s: float, cost_s: float
) -> str | None:
    """Why this may not be done now, to be said if not empty; None: it may.

    What moves layers or shards waits until the fault has cost as much as the move (ski rental:
    never more than twice the best, however long it lasts), and takes no expert to fewer nodes.
    """
    rung, layout = candidate.rung, candidate.layout
    if _is_held(view, rung, layout):
        return ""
    if more := cordons.adds_work(view, layout):
        return f", and gives ranks {format_ranks(more)} more work, which are cordoned"
    if layout.stages == view.layout.stages:
        return None
    limit = now.config.max_moved_bytes
    if limit and now.pricing.moved(layout).total_bytes > limit:
        return ", and moves more than max_moved_bytes"
    if num_narrow(layout, now.floor) > now.num_narrow:
        return f", and takes experts to fewer than {now.floor.text}"
    if view.slow_steps is not None and gain_s * view.slow_steps < cost_s:
        lost_s = max(0.0, gain_s * view.slow_steps)
        return f"; the fault has cost {lost_s:.1f} s so far: it may pass"
    return None


def _priced_again(view: PlanningSnapshot, now: _Now, approved: Decision) -> Decision:
    """The approved plan at present prices, if it still does what it was made for."""
    layout, rung = approved.layout, approved.rung
    assert layout is not None, "a plan was approved"
    if rung in (MitigationLevel.RETURN_HOME, MitigationLevel.ROLL_BACK):
        back = (
            _gone_home(view, now)
            if rung is MitigationLevel.RETURN_HOME
            else _rolled_back(view, now)
        )
        if back is None or back.layout != layout:
            return _nothing("priced again, the way back is none any more, or does not pay")
        return replace(back, reason=f"approved: {back.reason}")
    if cordons.adds_work(view, layout):
        return _nothing("it would give work to ranks that are cordoned by now")
    price, cost_s = now.pricing.price(layout), now.pricing.cost_s(layout)
    current_s, num_steps = now.pricing.current_s, now.config.horizon_steps
    gain_s = current_s - price.step_s
    is_gain = gain_s >= now.config.min_gain * current_s and gain_s * num_steps > cost_s
    # What is moved for safety need not gain, only not cost much.
    is_safer = view.by_survivors or num_narrow(layout, now.floor) < now.num_narrow
    if set(cordons.leaving(view)) <= set(layout.standing_by) and cordons.leaving(view):
        is_gain = True  # it need not gain
    if not is_gain and not (is_safer and gain_s >= -now.config.min_gain * current_s):
        return _nothing(
            f"priced again it gains {gain_s * num_steps:.1f} s in {num_steps} steps and costs "
            f"{cost_s:.1f} s"
        )
    reason = (
        f"approved, and priced again: a step from {current_s * 1e3:.0f} to "
        f"{price.step_s * 1e3:.0f} ms; made for: {approved.reason}"
    )
    return now.plan(rung, layout, reason, price)


def _gone_home(view: PlanningSnapshot, now: _Now) -> Decision | None:
    """Priced like any plan, but not for its gain: the layout in force was meant to be undone."""
    home = None if view.slow else view.home
    if home is None or not _is_elsewhere(view.layout, home):
        return None
    if view.cordoned & set(home.working):
        return None
    if _is_held(view, MitigationLevel.RETURN_HOME, home):
        return None
    price = now.pricing.price(now.pricing.as_run(home))
    # Unless the loads have moved on meanwhile, so that it would be a step back; or it is less
    # safe than what has been mended since.
    is_safe = num_narrow(home, now.floor) <= now.num_narrow
    # Layouts that differ by rounding only are equally fast: then the baseline is restored, too.
    tolerance = max(now.config.min_gain, SAME_TIME)
    if not is_safe or price.step_s > now.pricing.current_s * (1.0 + tolerance):
        return None
    layout = replace(home, generation=view.next_generation)
    reason = "all findings are over: back to the layout from before the first one"
    return now.plan(MitigationLevel.RETURN_HOME, layout, reason, price)


def _rolled_back(view: PlanningSnapshot, now: _Now) -> Decision | None:
    """Back from a plan that made nothing faster, if that pays as any plan must."""
    if view.failed is None or view.failed.forecast.plan != view.layout:
        return None
    forecast, config = view.failed.forecast, now.config
    if forecast.slow.keys() != view.slow.keys() or forecast.base.ranks != view.layout.ranks:
        return None
    layout = replace(forecast.base, generation=view.next_generation)
    if _is_held(view, MitigationLevel.ROLL_BACK, layout) or view.cordoned & set(layout.working):
        return None
    if num_narrow(layout, now.floor) > now.num_narrow:
        return None
    gain_s = view.step_s - forecast.before_s
    cost_s = now.pricing.cost_s(layout)
    if gain_s < config.min_gain * view.step_s or gain_s * config.horizon_steps <= cost_s:
        return None
    reason = (
        f"plan {forecast.plan.generation} ({forecast.rung}) was to take a step from"
        f" {forecast.before_s * 1e3:.0f} to {forecast.planned_s * 1e3:.0f} ms and took it to"
        f" {view.step_s * 1e3:.0f} ms: back to the layout before it"
    )
    fluid_s = now.pricing.price(layout).fluid_step_s
    price = Price(step_s=forecast.before_s, fluid_step_s=fluid_s)
    return replace(
        now.plan(MitigationLevel.ROLL_BACK, layout, reason, price), current_step_s=view.step_s
    )


def _safer(
    view: PlanningSnapshot, now: _Now, search: CandidateSearch, shared: Layout
) -> Decision | None:
    """Other replicas for safety: they need not gain time, only not cost much.

    Where experts stand on too few nodes or racks; and after a death, if what is less likely lost
    until the next plan is worth the copies. Batch shares are those of `shared`.
    """
    config, pricing, plan = now.config, now.pricing, search.replicas
    if plan is None:
        return None
    layout = search.made(plan.experts, shared.batch_shares)
    if _is_held(view, MitigationLevel.MOVE_REPLICAS, layout) or cordons.adds_work(view, layout):
        return None
    left = num_narrow(layout, now.floor)
    saved_s = (plan.loss_now - plan.loss) * config.restart_s
    is_worth = view.by_survivors and saved_s > pricing.cost_s(layout)
    price = pricing.price(layout)
    is_slower = price.step_s > pricing.current_s * (1.0 + config.min_gain)
    if is_slower or not (left < now.num_narrow or (left == now.num_narrow and is_worth)):
        return None
    why = (
        f"experts on fewer than {now.floor.text}: {now.num_narrow} before, {left} after"
        if left < now.num_narrow
        else "survivors put experts where room was: one is lost until the next plan, likelihood "
        f"{plan.loss_now:.2g}, {plan.loss:.2g} after this one"
    )
    reason = f"{why}; a step takes {price.step_s * 1e3:.0f} ms; {plan.proof}"
    return now.plan(MitigationLevel.MOVE_REPLICAS, layout, reason, price)


def _is_held(view: PlanningSnapshot, rung: MitigationLevel, layout: Layout) -> bool:
    """Must this plan wait? One of its kind was refused, or just this one under another name."""
    return any(
        refusal.until_s > view.asked_s
        and (kind is rung or replace(layout, generation=refusal.plan.generation) == refusal.plan)
        for kind, refusal in view.refusals.items()
    )


def _refused(view: PlanningSnapshot, decided: MitigationLevel) -> str:
    """What ranks refused and is not offered for that reason, or is now tried again."""
    texts = []
    for kind, refusal in sorted(view.refusals.items()):
        left_s = refusal.until_s - view.asked_s
        if left_s > 0.0:
            texts.append(f"; no {kind} plan for {left_s:.0f} s more: {refusal.text}")
        elif kind is decided:
            texts.append(f"; tried again: {refusal.text}")
    return "".join(texts)


def _is_elsewhere(layout: Layout, home: Layout) -> bool:
    """Is there a way home, and are we not there?"""
    here = (layout.stages, layout.experts, layout.batch_shares, layout.speeds)
    there = (home.stages, home.experts, home.batch_shares, home.speeds)
    return home.ranks == layout.ranks and here != there


def _reason(view: PlanningSnapshot, now: _Now, rung: MitigationLevel, price: Price) -> str:
    if view.slow:
        who = ", ".join(f"rank {r} is x{s:.2f} slow" for r, s in sorted(view.slow.items()))
    elif view.is_makeshift:
        who = "the present layout was made for what is over"
    else:
        who = "some experts are hot"
    return (
        f"{who}: {WHAT[rung]} take a step from {now.pricing.current_s * 1e3:.0f} to "
        f"{price.step_s * 1e3:.0f} ms (no layout can be below {price.fluid_step_s * 1e3:.0f} ms)"
    )


def _nothing(reason: str) -> Decision:
    return Decision(rung=MitigationLevel.NOTHING, layout=None, reason=reason)
