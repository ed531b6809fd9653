"""Gradients of weights that wait: the same values, later, by micro-batch."""

import torch
from torch import nn

from pacekeeper.trainer.parallel.mesh.deferred_weights import DeferredWeights


def test_weights_get_their_gradients_when_they_are_told_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))
    rows = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    expected = []
    for one in rows:
        model.zero_grad()
        model(one).square().sum().backward()
        expected.append([p.grad for p in model.parameters()])
    wanted = [one.grad for one in rows]
    model.zero_grad()
    deferred = DeferredWeights()
    deferred.watch(model)
    deferred.is_on = True
    for number, one in enumerate(rows):
        one.grad = None
        output = model(one)
        deferred.number = number
        output.square().sum().backward()
        assert torch.equal(one.grad, wanted[number])  # type: ignore[arg-type]
        assert all(p.grad is None for p in model.parameters())
    for number in (1, 0):
        model.zero_grad()
        deferred.compute_waiting(number)
        for parameter, gradient in zip(model.parameters(), expected[number], strict=True):
            assert torch.allclose(parameter.grad, gradient)  # type: ignore[arg-type]


def test_what_an_interrupted_step_left_is_dropped() -> None:
    layer, deferred = nn.Linear(2, 2), DeferredWeights()
    deferred.watch(layer)
    deferred.is_on = True
    layer(torch.ones(1, 2)).sum().backward()
    deferred.forget()
    deferred.compute_waiting(0)
    assert layer.weight.grad is None


def test_a_weight_that_is_made_of_a_parameter_gets_its_gradient_later() -> None:
    """As expert biases, which are repeated for each row: the backward pass leaves them alone."""
    parameter, deferred = nn.Parameter(torch.tensor([2.0, 3.0])), DeferredWeights()
    deferred.is_on = True
    rows = torch.ones(2, requires_grad=True)
    output = deferred.run(torch.mul, rows, parameter.square())
    output.sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [4.0, 9.0]
    assert parameter.grad is None
    deferred.compute_waiting(0)
    assert parameter.grad is not None and parameter.grad.tolist() == [4.0, 6.0]


def test_what_is_not_trained_needs_no_backward_pass() -> None:
    deferred = DeferredWeights()
    deferred.is_on = True
    assert not deferred.run(torch.mul, torch.ones(2), torch.ones(2)).requires_grad
