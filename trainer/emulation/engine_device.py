"""The emulated device of an engine's rank: arithmetic is real, time is that of measured kernels.

Hooks on the model's modules tell which kernels a device would start. Where a segment of compute
ends, the rank waits until their time (`core.kernel_laws`, noise, injected slowdown) has passed, and
reports that time, as device events would. Time on the host counts only where it is longer: as an
overrun, in no report. Nothing is hidden: the attachment's clock says "emulated".
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.kernel_laws.kernels import Kernel, backward
from pacekeeper.core.kernel_laws.laws import time_s
from pacekeeper.core.kernel_laws.noise import Noise, NoiseLaw
from pacekeeper.trainer.emulation.faults import wait_until
from pacekeeper.trainer.emulation.model_kernels import (
    WHOLE,
    ExpertKernels,
    ModelKernels,
    ModuleKernels,
    Portion,
    model_kernels,
)
from pacekeeper.trainer.emulation.network import LINK_SHARE, EmulatedLinks
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, WallClock
from pacekeeper.trainer.model.skeleton import Skeleton

GroupedForward = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedWork:
    """What an even step of a rank is, by which the device is calibrated.

    Attributes:
        step_s: Seconds that it takes, without noise.
        row_tokens: Tokens of a row on the device.
        rows_per_microbatch: Rows that are computed at once.
        num_microbatches: Of a step, of one rank.
        experts_per_token: Experts that compute a token.
        exchanged_bytes: Rows that it sends to other ranks for their experts, and receives.
        slots: Slots of a layer over which a rank's rows are spread evenly.
        repeats_forward: Whether activations are recomputed in the backward pass.
    """

    step_s: float
    row_tokens: int
    rows_per_microbatch: float
    num_microbatches: float
    experts_per_token: int
    exchanged_bytes: float
    slots: int
    repeats_forward: bool = False

    def kernels_s(self, kernels: ModelKernels) -> float:
        """Return the seconds of the step's kernels, as the laws give them."""
        whole, part = divmod(self.rows_per_microbatch * self.row_tokens, self.row_tokens)
        lengths = (self.row_tokens,) * int(whole) + ((int(part),) if part >= 1.0 else ())
        rows = round(sum(lengths) * self.experts_per_token / self.slots)
        forward = list(kernels.forward(lengths, (rows,) * self.slots))
        total_s = sum(time_s(one) for kernel in forward for one in backward(kernel))
        total_s += sum(map(time_s, forward)) * (2 if self.repeats_forward else 1)
        return total_s * self.num_microbatches


