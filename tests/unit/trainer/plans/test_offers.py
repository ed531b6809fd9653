"""Plans on offer: read once, refused with a reason, left alone if made for another layout."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.hooks.plan_inbox import PlanOffer
from pacekeeper.trainer.plans.offers import read_offered_plan

FIRST = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=2)


def offer_of(layout: Layout, **changes: Any) -> PlanOffer:
    values = {"generation": layout.generation, "base_generation": 1} | changes
    return PlanOffer(layout_json=encode_layout(layout), **values)


def hooks_with(offer: PlanOffer | None, refused: list[tuple[int, str]]) -> Any:
    return SimpleNamespace(
        offered_plan=lambda: offer,
        refuse_plan=lambda generation, reason: refused.append((generation, reason)),
    )


def test_a_plan_is_read_once() -> None:
    checked: list[Layout] = []
    refused: list[tuple[int, str]] = []
    wanted = replace(FIRST, generation=2)
    hooks = hooks_with(offer_of(wanted), refused)
    plan = read_offered_plan(hooks, FIRST, None, checked.append)
    assert plan is not None and plan.layout == wanted
    assert read_offered_plan(hooks, FIRST, plan, checked.append) is plan
    assert (len(checked), refused) == (1, [])


def test_a_plan_that_does_not_fit_is_refused_with_a_reason() -> None:
    def unfit(_: Layout) -> None:
        raise ValueError("no room")

    other = even_layout(ranks=range(3), num_layers=2, num_experts=4, replicas=2, generation=2)
    cases = (
        (offer_of(replace(FIRST, generation=2), generation=3), lambda _: None),
        (offer_of(other), lambda _: None),
        (offer_of(replace(FIRST, generation=2)), unfit),
    )
    for offer, check in cases:
        refused: list[tuple[int, str]] = []
        assert read_offered_plan(hooks_with(offer, refused), FIRST, None, check) is None
        assert [generation for generation, _ in refused] == [offer.generation]


def test_a_plan_for_another_layout_is_neither_read_nor_refused() -> None:
    refused: list[tuple[int, str]] = []
    stale = offer_of(replace(FIRST, generation=5), base_generation=4)
    for offer in (stale, None):
        assert read_offered_plan(hooks_with(offer, refused), FIRST, None, lambda _: None) is None
    assert refused == []
