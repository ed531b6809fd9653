"""Which optimizers treat each expert of a stack alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.parallel.optimizers import require_per_element, states_of

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
optim = torch.optim


class Centred(optim.SGD):
    """Subtracts a tensor's mean gradient first: what a slot gets depends on the other slots."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad -= parameter.grad.mean()
        super().step()


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.1),
        lambda ps: optim.AdamW(ps, foreach=True, amsgrad=True),
        lambda ps: optim.AdamW(ps, fused=True),
        lambda ps: optim.Adam(ps),
        lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: optim.Adagrad(ps),
        lambda ps: optim.RMSprop(ps, momentum=0.5, centered=True),
        lambda ps: optim.NAdam(ps),
        lambda ps: optim.RAdam(ps),
        lambda ps: optim.Adamax(ps),
        lambda ps: optim.Adadelta(ps),
    ],
)
def test_optimizers_that_act_per_element_are_accepted(make: Make) -> None:
    experts = [nn.Parameter(torch.ones(3, 2, 2))]
    require_per_element([make(experts)], experts)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.Adafactor(ps, lr=0.1),
        lambda ps: optim.Muon(ps, lr=0.1),
        lambda ps: optim.LBFGS(ps),
        lambda ps: Centred(ps, lr=0.1),
    ],
)
def test_others_are_rejected_for_experts_and_accepted_for_dense_parameters(make: Make) -> None:
    dense, experts = [nn.Parameter(torch.ones(4, 4))], [nn.Parameter(torch.ones(3, 2, 2))]
    optimizer = make(dense)
    require_per_element([optimizer], experts)
    optimizer.param_groups[0]["params"] = experts
    with pytest.raises(ConfigError):
        require_per_element([optimizer], experts)


def test_neither_a_warm_up_nor_another_group_hides_an_optimizer() -> None:
    first, second = nn.Parameter(torch.ones(3, 2, 2)), nn.Parameter(torch.ones(3, 2, 2))
    slow = Centred([first], lr=1e-13)
    with pytest.raises(ConfigError):
        require_per_element([slow], [first])
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "weight_decay": 0.5}]
    require_per_element([optim.AdamW(groups, lr=0.1)], [first, second])


def test_states_are_the_tensors_with_a_value_per_element() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = optim.AdamW([parameter])
    assert states_of(parameter, [optimizer]) == {}
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    assert sorted(states_of(parameter, [optimizer])) == ["exp_avg", "exp_avg_sq"]
