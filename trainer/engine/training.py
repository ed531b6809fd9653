"""The training loop of `pacekeeper launch`: a thin user of `Engine`.

`train` runs on each rank of a job, given the settings and the groups. It checks everything that can
be wrong before weights are materialised, and raises on all ranks where one of them cannot start.
It starts no process and survives no failure.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.emulation.faults import FaultInjector
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import (
    Job,
    announce,
    batch_of,
    emulate,
    engine_options,
    learning_rate,
    make_optimizer,
    open_log,
    prepare_job,
    require_budget,
    warn_of_overruns,
)
from pacekeeper.trainer.engine.run_log import RunLog, StepRecord
from pacekeeper.trainer.engine.values import StepResult
from pacekeeper.trainer.groups.agreement import on_all_ranks, require_agreement
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.model import library

_log = logging.getLogger(__name__)


def train(
    config: EngineConfig,
    groups: EngineGroups,
    *,
    device: torch.device,
    ranks_on_node: int = 1,
    run_dir: Path,
    hooks: Hooks | None = None,
    emulated: EngineDevice | None = None,
    faults: FaultInjector | None = None,
    is_stop_asked: Callable[[], bool] = lambda: False,
) -> Engine:
    """Train as the settings say; all ranks of a job call it together.

    Args:
        config: The settings.
        groups: All ranks.
        device: Where this rank computes.
        ranks_on_node: Ranks of this node, which share its memory.
        run_dir: Folder of the step log, on the lowest rank.
        hooks: Attachment to the agent of the node.
        emulated: The clock of `hooks`, if it is that of an emulated device.
        faults: Asked before each step.
        is_stop_asked: Whether this rank is asked to end; all end after the same step then.

    Returns:
        The engine after the last step.

    Raises:
        PacekeeperError: On all ranks, if one cannot start or the loss is not finite.
    """
    control = groups.control
    settings = {name: v for name, v in asdict(config).items() if name not in PATHS}
    require_agreement({f"[engine] {name}": value for name, value in settings.items()}, control)
    require_agreement({"kind of device": device.type}, control)
    job = on_all_ranks(lambda: prepare_job(config, control.ranks), control)
    require_agreement({"data": job.data}, control)
    is_lowest = control.rank == control.ranks[0]
    if is_lowest:
        announce(config, job, device, ranks_on_node)
    if emulated is not None:
        shapes = on_all_ranks(
            lambda: emulate(config, job, emulated, is_announced=is_lowest), control
        )
        require_agreement({"emulated model": library.config_values(shapes.module)}, control)
    on_all_ranks(lambda: require_budget(config, job, control.rank, device, ranks_on_node), control)

    log = on_all_ranks(lambda: open_log(config, run_dir) if is_lowest else None, control)
    with log or nullcontext():
        engine = Engine(
            job.skeleton,
            job.source,
            layout=job.layout,
            groups=groups,
            hooks=hooks,
            options=engine_options(config, job, device),
        )
        optimizer = make_optimizer(config, engine)
        engine.add_optimizer(optimizer)
        _Loop(config, job, engine, optimizer, log, faults, is_stop_asked).run()
        if emulated is not None:
            warn_of_overruns(emulated, control.rank)
        if config.export_dir and engine.num_steps == config.steps:
            engine.export(config.export_dir)
            if is_lowest:
                _log.info("exported to %s", config.export_dir)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A step whose values may still be on the device."""

    step: int
    result: StepResult
    learning_rate: float
    generation: int
    evaluation: Tensor | None


class _Loop:
    """Steps of one rank. Values are read a step late, so that the host never waits for a device."""

    def __init__(
        self,
        config: EngineConfig,
        job: Job,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        log: RunLog | None,
        faults: FaultInjector | None,
        is_stop_asked: Callable[[], bool],
    ) -> None:
        self._config, self._job, self._engine = config, job, engine
        self._optimizer, self._log, self._is_stop_asked = optimizer, log, is_stop_asked
        self._faults = faults
        self._made: _Made | None = None
        self._read_s = time.perf_counter()

    def run(self) -> None:
        """Make the steps that are left."""
        config, engine = self._config, self._engine
        while engine.num_steps < config.steps:
            if _is_wish(self._is_stop_asked(), engine.groups.control):
                if self._log is not None:
                    _log.info("asked to end: the job ends after %d steps", engine.num_steps)
                break
            step = engine.num_steps
            rate = learning_rate(config, step)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            if self._faults is not None:
                self._faults.begin_step(step)
            batch = batch_of(config, self._job.sampler, step, engine.rows(config.rows_per_step))
            result = engine.step(batch)
            self._read()
            self._made = _Made(
                step=step,
                result=result,
                learning_rate=rate,
                generation=engine.layout.generation,
                evaluation=self._evaluation(step + 1),
            )
        self._read()

    def _evaluation(self, done: int) -> Tensor | None:
        sampler, period = self._job.evaluation, self._config.evaluation_period_steps
        is_due = done == self._config.steps or (period and done % period == 0)
        if sampler is None or not is_due:
            return None
        rows = self._engine.rows(sampler.num_first_places(0))
        return self._engine.evaluate(batch_of(self._config, sampler, 0, rows))

    def _read(self) -> None:
        """Log the step before, which the device has finished meanwhile."""
        made, self._made = self._made, None
        if made is None:
            return
        loss, norm = made.result.loss.item(), made.result.grad_norm.item()
        began, self._read_s = self._read_s, time.perf_counter()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise PacekeeperError(
                f"step {made.step}: the loss is {loss} and the gradient norm {norm}: the weights "
                "are lost",
                remedy="lower learning_rate, or set max_grad_norm and warmup_steps",
            )
        if self._log is not None:
            record = StepRecord(
                step=made.step,
                loss=loss,
                grad_norm=norm,
                learning_rate=made.learning_rate,
                tokens=made.result.num_tokens,
                seconds=self._read_s - began,
                generation=made.generation,
                evaluation_loss=None if made.evaluation is None else made.evaluation.item(),
            )
            self._log.write(record)


def _is_wish(own: bool, control: Group) -> bool:
    """Whether any rank is asked to end: all learn it before the same step."""
    return bool(control.all_gather(torch.tensor([own])).any())
