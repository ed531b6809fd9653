"""The parts of torchtitan that the overrides touch, for tests without it: `install()` first.

Grouped experts that divide themselves over a mesh, the base of token dispatchers, `derive` and
`override`. Names, arguments and shapes are those of torchtitan 0.3.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Configurable:
    """Wires a class to its settings."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "Config" in vars(cls):
            cls.Config._owner = cls  # type: ignore[attr-defined]


@dataclass(kw_only=True, slots=True)
class Settings:
    _owner: ClassVar[Any] = None

    def build(self) -> Any:
        return self._owner(self)


class GroupedExperts(nn.Module, Configurable):
    """SwiGLU experts, [experts, ...] each."""

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        shape = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD = nn.Parameter(torch.empty(shape))
        self.w2_EDF = nn.Parameter(torch.empty(shape).transpose(1, 2).contiguous())
        self.w3_EFD = nn.Parameter(torch.empty(shape))

    def parallelize(self, parallel_dims: Any) -> None:
        for name, parameter in [*self.named_parameters(recurse=False)]:
            divided = distribute_tensor(parameter.detach(), parallel_dims.mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(divided))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        weights = self.w1_EFD, self.w2_EDF, self.w3_EFD
        own = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat([swiglu(rows, *each) for rows, *each in zip(parts, *own, strict=True)])


def swiglu(rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """One expert."""
    return (nn.functional.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        num_experts: int
        top_k: int

    def __init__(self, config: Any) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k


def override(*, target: Any, description: str = "") -> Callable[[Any], Any]:
    """Leaves the function as it is."""
    return lambda factory: factory


def derive(source: Any, target: Any, **deltas: Any) -> Any:
    """The settings that both have, and others."""
    shared = {f.name for f in fields(target)} & {f.name for f in fields(source)}
    return target(**{name: getattr(source, name) for name in shared} | deltas)


def install() -> None:
    """Make the parts importable as torchtitan's."""
    for name, parts in {
        "torchtitan": (),
        "torchtitan.config": (override, derive),
        "torchtitan.models": (),
        "torchtitan.models.common": (),
        "torchtitan.models.common.moe": (GroupedExperts,),
        "torchtitan.models.common.token_dispatcher": (LocalTokenDispatcher,),
    }.items():
        module = types.ModuleType(name)
        for part in parts:
            setattr(module, part.__name__, part)
        sys.modules[name] = module
