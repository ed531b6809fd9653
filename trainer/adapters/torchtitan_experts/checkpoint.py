"""Checkpoints with logical experts, one copy each, whatever the placement: hooks of torch.

In a state dictionary an expert parameter and its optimizer state have the shape [experts, ...],
divided over the ranks as torchtitan divides it without replicas, so that such a job reads the
checkpoint, too. All ranks take and load state dictionaries together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.diff import Transfer
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.adapters.torchtitan_experts.slots import ExpertSlots, Placed
from pacekeeper.trainer.adapters.torchtitan_experts.states import Stacks
from pacekeeper.trainer.parallel.moves import fetch_blocks


def home_slots(num_experts: int, group_ranks: Sequence[int], rank: int) -> dict[int, int]:
    """Return the slot of each expert of a rank without replicas: equal runs, in order."""
    size = num_experts // len(group_ranks)
    first = group_ranks.index(rank) * size
    return {first + slot: slot for slot in range(size)}


def to_home(placed: Placed, stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of [experts, ...] of tensors whose slots are placed; copies."""
    homes = _homes(placed)
    moves = [
        Transfer(_block(placed, e), replicas[0].rank, homes[e])
        for e, replicas in enumerate(placed.experts)
        if homes[e] not in {replica.rank for replica in replicas}
    ]
    arrived = _fetched(placed, placed.slots, stacks, moves)
    own = sorted(e for e, home in homes.items() if home == placed.group.rank)
    return {
        name: torch.stack(
            [arrived[e][name] if e in arrived else tensor[placed.slots[e]] for e in own]
        )
        for name, tensor in stacks.items()
    }


def to_slots(placed: Placed, parts: Mapping[str, Tensor], num_slots: int) -> dict[str, Tensor]:
    """Return tensors [slots, ...] of the experts placed here, from all ranks' parts of all."""
    homes = _homes(placed)
    moves = [
        Transfer(_block(placed, e), homes[e], replica.rank)
        for e, replicas in enumerate(placed.experts)
        for replica in replicas
        if replica.rank != homes[e]
    ]
    own = home_slots(len(placed.experts), placed.group.ranks, placed.group.rank)
    arrived = _fetched(placed, own, parts, moves)
    found = {name: part.new_zeros(num_slots, *part.shape[1:]) for name, part in parts.items()}
    for expert, slot in placed.slots.items():
        for name, tensor in found.items():
            tensor[slot] = arrived[expert][name] if expert in arrived else parts[name][own[expert]]
    return found


def _homes(placed: Placed) -> dict[int, int]:
    ranks = placed.group.ranks
    return {e: r for r in ranks for e in home_slots(len(placed.experts), ranks, r)}


def _block(placed: Placed, expert: int) -> Block:
    return Block(BlockKind.EXPERT, placed.layer, expert)


def _fetched(
    placed: Placed,
    slots: Mapping[int, int],
    stacks: Mapping[str, Tensor],
    moves: Sequence[Transfer],
) -> dict[int, Mapping[str, Tensor]]:
    """What arrives here, by expert."""
    states = Stacks({placed.layer: slots}, {placed.layer: stacks}, num_slots=len(slots))
    fetched = fetch_blocks(states, moves, 0, placed.group)
    return {block.index: named for block, named in fetched.arrived.items()}


def hook_weights(experts: ExpertSlots) -> None:
    """Let state dictionaries of a layer have logical experts."""

    def save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        names = [name for name, _ in experts.named_parameters(recurse=False)]
        parameters = dict(experts.named_parameters(recurse=False))
        whole = to_home(_placed(experts), experts.stacks())
        for name in names:
            if prefix + name in state:
                state[prefix + name] = _like(parameters[name], whole[name], experts.num_experts)

    def load(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        parameters = dict(experts.named_parameters(recurse=False))
        there = {n: p for n, p in parameters.items() if prefix + n in state}
        if not there:
            return
        parts = {n: _part(state[prefix + n], p, experts) for n, p in there.items()}
        for name, stack in to_slots(_placed(experts), parts, experts.num_slots).items():
            state[prefix + name] = _like(parameters[name], stack, len(parameters[name]))

    module: Any = experts
    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


def hook_optimizer(optimizer: torch.optim.Optimizer, layers: Sequence[ExpertSlots]) -> None:
    """Let state dictionaries of an optimizer have the state of logical experts."""

    def kept(state: Mapping[Any, Any]) -> Any:
        """Yield by layer: (experts, {NAME.KEY: (number, key, parameter, tensor)})."""
        numbers = {
            id(p): number
            for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"])
        }
        for experts in layers:
            found = {}
            for name, p in experts.named_parameters(recurse=False):
                number = numbers.get(id(p))
                for key, value in state.get(number, {}).items():
                    if isinstance(value, Tensor) and value.dim() == p.dim():
                        found[f"{name}.{key}"] = number, key, p, value
            if found:
                yield experts, found

    def save(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        state = {number: dict(named) for number, named in saved["state"].items()}
        for experts, found in kept(saved["state"]):
            stacks = {name: _local(value) for name, (_, _, _, value) in found.items()}
            whole = to_home(_placed(experts), stacks)
            for name, (number, key, p, _) in found.items():
                state[number][key] = _like(p, whole[name], experts.num_experts)
        return {**saved, "state": state}

    def load(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        state = {number: dict(named) for number, named in saved["state"].items()}
        for experts, found in kept(saved["state"]):
            parts = {name: _part(value, p, experts) for name, (_, _, p, value) in found.items()}
            stacks = to_slots(_placed(experts), parts, experts.num_slots)
            for name, (number, key, p, _) in found.items():
                state[number][key] = _like(p, stacks[name], len(p))
        return {**saved, "state": state}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _placed(experts: ExpertSlots) -> Placed:
    assert experts.placed is not None, "the hooks come with a placement"
    return experts.placed


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor, length: int) -> Tensor:
    """A tensor [length, ...] divided as the parameter is, with this part."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size([length, *parameter.shape[1:]])
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def _part(value: Tensor, parameter: Tensor, experts: ExpertSlots) -> Tensor:
    """This rank's part of [experts, ...]."""
    if len(value) != experts.num_experts:
        raise ConfigError(
            f"a checkpoint has {len(value)} experts in a layer, the model has "
            f"{experts.num_experts}",
            remedy="load the checkpoint of a job with the same model",
        )
    if isinstance(value, DTensor):
        if isinstance(parameter, DTensor):
            value = value.redistribute(parameter.device_mesh, parameter.placements)
        return _local(value)
    group = _placed(experts).group
    own = home_slots(experts.num_experts, group.ranks, group.rank)
    return value[min(own) : max(own) + 1]
