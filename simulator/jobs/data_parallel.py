"""Sizes, step times and transfer costs of a simulated data-parallel, expert-parallel job.

The step times are the truth of the simulated world. The policies of pacekeeper are given the same
unit times for their forecasts: apart from device speeds, their model has no error.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.token_split.min_max import min_max_split
from pacekeeper.core.layout.diff import added_replicas
from pacekeeper.core.layout.even_layout import flat_pipelines
from pacekeeper.core.layout.layout import ExpertReplica, Layout

Array = npt.NDArray[np.float64]


class Dispatch(StrEnum):
    """How tokens reach experts, and what that makes the ranks compute."""

    BY_SHARES = "by shares"  # each replica its share of the layout
    EVENED = "evened"  # anew in every step, as evenly as the replicas allow at the layout's speeds
    PADDED = "padded"  # every expert's buffer is as long as the busiest one's (DeepSpeed-MoE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A model trained data and expert parallel, one rank per node, as many samples on each.

    `balanced_step_s`: a step with every node at speed 1.0 and every layer's rows spread evenly;
    `expert_part` of it is the experts'. `slots_per_node`: experts of a layer that a node can hold.
    `expert_bytes`, `dense_bytes`: with optimizer state, of one expert, and of all else.
    Raises ValueError for numbers that are none of these.
    """

    num_layers: int
    num_experts: int
    slots_per_node: int
    samples_per_node: int
    tokens_per_sample: int
    balanced_step_s: float
    expert_part: float
    expert_bytes: int
    dense_bytes: int

    def __post_init__(self) -> None:
        counts = ("num_layers", "num_experts", "slots_per_node", "samples_per_node")
        for name in (*counts, "tokens_per_sample", "balanced_step_s", "expert_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a value above 0, got {getattr(self, name)}")
        if not 0.0 <= self.expert_part <= 1.0:
            raise ValueError(f"expert_part: expected 0 to 1, got {self.expert_part}")
        if self.dense_bytes < 0:
            raise ValueError(f"dense_bytes: expected at least 0, got {self.dense_bytes}")

    @property
    def state_bytes(self) -> int:
        """Everything once: what a checkpoint holds."""
        return self.dense_bytes + self.num_layers * self.num_experts * self.expert_bytes

    def paced_s(self, layout: Layout) -> float:
        """Return the seconds of a step at full pace: samples per node never change."""
        return self.balanced_step_s

    @property
    def samples_per_node_s(self) -> float:
        """Samples that a node of speed 1.0 trains in a second at full pace."""
        return self.samples_per_node / self.balanced_step_s

    @property
    def unit_s(self) -> tuple[float, float]:
        """Seconds at speed 1.0 of a token's dense part, and of a row of an expert."""
        per_node = self.samples_per_node * self.tokens_per_sample
        return (
            (1.0 - self.expert_part) * self.balanced_step_s / per_node,
            self.expert_part * self.balanced_step_s / (per_node * self.num_layers),
        )

    def rows(self, parts: Array, num_nodes: int) -> Array:
        """Token rows of each expert in a step of so many nodes [layers, experts]; top-1 gates."""
        return parts * float(self.tokens_per_step(num_nodes))

    def tokens_per_step(self, num_nodes: int) -> int:
        return num_nodes * self.samples_per_node * self.tokens_per_sample

    def has_room(self, num_nodes: int) -> bool:
        """Do the slots of so many nodes hold every expert?"""
        return num_nodes * self.slots_per_node >= self.num_experts

    def is_alive(self, layout: Layout, living: Collection[int]) -> bool:
        """Has every expert a living replica?"""
        return alive_everywhere(layout, living)

    def samples_per_step(self, layout: Layout) -> float:
        return len(layout.ranks) * self.samples_per_node

    def imbalance(self, layout: Layout, parts: Array, dispatch: Dispatch) -> float:
        """Return the experts' time at speed 1.0 everywhere over that of an even spread."""
        return self._experts(layout, parts, dict.fromkeys(layout.ranks, 1.0), dispatch)

    def step_s(
        self, layout: Layout, parts: Array, speed: Mapping[int, float], dispatch: Dispatch
    ) -> float:
        """Seconds: the slowest rank's dense part, and for each layer the slowest rank's experts.

        `parts` [layers, experts], each layer's adding up to 1. `speed`: of nodes that are not at
        1.0.
        """
        speeds = {rank: speed.get(rank, 1.0) for rank in layout.ranks}
        dense = max(share * len(layout.ranks) / speeds[rank] for rank, share in layout.batch_shares)
        experts = self._experts(layout, parts, speeds, dispatch)
        part = self.expert_part
        return self.balanced_step_s * ((1.0 - part) * dense + part * experts)

    def _experts(
        self, layout: Layout, parts: Array, speeds: Mapping[int, float], dispatch: Dispatch
    ) -> float:
        """Mean over the layers of the slowest rank's time over that of an even share at 1.0."""
        if dispatch is Dispatch.PADDED:
            return self.num_experts * float(parts.max(axis=1).mean()) / min(speeds.values())
        loads = np.einsum("le,ler->lr", parts, self.shares(layout, parts, dispatch))
        real = np.array([speeds[rank] for rank in layout.ranks])
        return float((loads / real).max(axis=1).mean()) * len(layout.ranks)

    def shares(self, layout: Layout, parts: Array, dispatch: Dispatch) -> Array:
        """What each rank computes of each expert's tokens [layers, experts, ranks]."""
        at = {rank: place for place, rank in enumerate(layout.ranks)}
        shares = np.full((*parts.shape, len(at)), np.nan)
        for layer, experts in enumerate(layout.experts):
            for expert, replicas in enumerate(experts):
                for replica in replicas:
                    shares[layer, expert, at[replica.rank]] = replica.share
        if dispatch is Dispatch.EVENED:
            believed = np.array([layout.speed_by_rank[rank] for rank in layout.ranks])
            return min_max_split(parts, ~np.isnan(shares), believed, is_exact=False).shares
        return np.nan_to_num(shares)


def alive_everywhere(layout: Layout, living: Collection[int]) -> bool:
    """Has every expert a living replica?"""
    there = set(living)
    return all(
        any(replica.rank in there for replica in replicas)
        for layer in layout.experts
        for replicas in layer
    )


def copied_bytes(old: Layout, new: Layout, job: JobModel) -> int:
    """Return the bytes to copy from one layout to the other.

    Experts one by one; all other state once for each rank that is new.
    """
    newcomers = set(new.ranks) - set(old.ranks)
    return len(added_replicas(old, new)) * job.expert_bytes + len(newcomers) * job.dense_bytes


def with_replicas(ranks: Sequence[int], experts: Sequence[Sequence[Mapping[int, float]]]) -> Layout:
    """A data-parallel layout of these ranks. experts[layer][expert]: rank -> share."""
    return Layout(
        generation=1,
        num_attention_shards=1,
        num_mlp_shards=1,
        pipelines=flat_pipelines(ranks, len(experts)),
        experts=tuple(
            tuple(
                tuple(ExpertReplica(rank, share) for rank, share in sorted(replicas.items()))
                for replicas in layer
            )
            for layer in experts
        ),
    )
