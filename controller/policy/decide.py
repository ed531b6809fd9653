"""Choose the next layout of a job, or none, with the reason.

`decide` prices the candidates of each mitigation level, cheapest level first: token shares over
expert replicas, batch shares, other replicas; in jobs with stages or tensor groups also other runs
of shards, other layers, a rank without work. The plan with the largest gain over the horizon wins
if it passes the checks of `_why_wait` and gains more than `min_gain`. If none does, replicas move
for safety: experts on too few nodes or racks, or as survivors of a failure placed them. The
controller runs it in a thread; it reads only the snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pacekeeper.controller.policy import cordons
from pacekeeper.controller.policy.candidates import CandidateSearch
from pacekeeper.controller.policy.failure_domains import (
    SpreadFloor,
    exposure_of,
    floor_of,
    nodes_without_rack,
    num_narrow,
)
from pacekeeper.controller.policy.partition_inputs import check_live_plan, unreported
from pacekeeper.controller.policy.pricing import Price, Pricing
from pacekeeper.controller.policy.repartition_candidates import Candidate
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import (
    STATE_MOVING_LEVELS,
    ConsideredLayout,
    Decision,
    MitigationLevel,
    NoPlanCode,
    slowdown_text,
)
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.text import format_s

MIN_REPORTED_GAIN = 0.001  # of a step: below it no layout is reported as better
MIN_LEVEL_ADVANTAGE = 0.01  # of a step: what a level must gain beyond the cheaper ones
SAME_TIME = 1e-9  # relative: two forecasts of a step that differ by rounding
CHANGES: Mapping[MitigationLevel, str] = {
    MitigationLevel.TOKEN_SHARES: "other token shares over the expert replicas",
    MitigationLevel.BATCH_SHARES: "other token shares and batch shares",
    MitigationLevel.MOVE_REPLICAS: "other expert replicas, token shares and batch shares",
    MitigationLevel.TENSOR_SHARDS: "other shards in tensor groups, token shares and batch shares",
    MitigationLevel.MOVE_LAYERS: "other stages, shards, expert replicas and shares",
    MitigationLevel.LEAVE_OUT: "work for fewer ranks",
}


def decide(view: PlanningSnapshot, config: PolicyConfig) -> Decision:
    """Choose a plan, or none.

    No plan takes an expert below `min_nodes` nodes or `min_racks` racks, or below the number it is
    on if that is lower; experts that remain below are in the decision's `exposure`.

    Args:
        view: The job's layout, measurements and open findings.
        config: The policy's settings.

    Returns:
        The plan with its reason and prices, or `MitigationLevel.NOTHING` with `no_plan`.
    """
    num_ranks = len(view.layout.ranks)
    if len(view.slow) > config.max_acted_ratio * num_ranks:
        return _nothing(
            NoPlanCode.TOO_MANY_SLOW,
            f"{len(view.slow)} of {num_ranks} ranks are slow, which is more than max_acted_ratio; "
            "an operator must look",
        )
    try:
        pricing = Pricing(view, config)
    except ValueError as error:
        return _nothing(
            NoPlanCode.NOT_PRICEABLE, f"no layout can be compared with the present one: {error}"
        )
    floor = floor_of(view, config)
    now = _Present(
        config=config, pricing=pricing, floor=floor, num_narrow=num_narrow(view.layout, floor)
    )
    if view.approved is not None:
        return _priced_again(view, now, view.approved)
    search = CandidateSearch(view, config, pricing, floor)
    cordoned = _without_cordoned(view, now)
    decision = cordoned if isinstance(cordoned, Decision) else _fastest(view, now, search)
    # Other shares alone would make it a planned layout, with the replicas where survivors put them.
    is_hasty = view.by_survivors and decision.level not in STATE_MOVING_LEVELS
    if is_hasty or (decision.layout is None and now.num_narrow):
        decision = _safer(view, now, search, decision.layout or view.layout) or decision
    exposure = exposure_of(decision.layout or view.layout, floor, nodes_without_rack(view, config))
    more = _backoff_notes(view, decision.level)
    if pricing.problem is not None and (missing := unreported(view, config)):
        more += f"; the job does not report {', '.join(missing)}: priced without"
    if isinstance(cordoned, cordons.KeptAtWork):
        ranks = format_ranks(cordons.cordoned_at_work(view))
        more += f"; ranks {ranks} are cordoned and keep their work: {cordoned.text}"
    if decision.layout is not None and decision.level not in (
        MitigationLevel.RETURN_HOME,
        MitigationLevel.ROLL_BACK,
    ):
        decision = replace(decision, layout=cordons.with_standby_speeds(decision.layout, view))
    return replace(decision, reason=decision.reason + more, exposure=exposure)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Present:
    """Prices and spread of the present layout; `num_narrow`: its experts below `floor`."""

    config: PolicyConfig
    pricing: Pricing
    floor: SpreadFloor
    num_narrow: int

    def plan(self, level: MitigationLevel, layout: Layout, reason: str, price: Price) -> Decision:
        """Return a decision for `layout` with its prices."""
        return Decision(
            level=level,
            layout=layout,
            reason=reason,
            current_step_s=self.pricing.current_s,
            planned_step_s=price.step_s,
            fluid_step_s=price.fluid_step_s,
            cost_s=self.pricing.cost_s(layout),
            moved_bytes=self.pricing.moved(layout).total_bytes,
        )


def _without_cordoned(
    view: PlanningSnapshot, now: _Present
) -> Decision | cordons.KeptAtWork | None:
    """Return the plan without cordoned ranks, or why they keep their work; None: none has work."""
    ranks = cordons.cordoned_at_work(view)
    if not ranks:
        return None
    layout = cordons.layout_without_cordoned(view, now.config)
    if isinstance(layout, cordons.KeptAtWork):
        return layout
    if _must_wait(view, MitigationLevel.LEAVE_OUT, layout):
        return cordons.KeptAtWork(
            reason=cordons.KeptReason.LEVEL_WAITS, text="such plans wait after a rejection"
        )
    if unable := _why_unable(view, now, layout):
        return cordons.KeptAtWork(reason=cordons.KeptReason.NOT_ABLE, text=unable)
    price = now.pricing.price(layout)
    reason = (
        f"ranks {format_ranks(ranks)} are cordoned: without them a step goes from "
        f"{format_s(now.pricing.current_s)} to {format_s(price.step_s)}"
    )
    return now.plan(MitigationLevel.LEAVE_OUT, layout, reason, price)


def _fastest(view: PlanningSnapshot, now: _Present, search: CandidateSearch) -> Decision:
    """Return to the baseline layout or roll back if possible, else the plan that gains most."""
    back = _return_to_baseline(view, now) or _roll_back(view, now)
    if back is not None:
        return back
    config = now.config
    min_gain = config.min_gain
    if not view.slow and not view.slow_links and not view.is_provisional:
        if view.num_load_steps < config.settle_steps:
            return _nothing(
                NoPlanCode.LOADS_UNSETTLED, "no rank is slow; expert loads are not settled yet"
            )
        if view.steps_since_plan < config.settle_steps:
            return _nothing(
                NoPlanCode.LAYOUT_TOO_NEW, "no rank is slow; the present layout is too new"
            )
        min_gain = config.rebalance_min_gain
    return _best_of(view, now, search, min_gain)


def _best_of(
    view: PlanningSnapshot, now: _Present, search: CandidateSearch, min_gain: float
) -> Decision:
    """Return the plan of any level that gains most over the horizon, if it gains enough."""
    config, current_s = now.config, now.pricing.current_s
    best = _nothing(NoPlanCode.NO_BETTER_LAYOUT, "no layout is better")
    best_value_s = 0.0
    shares_value_s = 0.0
    priced: list[_Priced] = []
    is_proposed = config.mode == "approve" and config.approve == "moves"
    for candidate in search.candidates():
        level, layout = candidate.level, candidate.layout
        if is_proposed and level in STATE_MOVING_LEVELS and best.layout is not None:
            break  # plans that need no approval come first; the others are proposed after them
        price = now.pricing.price(layout)
        gain_s = current_s - price.step_s
        cost_s = now.pricing.cost_s(layout)
        value_s = gain_s * config.horizon_steps - cost_s
        # A higher level must be worth the disturbance of moving state: 1 % of a step of the best so
        # far, and more than its shares would gain alone, even if plans of shares must wait.
        to_beat_s = (
            max(best_value_s, shares_value_s) if level in STATE_MOVING_LEVELS else best_value_s
        )
        if level not in STATE_MOVING_LEVELS:
            shares_value_s = max(shares_value_s, value_s)
        step_s = best.planned_step_s if best.layout is not None else current_s
        margin_s = MIN_LEVEL_ADVANTAGE * step_s * config.horizon_steps * bool(to_beat_s)
        wait = _why_wait(view, now, candidate, gain_s=gain_s, cost_s=cost_s)
        if wait is None and level is MitigationLevel.LEAVE_OUT:
            wait = _why_unproven(view, now, layout, best.layout or view.layout, cost_s)
        one = _Priced(
            layout=layout,
            price=ConsideredLayout(
                level=level,
                planned_step_s=price.step_s,
                cost_s=cost_s,
                moved_bytes=now.pricing.moved(layout).total_bytes,
                why_not="",
            ),
        )
        if value_s <= to_beat_s + margin_s or wait is not None:
            figures = (
                f"gains {format_s(gain_s * config.horizon_steps)} in {config.horizon_steps} steps "
                f"and costs {format_s(cost_s)}"
            )
            if wait is not None and wait.code is WaitCode.LEVEL_WAITS:
                priced.append(one.rejected(wait.text))
                continue
            if wait is not None:
                priced.append(one.rejected(figures + wait.text))
            elif value_s > 0.0:
                priced.append(one.rejected(f"{figures}; a cheaper plan gains as much"))
            else:
                priced.append(one.rejected(figures))
            if best.layout is None and gain_s > MIN_REPORTED_GAIN * current_s:
                more = "" if wait is None else wait.text
                best = _nothing(NoPlanCode.NOT_PAID_BACK, f"a better layout {figures}{more}")
            continue
        if gain_s < min_gain * current_s:
            less = f"gains {gain_s / current_s:.1%}, less than {min_gain:.0%} of a step"
            priced.append(one.rejected(less))
            if best.layout is None:
                best = _nothing(NoPlanCode.GAIN_TOO_SMALL, f"the best layout {less}")
            continue
        best_value_s = value_s
        priced.append(one)
        best = now.plan(level, layout, _reason(view, now, level, price) + candidate.proof, price)
        if level in STATE_MOVING_LEVELS:
            best = replace(best, unconfirmed=tuple(sorted(view.unprobed & set(view.slow))))
    return replace(best, considered=tuple(one.considered(best.layout) for one in priced))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A candidate with its price, and why it was rejected so far."""

    layout: Layout
    price: ConsideredLayout

    def rejected(self, why: str) -> "_Priced":
        """Return the candidate as rejected for this reason."""
        return replace(self, price=replace(self.price, why_not=why))

    def considered(self, chosen: Layout | None) -> ConsideredLayout:
        """Return the record of the candidate, once it is known which layout was chosen."""
        is_beaten = not self.price.why_not and self.layout is not chosen
        return replace(self.price, why_not="another gains more") if is_beaten else self.price


