"""Computes a layer's experts on the ranks that hold their replicas.

`ExpertParallel` stands behind the experts interface of the model: the model calls it with the rows
of this rank, it sends each row to a replica of each of its experts, computes the rows that arrive
for the experts held here, and returns the weighted answers. It never looks at the model around it.

Shape suffixes: T tokens, K experts per token, A = T * K assignments, E experts of the layer, W
ranks of the group, R rows received, H hidden size, S slots.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor, nn

from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.compute_timers import SegmentClock, TransferTimer
from pacekeeper.trainer.parallel.dispatch_plan import DispatchPlan, ReplicaShares, plan_dispatch
from pacekeeper.trainer.parallel.row_exchange import exchange_rows, take_rows

T = TypeVar("T")
GroupedForward = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Computes rows [R, H], sorted by slot, with the experts in the slots; int64 rows by slot [S]."""


class NoClock:
    """A clock that measures nothing."""

    def begin(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def end(self) -> None:
        return None


class _Pass(Enum):
    """What a forward pass does with its dispatch plans."""

    ONCE = "once"
    RECORDS = "records"  # inside activation checkpointing: it will be repeated
    REPEATS = "repeats"


@dataclass(kw_only=True, eq=False)
class ExpertParallel:
    """Experts of one rank over all layers.

    Attributes:
        group: Ranks that hold the experts.
        compute: Grouped forward pass of the model's experts.
        dtype: Type of rows and weights in the experts; None: that of the parameters.
        clock: Pauses while rows are planned and exchanged.
        transfers: Times the exchanges that all ranks enter together: those right after they have
            exchanged counts; None: nothing does.
        is_idle: Whether the current micro-batch is a placeholder: this rank has no tokens, and only
            computes rows of others.
    """

    group: Group
    compute: GroupedForward
    dtype: torch.dtype | None = None
    clock: SegmentClock = field(default_factory=NoClock)
    transfers: TransferTimer | None = None
    is_idle: bool = False
    _layers: dict[nn.Module, "_Layer"] = field(default_factory=dict)
    _pass: _Pass = _Pass.ONCE
    _host_s: float = 0.0
    _computed: list[list[int] | int] = field(default_factory=list)
    _chosen: dict[int, Tensor] = field(default_factory=dict)

    def set_layer(self, layer: int, module: nn.Module, shares: ReplicaShares) -> None:
        """Use `shares` in the layer whose stacked experts are in `module`, from now on."""
        num_experts = shares.bounds_WE.shape[1]
        zeros = torch.zeros(num_experts, dtype=torch.int64, device=shares.bounds_WE.device)
        self._layers[module] = _Layer(
            number=layer, shares=shares, routed_E=zeros, own_E=zeros.clone()
        )

    def forget_layers(self) -> None:
        """Compute no layer any more, until they are set."""
        self._layers.clear()

    def take_routed_rows(self) -> dict[int, Tensor]:
        """Return the rows routed to each expert [E] by all ranks, by layer, since the last call."""
        taken = {}
        for layer in self._layers.values():
            taken[layer.number] = layer.routed_E
            layer.routed_E = torch.zeros_like(layer.routed_E)
        return taken

    def take_own_rows(self) -> dict[int, Tensor]:
        """Return the rows routed to each expert [E] by this rank, by layer, since the last call."""
        taken = {}
        for layer in self._layers.values():
            taken[layer.number] = layer.own_E
            layer.own_E = torch.zeros_like(layer.own_E)
        return taken

    def take_chosen(self) -> dict[int, Tensor]:
        """Return the experts of each token [T, K] in the last forward pass, by layer."""
        taken, self._chosen = self._chosen, {}
        return taken

    def take_host_s(self) -> float:
        """Return the host's seconds of planning, without exchanges, since the last call."""
        taken, self._host_s = self._host_s, 0.0
        return taken

    def take_transfers(self) -> tuple[float | None, int]:
        """Return (seconds, bytes) of the timed exchanges since the last call."""
        return (None, 0) if self.transfers is None else self.transfers.take()

    def take_computed_rows(self) -> list[list[int] | int]:
        """Return what was computed here since the last call, by layer and micro-batch.

        Rows of each slot; only their sum where the rows of slots are not in host memory.
        """
        taken, self._computed = self._computed, []
        return taken

    def __call__(
        self, module: nn.Module, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Compute the experts that the router chose; the experts function of the model.

        Args:
            module: Holds the stacked parameters of the layer, [S, ...] each.
            hidden_TH: Rows of this rank.
            experts_TK: Experts of each token, global numbers.
            weights_TK: Weight of each expert's answer.

        Returns:
            [T, H], in the type of `hidden_TH`.
        """
        layer, choices = self._layers[module], experts_TK.shape[1]
        num_tokens = 0 if self.is_idle else len(hidden_TH)
        self.clock.pause()
        plan = self._plan(layer, experts_TK[:num_tokens])
        rows_TH = hidden_TH[:num_tokens].to(self.dtype or hidden_TH.dtype)
        rows_AH = take_rows(rows_TH, plan.sent_from_A, plan.sent_to_A, choices)
        if len(self.group.ranks) == 1:
            self.clock.resume()
            answers_AH = self.compute(module, rows_AH, plan.rows_S)
        else:
            answers_AH = self._computed_elsewhere(module, rows_AH, plan)
        answers_AH = take_rows(answers_AH, plan.sent_to_A, plan.sent_from_A)
        answers_TKH = answers_AH.view(num_tokens, choices, hidden_TH.shape[1])
        sums_TH = (answers_TKH * weights_TK[:num_tokens, :, None]).sum(1).to(hidden_TH.dtype)
        # An idle rank walks the same graph with no rows: its backward pass reaches the exchanges,
        # and repeats checkpointed layers, in the same order as on the other ranks.
        return torch.zeros_like(hidden_TH) + sums_TH.sum() if self.is_idle else sums_TH

    def _computed_elsewhere(self, module: nn.Module, rows_AH: Tensor, plan: DispatchPlan) -> Tensor:
        """Exchange rows, compute those that arrive, and exchange the answers; resume the clock."""
        timer = None if self._pass is _Pass.REPEATS else self.transfers
        began = None if timer is None else timer.begin()
        rows_RH = exchange_rows(rows_AH, self.group, plan.receive, plan.send, self.clock)
        if timer is not None:
            own = self.group.ranks.index(self.group.rank)
            num_rows = len(rows_AH) + len(rows_RH) - plan.send[own] - plan.receive[own]
            timer.end(began, num_rows * rows_AH.shape[1] * rows_AH.element_size())
        self.clock.resume()
        grouped_RH = take_rows(rows_RH, plan.grouped_from_R, plan.grouped_to_R)
        answers_RH = self.compute(module, grouped_RH, plan.rows_S)
        answers_RH = take_rows(answers_RH, plan.grouped_to_R, plan.grouped_from_R)
        self.clock.pause()
        answers_AH = exchange_rows(answers_RH, self.group, plan.send, plan.receive, self.clock)
        self.clock.resume()
        return answers_AH

    def _plan(self, layer: "_Layer", experts_TK: Tensor) -> DispatchPlan:
        if self._pass is _Pass.REPEATS:
            return layer.recorded.popleft()
        began_s = time.perf_counter()
        with torch.no_grad():
            expert_A = experts_TK.reshape(-1)
            # Not bincount, which synchronises the host with the device.
            counts_E = torch.zeros_like(layer.routed_E)
            counts_E.scatter_add_(0, expert_A, torch.ones_like(expert_A))
            counts_WE = self._outside(lambda: self.group.all_gather(counts_E))
            layer.routed_E += counts_WE.sum(0)
            layer.own_E += counts_E
            plan = plan_dispatch(
                expert_A, counts_WE, layer.shares, lambda sizes: self._outside(sizes.tolist)
            )
        self._chosen[layer.number] = experts_TK
        is_on_host = plan.rows_S.device.type == "cpu"
        self._computed.append(plan.rows_S.tolist() if is_on_host else sum(plan.receive))
        if self._pass is _Pass.RECORDS:
            layer.recorded.append(plan)
        self._host_s += time.perf_counter() - began_s
        return plan

    def _outside(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns; its time is the other ranks' or the device's."""
        began_s = time.perf_counter()
        found = wait()
        self._host_s -= time.perf_counter() - began_s
        return found

    def forget(self) -> None:
        """Drop all counts, times and plans since they were taken, as those of an evaluation."""
        for layer in self._layers.values():
            layer.recorded.clear()
        self.take_chosen()
        self.take_routed_rows()
        self.take_own_rows()
        self.take_computed_rows()
        self.take_host_s()
        self.take_transfers()

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a checkpointed forward pass and of its repetition.

        For `context_fn` of torch.utils.checkpoint: plans are not made and exchanged again.
        Micro-batches are repeated in the order of their forward passes.
        """
        return self._passing(_Pass.RECORDS), self._passing(_Pass.REPEATS)

    @contextmanager
    def _passing(self, kind: _Pass) -> Iterator[None]:
        before, self._pass = self._pass, kind
        try:
            yield
        finally:
            self._pass = before


@dataclass(kw_only=True, eq=False)
class _Layer:
    number: int
    shares: ReplicaShares
    routed_E: Tensor
    own_E: Tensor
    recorded: deque[DispatchPlan] = field(default_factory=deque)