@dataclass(slots=True, kw_only=True)
class EngineDevice(WallClock):
    """The segment clock of a rank on an emulated device. `slowdown` is the fault: 1.0 = healthy.

    Attributes:
        noise: Of a micro-batch's time.
        links: What the rows of experts travel on.
        busy_s: Modelled time so far.
        num_segments: Segments of compute so far.
        num_overruns: Those whose real arithmetic took longer than the modelled time.
        overrun_s: By how much, in all: time that no such device would have needed.
        portion_of: What the rank computes of a module, by its name; None: all of it.
        is_idle: Whether the pass is that of a rank without rows; None: it never is.
    """

    noise: Noise
    links: EmulatedLinks
    slowdown: float = 1.0
    busy_s: float = 0.0
    num_segments: int = 0
    num_overruns: int = 0
    overrun_s: float = 0.0
    portion_of: Callable[[str], Portion] | None = None
    is_idle: Callable[[], bool] | None = None
    _kernels: list[Kernel] = field(default_factory=list)  # since the segment began
    _more_s: float = 0.0  # of other work in it, at full speed
    _experts: dict[nn.Module, ExpertKernels] = field(default_factory=dict)
    _lengths: tuple[int, ...] = ()  # of the pass that runs
    _token_scale: float = 1.0
    _time_scale: float = 1.0
    _factor: float = 1.0  # noise of the open micro-batch
    _is_open: bool = False

    @classmethod
    def seeded(cls, seed: int, law: NoiseLaw) -> "EngineDevice":
        """A device whose noise is drawn from a seed."""

        def noise(salt: str) -> Noise:
            source = random.Random(f"{seed}{salt}")
            return Noise(law, normal=partial(source.gauss, 0.0, 1.0), uniform=source.random)

        return cls(noise=noise(""), links=EmulatedLinks(noise=noise(" links")))

    def watch(
        self, skeleton: Skeleton, shapes: Skeleton, row_tokens: int, even: EmulatedWork
    ) -> None:
        """Follow a model's forward and backward passes from now on.

        Args:
            skeleton: The model that is trained.
            shapes: The model whose shapes the kernels have.
            row_tokens: Tokens of a row of the batch; it stands for one of `even.row_tokens`.
            even: What an even step takes.

        Raises:
            ConfigError: The models differ in structure.
        """
        kernels = model_kernels(skeleton, shapes)
        self._token_scale = even.row_tokens / row_tokens
        self._time_scale = even.step_s / even.kernels_s(kernels)
        if even.exchanged_bytes > 0.0:
            self.links.bytes_per_s = even.exchanged_bytes / (LINK_SHARE * even.step_s)
        skeleton.module.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        for name, one in kernels.modules.items():
            module = skeleton.module.get_submodule(name)
            module.register_forward_hook(partial(self._ran, name, one))
        self._experts = {
            one.module: kernels.experts[one.name] for one in skeleton.experts if one is not None
        }

    def timed(self, compute: GroupedForward) -> GroupedForward:
        """Return `compute`, the grouped forward of experts, with its kernels counted."""

        def run(module: nn.Module, rows_RH: Tensor, counts_S: Tensor) -> Tensor:
            answers_RH = compute(module, rows_RH, counts_S)
            rows = [round(count * self._token_scale) for count in counts_S.tolist()]
            self._start(self._experts[module].forward(rows), answers_RH)
            return answers_RH

        return run

    def add_time(self, seconds: float) -> None:
        """Count work that takes `seconds` at full speed to the segment that runs."""
        self._more_s += seconds

    def begin(self) -> None:
        self._kernels.clear()
        self._more_s = 0.0
        self._factor = self.noise.next()
        self._is_open = True
        WallClock.begin(self)

    def pause(self) -> None:
        kernels, self._kernels = self._kernels, []
        healthy_s = sum(map(time_s, kernels)) * self._time_scale + self._more_s
        self._more_s = 0.0
        if not self._is_open:
            return  # an evaluation is not timed
        modelled_s = healthy_s * self._factor * self.slowdown
        due_s = self._began_s + modelled_s
        late_s = time.perf_counter() - due_s
        self.num_segments += 1
        self.busy_s += modelled_s
        if kernels and late_s > 0.0:
            self.num_overruns += 1
            self.overrun_s += late_s
        wait_until(due_s)
        self._compute_s += modelled_s
        self._paused_s = time.perf_counter()

    def suspend(self) -> Any:
        return WallClock.suspend(self), self._factor

    def resume_suspended(self, aside: Any) -> None:
        times, self._factor = aside
        self._is_open = True  # another micro-batch may have ended since
        WallClock.resume_suspended(self, times)

    def time_of(self, aside: Any) -> ComputeTime | None:
        times, _ = aside
        return WallClock.time_of(self, times)

    def end(self) -> ComputeTime | None:
        aside = self.suspend()
        self._is_open = False
        return self.time_of(aside)

    def _begin_pass(self, _: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        if "inputs_embeds" in given:  # of a later stage: their shape is that of the micro-batch
            tokens: Tensor = given["inputs_embeds"][..., 0]
        else:
            tokens = given["input_ids"] if "input_ids" in given else args[0]
        if self.is_idle is not None and self.is_idle():  # the placeholder of a rank without rows
            self._lengths = (1,)
            return
        scaled = [n * self._token_scale for n in _document_lengths(tokens, given)]
        self._lengths = tuple(max(round(length), 1) for length in scaled)

    def _ran(self, name: str, started: ModuleKernels, _: nn.Module, __: Any, output: Any) -> None:
        portion = WHOLE if self.portion_of is None else self.portion_of(name)
        self._start(started.forward(self._lengths, portion), output)

    def _start(self, kernels: Sequence[Kernel], output: Any) -> None:
        """Count the kernels of a forward pass now, and those of its backward pass when it runs."""
        self._kernels += kernels
        first = next(iter(_tensors(output)), None)
        if first is not None and first.requires_grad:
            behind = [one for kernel in kernels for one in backward(kernel)]
            first.register_hook(lambda _: self._kernels.extend(behind))


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (one for one in output.values() if isinstance(one, Tensor))
    elif isinstance(output, Sequence):
        yield from (one for one in output if isinstance(one, Tensor))


def _document_lengths(tokens: Tensor, given: Mapping[str, Any]) -> list[int]:
    """Tokens of each document; a row is one unless `position_ids` restart."""
    rows, length = tokens.shape
    if "position_ids" not in given:
        return [length] * rows
    starts = given["position_ids"] == 0
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    lengths: list[int] = torch.diff(begins, append=begins.new_tensor([rows * length])).tolist()
    return lengths