class WaitCode(StrEnum):
    """Why a candidate is not applied now."""

    LEVEL_WAITS = "level_waits"  # a plan of its level was rejected, denied or rolled back
    CORDONED = "cordoned"  # it gives cordoned ranks more work
    MOVED_BYTES = "moved_bytes"  # it moves more than `max_moved_bytes`
    FEWER_DOMAINS = "fewer_domains"  # it takes experts below the required nodes or racks
    CANNOT_RUN = "cannot_run"  # it exceeds the memory of a device, or has too few rows
    FAULT_MAY_PASS = "fault_may_pass"  # the fault has not cost as much as the move yet
    NOT_PROVEN = "not_proven"  # it pays only if a rank is slower than is certain


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A candidate is not applied now; `text` follows its figures in a reason."""

    code: WaitCode
    text: str


def _why_wait(
    view: PlanningSnapshot, now: _Present, candidate: Candidate, *, gain_s: float, cost_s: float
) -> Wait | None:
    """Return why the candidate cannot be applied now; None: it can.

    A move of layers or shards waits until the fault has cost as much as the move (ski rental: never
    more than twice the optimum, however long the fault lasts).

    Args:
        view: The job.
        now: The present layout.
        candidate: The layout to check.
        gain_s: Seconds that a step gains.
        cost_s: Seconds that the move takes.
    """
    level, layout = candidate.level, candidate.layout
    if _must_wait(view, level, layout):
        return Wait(code=WaitCode.LEVEL_WAITS, text="plans of its kind wait")
    if more := cordons.ranks_given_work(view, layout):
        ranks = format_ranks(more)
        text = f", and gives ranks {ranks}, which are cordoned, more work"
        return Wait(code=WaitCode.CORDONED, text=text)
    if unable := _why_unable(view, now, layout):
        return Wait(code=WaitCode.CANNOT_RUN, text=f"; {unable}")
    if layout.mesh == view.layout.mesh:
        return None
    limit = now.config.max_moved_bytes
    if limit and now.pricing.moved(layout).total_bytes > limit:
        return Wait(code=WaitCode.MOVED_BYTES, text=", and moves more than max_moved_bytes")
    if num_narrow(layout, now.floor) > now.num_narrow:
        text = f", and takes experts to fewer than {now.floor.text}"
        return Wait(code=WaitCode.FEWER_DOMAINS, text=text)
    if view.slow_steps is not None and gain_s * view.slow_steps < cost_s:
        lost_s = max(0.0, gain_s * view.slow_steps)
        text = f"; the fault has cost {format_s(lost_s)} so far: it may pass"
        return Wait(code=WaitCode.FAULT_MAY_PASS, text=text)
    return None


def _why_unable(view: PlanningSnapshot, now: _Present, layout: Layout) -> str:
    """Return why the job cannot follow a layout with other pipelines; empty: it can."""
    known = view.layout.pipelines, view.layout.schedule
    if now.pricing.problem is None or known == (layout.pipelines, layout.schedule):
        return ""
    try:
        check_live_plan(layout, view, now.pricing.problem)
    except ValueError as error:
        return f"the job cannot follow it: {error}"
    return ""


def _why_unproven(
    view: PlanningSnapshot, now: _Present, layout: Layout, kept: Layout, cost_s: float
) -> Wait | None:
    """Return why it is not proven yet that leaving ranks out pays; None: it is.

    It must gain more than it costs if slow ranks are only as slow as is certain.

    Args:
        view: The job.
        now: The present layout.
        layout: The layout with fewer ranks at work.
        kept: The best layout that keeps them; the present one may be better if they are not slow.
        cost_s: Seconds that the move takes.
    """
    left_out = set(layout.standing_by) - set(view.layout.standing_by)
    if unknown := (left_out & view.slow.keys()) - view.slow_at_least.keys():
        ranks = format_ranks(unknown)
        return Wait(code=WaitCode.NOT_PROVEN, text=f"; how slow ranks {ranks} are is not certain")
    cautious = now.pricing.cautious
    kept_s = min(cautious.price(one).step_s for one in (kept, cautious.as_run(view.layout)))
    gain_s = kept_s - cautious.price(layout).step_s
    gain_s *= now.config.horizon_steps
    if gain_s > cost_s:
        return None
    text = f"; it gains {format_s(gain_s)} if they are as slow as is certain"
    return Wait(code=WaitCode.NOT_PROVEN, text=text)


def _priced_again(view: PlanningSnapshot, now: _Present, approved: Decision) -> Decision:
    """Return the approved plan at present prices, if it still pays."""
    layout, level = approved.layout, approved.level
    assert layout is not None, "a plan was approved"
    if level in (MitigationLevel.RETURN_HOME, MitigationLevel.ROLL_BACK):
        back = (
            _return_to_baseline(view, now)
            if level is MitigationLevel.RETURN_HOME
            else _roll_back(view, now)
        )
        if back is None or back.layout != layout:
            return _nothing(
                NoPlanCode.NO_WAY_BACK,
                "priced again, the return is not possible any more, or does not pay",
            )
        return replace(back, reason=f"approved: {back.reason}")
    if cordons.ranks_given_work(view, layout):
        return _nothing(
            NoPlanCode.CORDONED, "it would give work to ranks that have been cordoned since"
        )
    price, cost_s = now.pricing.price(layout), now.pricing.cost_s(layout)
    current_s, num_steps = now.pricing.current_s, now.config.horizon_steps
    gain_s = current_s - price.step_s
    is_gain = gain_s >= now.config.min_gain * current_s and gain_s * num_steps > cost_s
    # A plan for safety need not gain time; it must only not slow the step much.
    is_safer = view.by_survivors or num_narrow(layout, now.floor) < now.num_narrow
    if set(cordons.cordoned_at_work(view)) <= set(layout.standing_by) and cordons.cordoned_at_work(
        view
    ):
        is_gain = True  # a cordon need not gain time
    if not is_gain and not (is_safer and gain_s >= -now.config.min_gain * current_s):
        return _nothing(
            NoPlanCode.NO_LONGER_PAYS,
            f"priced again it gains {format_s(gain_s * num_steps)} in {num_steps} steps and costs "
            f"{format_s(cost_s)}",
        )
    reason = (
        f"approved, and priced again: a step from {format_s(current_s)} to "
        f"{format_s(price.step_s)}; made for: {approved.reason}"
    )
    return now.plan(level, layout, reason, price)


def _return_to_baseline(view: PlanningSnapshot, now: _Present) -> Decision | None:
    """Return to the baseline layout after all findings closed, if no step gets slower by it.

    It need not gain time: the present layout was meant to be temporary. The present schedule is
    kept where the baseline is faster with it.
    """
    if view.slow or view.slow_links or view.baseline is None:
        return None
    homes = (view.baseline, replace(view.baseline, schedule=view.layout.schedule))
    able = [home for home in homes if not _why_unable(view, now, home)]
    baseline = min(able, key=lambda home: now.pricing.price(home).step_s, default=None)
    if baseline is None or not _is_elsewhere(view.layout, baseline):
        return None
    if view.cordoned & set(baseline.working):
        return None
    if _must_wait(view, MitigationLevel.RETURN_HOME, baseline):
        return None
    price = now.pricing.price(now.pricing.as_run(baseline))
    # Not if loads changed so that it is slower by now, or if experts would be spread less.
    is_safe = num_narrow(baseline, now.floor) <= now.num_narrow
    # Layouts that differ by rounding only are equally fast: then the baseline is restored, too.
    tolerance = max(now.config.min_gain, SAME_TIME)
    if not is_safe or price.step_s > now.pricing.current_s * (1.0 + tolerance):
        return None
    layout = replace(baseline, generation=view.next_generation)
    reason = "all findings are closed: back to the layout from before the first one"
    return now.plan(MitigationLevel.RETURN_HOME, layout, reason, price)


def _roll_back(view: PlanningSnapshot, now: _Present) -> Decision | None:
    """Return to the layout before a plan that made no step faster, if that pays as a plan must."""
    if view.history.failed is None or view.history.failed.forecast.plan != view.layout:
        return None
    forecast, config = view.history.failed.forecast, now.config
    if forecast.slow.keys() != view.slow.keys() or forecast.base.ranks != view.layout.ranks:
        return None
    layout = replace(forecast.base, generation=view.next_generation)
    if _must_wait(view, MitigationLevel.ROLL_BACK, layout) or view.cordoned & set(layout.working):
        return None
    if num_narrow(layout, now.floor) > now.num_narrow:
        return None
    gain_s = view.step_s - forecast.before_s
    cost_s = now.pricing.cost_s(layout)
    if gain_s < config.min_gain * view.step_s or gain_s * config.horizon_steps <= cost_s:
        return None
    reason = (
        f"plan {forecast.plan.generation} ({forecast.level}) was forecast to reduce the step time"
        f" from {format_s(forecast.before_s)} to {format_s(forecast.planned_s)}, but it is"
        f" {format_s(view.step_s)}: back to the previous layout"
    )
    fluid_s = now.pricing.price(layout).fluid_step_s
    price = Price(step_s=forecast.before_s, fluid_step_s=fluid_s)
    return replace(
        now.plan(MitigationLevel.ROLL_BACK, layout, reason, price), current_step_s=view.step_s
    )


def _safer(
    view: PlanningSnapshot, now: _Present, search: CandidateSearch, shared: Layout
) -> Decision | None:
    """Move replicas for safety, where that does not slow the step much.

    Applies where experts are on too few nodes or racks; after a failure also where the smaller
    probability of losing an expert is worth the copies. Batch shares are those of `shared`.
    """
    config, pricing, plan = now.config, now.pricing, search.replicas
    if plan is None:
        return None
    layout = search.made(plan.experts, shared)
    if _must_wait(view, MitigationLevel.MOVE_REPLICAS, layout) or cordons.ranks_given_work(
        view, layout
    ):
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
        else "survivors placed experts where slots were free: the probability to lose one until "
        f"the next plan is {plan.loss_now:.2g}, with this plan {plan.loss:.2g}"
    )
    reason = f"{why}; a step takes {format_s(price.step_s)}; {plan.proof}"
    return now.plan(MitigationLevel.MOVE_REPLICAS, layout, reason, price)


def _must_wait(view: PlanningSnapshot, level: MitigationLevel, layout: Layout) -> bool:
    """Whether a plan of this level, or this layout at another level, failed a short time ago."""
    return any(
        refusal.until_s > view.asked_s
        and (kind is level or replace(layout, generation=refusal.plan.generation) == refusal.plan)
        for kind, refusal in view.history.refusals.items()
    )


def _backoff_notes(view: PlanningSnapshot, decided: MitigationLevel) -> str:
    """Describe the levels that wait after a rejection, and a retry of the decided level."""
    texts = []
    for kind, refusal in sorted(view.history.refusals.items()):
        left_s = refusal.until_s - view.asked_s
        if left_s > 0.0:
            texts.append(f"; no {kind} plan for {format_s(left_s)} more: {refusal.text}")
        elif kind is decided:
            texts.append(f"; tried again: {refusal.text}")
    return "".join(texts)


def _is_elsewhere(layout: Layout, baseline: Layout) -> bool:
    """Whether `baseline` has the same ranks and another distribution of work."""
    here = (layout.pipelines, layout.experts, layout.speeds, layout.schedule)
    there = (baseline.pipelines, baseline.experts, baseline.speeds, baseline.schedule)
    return baseline.ranks == layout.ranks and here != there


def _reason(view: PlanningSnapshot, now: _Present, level: MitigationLevel, price: Price) -> str:
    if view.slow:
        cause = ", ".join(
            f"rank {rank} takes {slowdown_text(slowdown)}"
            for rank, slowdown in sorted(view.slow.items())
        )
    elif view.slow_links:
        cause = f"links of ranks {format_ranks(view.slow_links)} are slow"
    elif view.is_provisional:
        cause = "the present layout was made for a finding that is closed"
    else:
        cause = "some experts are hot"
    return (
        f"{cause}: with {CHANGES[level]}, a step takes {format_s(price.step_s)} instead of "
        f"{format_s(now.pricing.current_s)} (no layout can be below "
        f"{format_s(price.fluid_step_s)})"
    )


def _nothing(code: NoPlanCode, reason: str) -> Decision:
    return Decision(level=MitigationLevel.NOTHING, layout=None, reason=reason, no_plan=code)
