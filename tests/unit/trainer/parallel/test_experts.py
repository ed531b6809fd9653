"""Experts on several ranks compute what one process computes: answers and gradients in float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pacekeeper.core.layout.layout import ExpertReplica, ReplicaSet
from pacekeeper.trainer.groups.group import Group, SingleProcess
from pacekeeper.trainer.hooks import compute_timers
from pacekeeper.trainer.parallel import experts as experts_module
from pacekeeper.trainer.parallel.dispatch_plan import (
    DispatchPlan,
    ReplicaShares,
    plan_dispatch,
)
from pacekeeper.trainer.parallel.experts import ExpertParallel
from pacekeeper.trainer.parallel.gradients.sync import (
    GradientSync,
    StackedExperts,
    replica_buckets,
)
from support.rank_threads import ThreadGroup, run_ranks

NUM_EXPERTS, HIDDEN, INNER, CHOICES = 5, 6, 7, 2
TOKENS = (4, 9, 0)
PLACED: tuple[ReplicaSet, ...] = (
    (ExpertReplica(0, 0.5), ExpertReplica(1, 0.3), ExpertReplica(2, 0.2)),
    (ExpertReplica(1, 1.0),),
    (ExpertReplica(0, 0.25), ExpertReplica(2, 0.75)),
    (ExpertReplica(2, 1.0),),
    (ExpertReplica(0, 1.0), ExpertReplica(1, 0.0)),
)


class Experts(nn.Module):
    """Two stacked matrices with a non-linearity between them."""

    def __init__(self, held: Sequence[int], slots: Sequence[int], num_slots: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        up = torch.randn(NUM_EXPERTS, INNER, HIDDEN, generator=generator, dtype=torch.float64)
        down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator, dtype=torch.float64)
        self.up = nn.Parameter(torch.zeros(num_slots, INNER, HIDDEN, dtype=torch.float64))
        self.down = nn.Parameter(torch.zeros(num_slots, HIDDEN, INNER, dtype=torch.float64))
        with torch.no_grad():
            self.up[list(slots)], self.down[list(slots)] = up[list(held)], down[list(held)]


def grouped(module: nn.Module, rows_RH: Tensor, rows_S: Tensor) -> Tensor:
    assert isinstance(module, Experts)
    parts = rows_RH.split(rows_S.tolist())
    return torch.cat(
        [
            torch.tanh(part @ up.T) @ down.T
            for part, up, down in zip(parts, module.up, module.down, strict=True)
        ]
    )


def routed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, experts and weights of a rank's tokens."""
    generator = torch.Generator().manual_seed(10 + rank)
    count = TOKENS[rank]
    hidden = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(count, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    weights, experts = scores.topk(CHOICES, -1)
    return hidden, experts, weights


def answers_of_one_process() -> tuple[Experts, Tensor, Tensor, Tensor]:
    everything = range(NUM_EXPERTS)
    module = Experts(everything, everything, NUM_EXPERTS)
    hidden, experts, weights = (
        torch.cat(parts) for parts in zip(*map(routed, range(3)), strict=True)
    )
    hidden.requires_grad_()
    weights.requires_grad_()
    total = torch.zeros_like(hidden)
    for choice in range(CHOICES):
        for expert in everything:
            chosen = experts[:, choice] == expert
            answer = torch.tanh(hidden @ module.up[expert].T) @ module.down[expert].T
            total = total + torch.where(chosen[:, None], answer * weights[:, choice, None], 0.0)
    total.square().sum().backward()
    return module, total.detach(), hidden, weights


class Run:
    """One rank: its experts, the experts function and its inputs."""

    def __init__(self, group: Group, placed: Sequence[ReplicaSet]) -> None:
        held = [e for e, on in enumerate(placed) if any(r.rank == group.rank for r in on)]
        # Backwards, and with a free slot in front.
        self.slots = {expert: len(held) - i for i, expert in enumerate(held)}
        self.module = Experts(held, [self.slots[e] for e in held], len(held) + 1)
        self.parallel = ExpertParallel(group=group, compute=grouped)
        shares = ReplicaShares.of(
            placed,
            self.slots,
            ranks=group.ranks,
            rank=group.rank,
            num_slots=len(held) + 1,
            device=torch.device("cpu"),
        )
        self.parallel.set_layer(0, self.module, shares)
        stacked = StackedExperts(
            parameters=list(self.module.parameters()), experts=placed, slots=self.slots
        )
        self.sync = GradientSync(buckets=replica_buckets([stacked], group))

    def forward_backward(
        self, rank: int, call: Callable[..., Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, experts, weights = routed(rank)
        self.parallel.is_idle = not len(hidden)
        if self.parallel.is_idle:
            hidden, experts, weights = routed(0)  # a placeholder, which must not count
        hidden.requires_grad_()
        weights.requires_grad_()
        self.sync.arm()
        function = partial(self.parallel, self.module)
        answers = (call or (lambda f, *given: f(*given)))(function, hidden, experts, weights)
        loss = answers.square().sum() * (0.0 if self.parallel.is_idle else 1.0)
        loss.backward()
        self.sync.finish()
        own = slice(0 if self.parallel.is_idle else None)
        return answers.detach()[own], grad(hidden)[own], grad(weights)[own]


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_ranks_with_replicas_and_one_without_tokens_give_the_gradients_of_one_process(
    is_checkpointed: bool,
) -> None:
    one, total, hidden, weights = answers_of_one_process()

    def work(group: ThreadGroup) -> tuple[Run, Tensor, Tensor, Tensor]:
        run = Run(group, PLACED)
        call = partial(
            checkpoint,
            use_reentrant=False,
            context_fn=run.parallel.checkpoint_contexts,
            early_stop=False,
        )
        return run, *run.forward_backward(group.rank, call if is_checkpointed else None)

    ranks = run_ranks(3, work)
    assert hidden.grad is not None and weights.grad is not None
    answers = [one[1] for one in ranks]
    hiddens, gates = [one[2] for one in ranks], [one[3] for one in ranks]
    assert error(torch.cat(answers), total) < 1e-12
    assert error(torch.cat(hiddens), hidden.grad) < 1e-12
    assert error(torch.cat(gates), weights.grad) < 1e-12
    for run, *_ in ranks:
        for name, parameter in run.module.named_parameters():
            whole = grad(one.get_parameter(name))
            free = set(range(len(parameter))) - set(run.slots.values())
            assert all(not grad(parameter)[slot].any() for slot in free)
            for expert, slot in run.slots.items():
                assert error(grad(parameter)[slot], whole[expert]) < 1e-12
    # Copies of one sum, in one order: equal bit by bit.
    for expert, replicas in enumerate(PLACED):
        first, *others = (
            grad(ranks[r.rank][0].module.up)[ranks[r.rank][0].slots[expert]] for r in replicas
        )
        assert all(torch.equal(first, other) for other in others)
    loads = ranks[0][0].parallel.take_routed_rows()[0]
    chosen = torch.cat([routed(rank)[1].reshape(-1) for rank in range(3)])
    assert torch.equal(loads, torch.bincount(chosen, minlength=NUM_EXPERTS))


class Transfers:
    """Counts the bytes of each transfer."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def begin(self) -> int:
        return len(self.sizes)

    def end(self, began: int, num_bytes: int) -> None:
        assert began == len(self.sizes)
        self.sizes.append(num_bytes)

    def take(self) -> tuple[float | None, int]:
        taken, self.sizes = self.sizes, []
        return (None, sum(taken))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_of_each_layer_one_exchange_is_timed_with_the_bytes_from_and_to_others(
    is_checkpointed: bool,
) -> None:
    homes = (0, 1, 2, 2, 0)
    placed = [(ExpertReplica(home, 1.0),) for home in homes]

    def work(group: ThreadGroup) -> list[int]:
        run = Run(group, placed)
        run.parallel.transfers = transfers = Transfers()
        call = partial(
            checkpoint,
            use_reentrant=False,
            context_fn=run.parallel.checkpoint_contexts,
            early_stop=False,
        )
        run.forward_backward(group.rank, call if is_checkpointed else None)
        return transfers.sizes

    rows = [
        (source, homes[expert])
        for source in range(3)
        for expert in routed(source)[1].reshape(-1).tolist()
    ]
    moved = [
        sum(HIDDEN * 8 for one in rows if rank in one and one[0] != one[1]) for rank in range(3)
    ]
    assert run_ranks(3, work) == [[size] for size in moved]
    assert sum(moved) > 0


def test_one_process_exchanges_with_nobody() -> None:
    placed = [(ExpertReplica(0, 1.0),)] * NUM_EXPERTS
    run = Run(SingleProcess(), placed)
    answers, hidden, _ = run.forward_backward(1)
    _, total, whole, _ = answers_of_one_process()
    part = slice(TOKENS[0], TOKENS[0] + TOKENS[1])
    assert error(answers, total[part]) < 1e-12
    assert whole.grad is not None
    assert error(hidden, whole.grad[part]) < 1e-12


class Watch:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class SlowGroup(SingleProcess):
    """Each collective takes 100 seconds."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def all_gather(self, values: Tensor) -> Tensor:
        self._watch.now_s += 100.0
        return super().all_gather(values)


def test_a_host_that_plans_slowly_and_peers_that_are_late_are_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch()
    monkeypatch.setattr(experts_module, "time", watch)
    monkeypatch.setattr(compute_timers, "time", watch)
    monkeypatch.setattr(Watch, "monotonic", Watch.perf_counter, raising=False)
    planning = plan_dispatch

    def slow_planning(*given: Any) -> DispatchPlan:
        watch.now_s += 10.0
        return planning(*given)

    def slow_experts(module: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        watch.now_s += 1.0
        return grouped(module, rows, counts)

    monkeypatch.setattr(experts_module, "plan_dispatch", slow_planning)
    run = Run(SlowGroup(watch), [(ExpertReplica(0, 1.0),)] * NUM_EXPERTS)
    run.parallel.compute = slow_experts
    run.parallel.clock = clock = compute_timers.WallClock()
    clock.begin()
    run.forward_backward(1)
    ended = clock.end()
    assert ended is not None
    assert (ended.compute_s, ended.wait_s) == (1.0, 110.0)
    assert (run.parallel.take_host_s(), run.parallel.take_host_s()) == (10.0, 0.0)


def grad(tensor: Tensor) -> Tensor:
    """The gradient; of a part that took no part, its rows of it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()
