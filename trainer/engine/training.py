"""The training loop of `pacekeeper launch`: a thin user of `Engine`.

`train` runs on each rank of a job, given the settings and the groups. It checks everything that can
be wrong before weights are materialised, and raises on all ranks where one of them cannot start.
It starts no process and survives no failure.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.errors import ConfigError, PacekeeperError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.data.sampler import Sampler, places_of_ranks
from pacekeeper.trainer.data.token_stream import TokenStream, open_tokens
from pacekeeper.trainer.elastic.launch_spec import node_limits
from pacekeeper.trainer.emulation.engine_device import EmulatedWork, EngineDevice
from pacekeeper.trainer.emulation.faults import FaultInjector
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.memory_budget import (
    MemoryBudget,
    MicroBatchShape,
    budget_table,
    memory_budget,
    require_memory,
)
from pacekeeper.trainer.engine.micro_batches import MicroBatch
from pacekeeper.trainer.engine.routing import Balance
from pacekeeper.trainer.engine.run_log import RunLog, StepRecord
from pacekeeper.trainer.engine.values import EngineOptions, StepResult
from pacekeeper.trainer.groups.agreement import on_all_ranks, require_agreement
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockSource
from pacekeeper.trainer.model.checkpoint_reader import INDEX, CheckpointReader
from pacekeeper.trainer.model.families import Packing
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.packing import packing_of
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.layouts import default_slots, start_layout
from pacekeeper.trainer.parallel.moves import require_slots

MOST_OVERRUN = 0.05  # of the time of an emulated device, beyond which the host is too slow
_log = logging.getLogger(__name__)


def learning_rate(config: EngineConfig, step: int) -> float:
    """Return the learning rate of a step, from 0 on.

    It rises linearly to `learning_rate` in the last step of warm-up, and falls to `final_ratio` of
    it in the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    progress = min((step - config.warmup_steps + 1) / (config.steps - config.warmup_steps), 1.0)
    left = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_ratio + (1.0 - config.final_ratio) * left)


