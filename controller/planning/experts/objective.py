"""What a candidate for the hosts of all experts is judged by, and its price in seconds. Pure.

Waits for the fullest rank, restarts after losses, replicas to copy: until the next plan.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.certificate import loss_of
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices
from pacekeeper.controller.planning.token_split.min_max import EvenShares, numbered_rows

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """loads [layers, experts] in rows, and all else that a candidate is judged by."""

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
        """[layers]"""
        rows: Array = self.loads.sum(axis=1) / self.speeds.sum()
        return rows

    def group_speeds(self, groups: tuple[tuple[int, ...], ...]) -> Array:
        speeds = self.speeds
        return np.array([speeds[list(ranks)].sum() for ranks in groups])

    @property
    def row_s(self) -> float:
        """What a row more on the fullest rank of a layer costs until the next plan."""
        whole = float(self.fluid.sum())
        return self.prices.step_s * self.prices.num_steps / whole if whole > 0.0 else 0.0

    def waits_s(self, value: Array) -> Array:
        """[layers] what the layers' values [layers] cost above even load, until the next plan."""
        above: Array = np.maximum(value - (1.0 + self.prices.even) * self.fluid, 0.0)
        return above * self.row_s

    def wait_s(self, value: Array) -> float:
        """The same of all layers together."""
        return float(self.waits_s(value).sum())

    def loss(self, hosts: Flags) -> float:
        """The probability that an expert loses all its nodes; hosts [.., ranks]."""
        return loss_of(hosts, self.cluster)

    def below_floors(self, hosts: Flags) -> Flags:
        """[..] which experts are on too few distinct ranks, nodes or racks; hosts [.., ranks]."""
        is_below: Flags = hosts.sum(axis=-1) < self.floors.hosts
        for labels, floor in (
            (self.cluster.nodes, self.floors.nodes),
            (self.cluster.racks, self.floors.racks),
        ):
            kinds, at = np.unique(labels, return_inverse=True)
            if len(kinds) == len(at):
                is_below |= hosts.sum(axis=-1) < floor
                continue
            member = (np.arange(len(kinds)) == at[:, None]).astype(np.float32)
            is_below |= (hosts.astype(np.float32) @ member > 0.0).sum(axis=-1) < floor
        return is_below


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """Hosts [layers, experts, groups] over groups of ranks that hold the same experts.

    `value` [layers]: the best split's, with room for drift; `price_s` of waits, losses and
    `num_copies` beyond the present hosts.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    hosts: Flags
    value: Array
    loss: float
    price_s: float
    num_copies: int = 0
    even: EvenShares | None = None  # where known already

    def on_ranks(self) -> Flags:
        """[layers, experts, ranks]"""
        group_of = np.empty(sum(map(len, self.groups)), dtype=np.intp)
        for group, ranks in enumerate(self.groups):
            group_of[list(ranks)] = group
        return self.hosts[:, :, group_of]


def checked(
    task: Task,
    name: str,
    groups: tuple[tuple[int, ...], ...],
    hosts: Flags,
    value: Array,
) -> list[Draft]:
    """The draft with its price; none where it breaks a floor."""
    draft = Draft(name=name, groups=groups, hosts=hosts, value=value, loss=0.0, price_s=0.0)
    on_ranks = distinct_hosts(draft)
    return [] if task.below_floors(on_ranks).any() else [priced(task, draft, on_ranks)]


def distinct_hosts(draft: Draft) -> Flags:
    """[sets, ranks]: the host sets of all experts of all layers, each once."""
    flat = draft.hosts.reshape(-1, draft.hosts.shape[2])
    distinct = flat[numbered_rows(flat)[0]]
    on_ranks: Flags = replace(draft, hosts=distinct[None]).on_ranks()[0]
    return on_ranks


def priced(task: Task, draft: Draft, on_ranks: Flags) -> Draft:
    """The draft with its price; on_ranks as `distinct_hosts` gives them."""
    loss = task.loss(on_ranks)
    num_replicas = float(draft.hosts.sum(axis=(0, 1)) @ np.array([*map(len, draft.groups)]))
    price_s = task.wait_s(draft.value) + loss * task.prices.restart_s
    price_s += num_replicas * task.prices.hold_s
    return replace(draft, loss=loss, price_s=price_s)
