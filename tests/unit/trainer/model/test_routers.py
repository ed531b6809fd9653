"""Routers by layer, and logits of all experts from what they return."""

import pytest
import torch

from pacekeeper.trainer.model.routers import Router, routers
from pacekeeper.trainer.model.skeleton import ExpertLayer
from support.tiny_models import whole_store

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "afmoe", "minimax_m2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_get_the_logits_by_which_experts_are_selected(family: str) -> None:
    skeleton = whole_store(family).skeleton
    selected: dict[int, torch.Tensor] = {}
    logits: dict[int, torch.Tensor] = {}

    def watch(router: Router, experts: ExpertLayer) -> None:
        def keep_logits(_: object, __: object, output: object) -> None:
            logits[router.layer] = router.logits(output)

        def keep_selected(_: object, given: tuple[torch.Tensor, ...]) -> None:
            selected[experts.layer] = given[1]

        router.module.register_forward_hook(keep_logits)
        experts.module.register_forward_pre_hook(keep_selected)

    for router, experts in zip(routers(skeleton), skeleton.experts, strict=True):
        assert (router is None) == (experts is None)
        if router and experts:
            watch(router, experts)
    skeleton.module(input_ids=torch.arange(3, 23).view(2, 10), use_cache=False)
    assert logits.keys() == selected.keys()
    assert logits
    for layer, of_layer in logits.items():
        assert tuple(of_layer.shape) == (20, 4)
        assert of_layer.requires_grad
        best = of_layer.topk(2, -1).indices.sort(-1).values
        assert torch.equal(best, selected[layer].sort(-1).values)
    assert all(one.scores == (family == "afmoe") for one in routers(skeleton) if one)