def make_optimizer(config: EngineConfig, engine: Engine) -> torch.optim.AdamW:
    """Return AdamW of all parameters; vectors are not decayed."""
    experts = {id(p) for p in engine.expert_parameters()}

    def is_matrix(parameter: nn.Parameter) -> bool:
        return parameter.ndim - (id(parameter) in experts) >= 2  # experts are stacked

    parameters = engine.parameters()
    groups = [
        {"params": [p for p in parameters if is_matrix(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=engine.device.type == "cuda",
    )


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
    job = on_all_ranks(lambda: _prepare(config, control.ranks), control)
    data = [s and s.stream.fingerprint() for s in (job.sampler, job.evaluation)]
    require_agreement({"data": data}, control)
    needs = _needs(config, job)
    budgets = {need: _budget(config, job, *need) for need in set(needs.values())}
    budget = budgets[needs[control.rank]]
    available = available_memory(device, ranks_on_node)
    name = f"rank {control.rank} on {device}"
    is_lowest = control.rank == control.ranks[0]
    if is_lowest:
        rank = max(control.ranks, key=lambda r: budgets[needs[r]].total)
        _log.info("%s", budget_table(budgets[needs[rank]], rank=rank, available=available))
        _announce(job)
    if emulated is not None:
        _emulate(config, job, emulated, control)
    on_all_ranks(lambda: require_memory(budget, available=available, where=name), control)

    def open_log() -> RunLog | None:
        return _open_log(config, run_dir) if is_lowest else None

    log = on_all_ranks(open_log, control)
    with log or nullcontext():
        engine = Engine(
            job.skeleton,
            job.source,
            layout=job.layout,
            groups=groups,
            hooks=hooks,
            options=EngineOptions(
                device=device,
                num_slots=job.num_slots or None,
                compute_dtype=_compute_dtype(config),
                max_grad_norm=config.max_grad_norm or None,
                checkpoint_activations=config.checkpoint_activations,
                balance=Balance(config.balance),
                balance_weight=config.balance_weight,
                bias_rate=config.bias_rate,
            ),
        )
        optimizer = make_optimizer(config, engine)
        engine.add_optimizer(optimizer)
        _Loop(config, job, engine, optimizer, log, faults, is_stop_asked).run()
        if emulated is not None and emulated.overrun_s > MOST_OVERRUN * emulated.busy_s:
            _log.warning(
                "rank %d: arithmetic on this host took longer than the emulated device by %.0f %% "
                "of its time: steps last as long as the host needs; raise emulated_step_s",
                control.rank,
                100.0 * emulated.overrun_s / emulated.busy_s,
            )
        if config.export_dir and engine.num_steps == config.steps:
            engine.export(config.export_dir)
            if is_lowest:
                _log.info("exported to %s", config.export_dir)
    return engine


def available_memory(device: torch.device, ranks_on_node: int) -> int | None:
    """Return the bytes that this rank can still have; None: the system does not tell.

    Host memory is divided among the ranks of the node.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = node_limits().memory_bytes
    return None if free is None else free // ranks_on_node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """What a run is made of, before anything is materialised."""

    skeleton: Skeleton
    source: BlockSource
    layout: Layout
    num_slots: int
    sampler: Sampler
    evaluation: Sampler | None


def _prepare(config: EngineConfig, ranks: tuple[int, ...]) -> _Job:
    if config.rows_per_step < len(ranks):
        raise ConfigError(
            f"[engine] rows_per_step: expected at least one for each of {len(ranks)} ranks, "
            f"got {config.rows_per_step}"
        )
    if config.replicas > len(ranks):
        raise ConfigError(
            f"[engine] replicas: expected at most {len(ranks)}, the ranks of the job, "
            f"got {config.replicas}"
        )
    skeleton = build_skeleton(config.model)
    source = (
        SeededInitialization(skeleton, config.seed)
        if config.weights == "new"
        else CheckpointReader(skeleton, Path(config.model))
    )
    num_experts = [one.num_experts if one else 0 for one in skeleton.experts]
    layout = start_layout(num_experts, ranks, config.replicas)
    num_slots = config.slots_per_rank or default_slots(layout, num_experts)
    require_slots(layout, num_slots)
    if config.separate_documents and packing_of(skeleton) is Packing.NONE:
        raise ConfigError(
            f"[engine] separate_documents: expected false, because {skeleton.config.model_type} "
            "carries a state from one document of a row to the next"
        )
    if config.export_dir and (Path(config.export_dir) / INDEX).exists():
        raise ConfigError(f"[engine] export_dir: {config.export_dir} holds a checkpoint already")
    sampler, evaluation = open_data(config, library.vocabulary_size(skeleton.module))
    return _Job(
        skeleton=skeleton,
        source=source,
        layout=layout,
        num_slots=num_slots,
        sampler=sampler,
        evaluation=evaluation,
    )


def open_data(config: EngineConfig, vocabulary_size: int) -> tuple[Sampler, Sampler | None]:
    """Open the token files for training and those for evaluation.

    Args:
        config: The settings.
        vocabulary_size: Of the model.

    Raises:
        PacekeeperError: A file is missing, empty, damaged, or of a larger vocabulary.
    """

    def opened(paths: tuple[str, ...]) -> TokenStream:
        end = config.data_end_of_document
        return open_tokens(
            paths,
            dtype=config.data_dtype or None,  # type: ignore[arg-type]
            end_of_document=None if end < 0 else end,
            vocab_size=vocabulary_size,
        )

    stream, held_out = opened(config.data), None
    if config.evaluation_data:
        held_out = opened(config.evaluation_data)
    elif config.evaluation_fraction:
        stream, held_out = stream.split(config.evaluation_fraction)
    sampler = Sampler(
        stream=stream,
        row_tokens=config.row_tokens,
        rows_per_step=config.rows_per_step,
        seed=config.seed,
        separate_documents=config.separate_documents,
        predict_across_documents=not config.separate_documents,
    )
    if held_out is None:
        return sampler, None
    evaluation = replace(
        sampler, stream=held_out, rows_per_step=config.evaluation_rows, is_shuffled=False
    )
    return sampler, evaluation


def _compute_dtype(config: EngineConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision == "bfloat16" else None


def _needs(config: EngineConfig, job: _Job) -> dict[int, tuple[int, int]]:
    """By rank, the rows of a micro-batch and the slots in use: most ranks have the same."""
    held = Counter(
        replica.rank for placed in job.layout.experts for replicas in placed for replica in replicas
    )
    places = places_of_ranks(job.layout, config.rows_per_step)
    return {
        rank: (min(config.rows_per_microbatch, len(own)), held[rank])
        for rank, own in places.items()
    }


def _budget(config: EngineConfig, job: _Job, rows: int, used_slots: int) -> MemoryBudget:
    shape = MicroBatchShape(
        rows=rows,
        row_tokens=config.row_tokens,
        compute_dtype=_compute_dtype(config),
        checkpoint_activations=config.checkpoint_activations,
    )
    return memory_budget(
        job.skeleton,
        shape,
        num_slots=job.num_slots,
        used_slots=used_slots,
        num_ranks=len(job.layout.ranks),
    )


def _announce(job: _Job) -> None:
    name = job.skeleton.config.model_type
    if not job.skeleton.num_experts:
        _log.warning(
            "%s has no experts: it is trained with the batch divided among the ranks; only rows of "
            "the batch can move between them",
            name,
        )
    _log.info(
        "%s on %d ranks; %d rows of %d tokens a step, %.3g steps an epoch",
        name,
        len(job.layout.ranks),
        job.sampler.rows_per_step,
        job.sampler.row_tokens,
        job.sampler.num_rows / job.sampler.rows_per_step,
    )


def _emulate(config: EngineConfig, job: _Job, device: EngineDevice, control: Group) -> None:
    """Let the emulated device follow the model, and say that there is one."""

    def shapes() -> Skeleton:
        return build_skeleton(config.emulated_model) if config.emulated_model else job.skeleton

    of = on_all_ranks(shapes, control)
    require_agreement({"emulated model": library.config_values(of.module)}, control)
    rows = config.rows_per_step / len(control.ranks)
    at_once = min(rows, config.rows_per_microbatch)
    slots = job.skeleton.num_experts * config.replicas / len(control.ranks)
    even = EmulatedWork(
        step_s=config.emulated_step_s,
        row_tokens=config.emulated_row_tokens or config.row_tokens,
        rows_per_microbatch=at_once,
        num_microbatches=rows / at_once,
        experts_per_token=library.experts_per_token(job.skeleton.config),
        slots=max(round(slots), 1),
        repeats_forward=config.checkpoint_activations,
    )
    on_all_ranks(lambda: device.watch(job.skeleton, of, config.row_tokens, even), control)
    if control.rank == control.ranks[0]:
        _log.warning(
            "the device is emulated: an even step takes %.3g s, by kernels of %s with rows of %d "
            "tokens; no time of this run is one of a real device",
            config.emulated_step_s,
            config.emulated_model or "the trained model",
            even.row_tokens,
        )


def _open_log(config: EngineConfig, run_dir: Path) -> RunLog:
    return RunLog(
        run_dir,
        tensorboard_dir=config.tensorboard_dir,
        log_period_steps=config.log_period_steps,
        num_steps=config.steps,
    )


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
        job: _Job,
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
            batch = self._batch(self._job.sampler, step, config.rows_per_step)
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

    def _batch(self, sampler: Sampler, step: int, num_rows: int) -> Sequence[MicroBatch]:
        whole = sampler.batch(step, self._engine.rows(num_rows))
        parts = [one.tensors for one in whole.split(self._config.rows_per_microbatch)]
        for tensors in parts:
            if not self._config.separate_documents:
                del tensors["position_ids"]  # they would restart with each row only
        return parts

    def _evaluation(self, done: int) -> Tensor | None:
        sampler, period = self._job.evaluation, self._config.evaluation_period_steps
        is_due = done == self._config.steps or (period and done % period == 0)
        if sampler is None or not is_due:
            return None
        num_rows = sampler.num_first_places(0)
        return self._engine.evaluate(self._batch(sampler, 0, num_rows))

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
