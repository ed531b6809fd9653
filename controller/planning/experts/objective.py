"""Price of a candidate placement in seconds until the next plan.

Sum of waiting for the slowest rank of each layer, the expected cost of restarts, replicas to copy
and replicas held. Used by all generators of candidates.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.certificate import loss_of
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices
from pacekeeper.controller.planning.token_split.min_max import MinMaxSplit, unique_rows

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """Loads [layers, experts] in rows, and everything else that prices a candidate placement."""

    loads: Array
    cluster: Cluster
    floors: Floors
    prices: Prices
    drift: float

    @property
    def speeds(self) -> Array:
        return np.array(self.cluster.speeds)

    @property
    def fluid(self) -> Array:
        """[layers] rows / sum of speeds: the lowest largest load_j / speed_j of any placement."""
        rows: Array = self.loads.sum(axis=1) / self.speeds.sum()
        return rows

    def group_speeds(self, groups: tuple[tuple[int, ...], ...]) -> Array:
        speeds = self.speeds
        return np.array([speeds[list(ranks)].sum() for ranks in groups])

    @property
    def row_s(self) -> float:
        """Seconds until the next plan that one more row on the slowest rank of a layer costs."""
        whole = float(self.fluid.sum())
        return self.prices.step_s * self.prices.num_steps / whole if whole > 0.0 else 0.0

    def waits_s(self, value: Array) -> Array:
        """[layers] what the layers' values [layers] cost above even load, until the next plan."""
        above: Array = np.maximum(value - (1.0 + self.prices.even) * self.fluid, 0.0)
        return above * self.row_s

    def wait_s(self, value: Array) -> float:
        """The same of all layers together."""
        return float(self.waits_s(value).sum())

    def loss(self, replicas: Flags) -> float:
        """The probability that an expert loses all its nodes; replicas [.., ranks]."""
        return loss_of(replicas, self.cluster)

    def below_floors(self, replicas: Flags) -> Flags:
        """[..] which experts are on too few ranks, nodes or racks; replicas [.., ranks]."""
        is_below: Flags = replicas.sum(axis=-1) < self.floors.replicas
        for labels, floor in (
            (self.cluster.nodes, self.floors.nodes),
            (self.cluster.racks, self.floors.racks),
        ):
            kinds, at = np.unique(labels, return_inverse=True)
            if len(kinds) == len(at):
                is_below |= replicas.sum(axis=-1) < floor
                continue
            member = (np.arange(len(kinds)) == at[:, None]).astype(np.float32)
            is_below |= (replicas.astype(np.float32) @ member > 0.0).sum(axis=-1) < floor
        return is_below


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidatePlacement:
    """Replica ranks [layers, experts, groups] over groups of ranks that hold the same experts.

    Attributes:
        name: the generator and its parameters.
        groups: ranks of each group.
        replicas: [layers, experts, groups].
        value: [layers] largest load_j / speed_j of the best split, with room for drift.
        loss: probability that an expert loses all its nodes.
        price_s: waiting, losses, replicas held and `num_copies` copies, in seconds.
        even: shares, where already known.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    replicas: Flags
    value: Array
    loss: float
    price_s: float
    num_copies: int = 0
    even: MinMaxSplit | None = None  # where known already

    def on_ranks(self) -> Flags:
        """[layers, experts, ranks]"""
        group_of = np.empty(sum(map(len, self.groups)), dtype=np.intp)
        for group, ranks in enumerate(self.groups):
            group_of[list(ranks)] = group
        return self.replicas[:, :, group_of]


def check_candidate(
    task: PlacementProblem,
    name: str,
    groups: tuple[tuple[int, ...], ...],
    replicas: Flags,
    value: Array,
) -> list[CandidatePlacement]:
    """Price the candidate; empty where it violates a floor."""
    draft = CandidatePlacement(
        name=name, groups=groups, replicas=replicas, value=value, loss=0.0, price_s=0.0
    )
    on_ranks = distinct_replica_sets(draft)
    return [] if task.below_floors(on_ranks).any() else [price_candidate(task, draft, on_ranks)]


def distinct_replica_sets(draft: CandidatePlacement) -> Flags:
    """[sets, ranks]: the replica sets of all experts of all layers, each once."""
    flat = draft.replicas.reshape(-1, draft.replicas.shape[2])
    distinct = flat[unique_rows(flat)[0]]
    on_ranks: Flags = replace(draft, replicas=distinct[None]).on_ranks()[0]
    return on_ranks


def price_candidate(
    task: PlacementProblem, draft: CandidatePlacement, on_ranks: Flags
) -> CandidatePlacement:
    """The draft with its price; on_ranks as `distinct_replica_sets` gives them."""
    loss = task.loss(on_ranks)
    num_replicas = float(draft.replicas.sum(axis=(0, 1)) @ np.array([*map(len, draft.groups)]))
    price_s = task.wait_s(draft.value) + loss * task.prices.restart_s
    price_s += num_replicas * task.prices.hold_s
    return replace(draft, loss=loss, price_s=price_s)
