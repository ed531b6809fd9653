"""A job of `pacekeeper launch` before its first step: model, data, layout, memory, optimizer.

Everything follows from the settings and the ranks; nothing is materialised, nobody is asked.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule, num_in_flight
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf
from pacekeeper.core.layout.state_owners import assign_state_owners
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.trainer.data.sampler import Sampler
from pacekeeper.trainer.data.token_stream import TokenStream, open_tokens
from pacekeeper.trainer.elastic.launch_spec import node_limits
from pacekeeper.trainer.emulation.engine_device import EmulatedWork, EngineDevice
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.memory_budget import (
    MemoryBudget,
    MicroBatchShape,
    OwnedState,
    budget_table,
    memory_budget,
    owned_state,
    require_memory,
)
from pacekeeper.trainer.engine.micro_batches import MicroBatch
from pacekeeper.trainer.engine.routing import Balance
from pacekeeper.trainer.engine.values import EngineOptions
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockSource, Holding
from pacekeeper.trainer.model.checkpoint_reader import INDEX, CheckpointReader
from pacekeeper.trainer.model.families import Packing
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.packing import packing_of
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.block_states import OPTIMIZER
from pacekeeper.trainer.parallel.layouts import default_slots, start_layout, state_sizes
from pacekeeper.trainer.parallel.mesh.row_deal import rows_of_rank
from pacekeeper.trainer.parallel.moves import require_slots

_log = logging.getLogger(__name__)
MOST_OVERRUN = 0.05  # of the time of an emulated device, beyond which the host is too slow


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


def available_memory(device: torch.device, ranks_on_node: int) -> int | None:
    """Return the bytes that this rank can still have; None: the system does not tell.

    Host memory is divided among the ranks of the node.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = node_limits().memory_bytes
    return None if free is None else free // ranks_on_node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What a run is made of, before anything is materialised."""

    skeleton: Skeleton
    source: BlockSource
    layout: Layout
    num_slots: int
    sampler: Sampler
    evaluation: Sampler | None

    @property
    def data(self) -> tuple[int, ...]:
        """What identifies the data: for training, for evaluation if there is any."""
        samplers = (self.sampler, self.evaluation)
        return tuple(one.stream.fingerprint() for one in samplers if one is not None)


def prepare_job(
    config: EngineConfig, ranks: tuple[int, ...], domain_of: DomainOf = NO_DOMAINS
) -> Job:
    """Read the model's configuration and open the data.

    Args:
        config: The settings.
        ranks: All ranks.
        domain_of: Failure domain of each rank: replicas are spread over them.

    Raises:
        PacekeeperError: Settings, model, data and ranks do not fit each other.
    """
    num_pipelines = len(ranks) // (config.num_stages * config.tensor_size)
    if config.rows_per_step < num_pipelines:
        raise ConfigError(
            f"[engine] rows_per_step: expected at least one for each of {num_pipelines} pipelines "
            f"of {len(ranks)} ranks, got {config.rows_per_step}"
        )
    if config.replicas > len(ranks):
        raise ConfigError(
            f"[engine] replicas: expected at most {len(ranks)}, the ranks of the job, "
            f"got {config.replicas}"
        )
    skeleton = _divided_skeleton(config)
    source = (
        SeededInitialization(skeleton, config.seed)
        if config.weights == "new"
        else CheckpointReader(skeleton, Path(config.model))
    )
    num_experts = [one.num_experts if one else 0 for one in skeleton.experts]
    layout = start_layout(
        num_experts,
        ranks,
        config.replicas,
        domain_of,
        num_stages=config.num_stages,
        tensor_size=config.tensor_size,
        num_attention_shards=skeleton.num_attention_shards,
        num_mlp_shards=skeleton.num_mlp_shards,
        shared_mlp_layers=skeleton.shared_mlp_layers,
    )
    layout = replace(layout, schedule=Schedule(config.schedule))
    if config.shard_optimizer_state:
        layout = assign_state_owners(layout, sizes=state_sizes(skeleton), domain_of=domain_of)
    num_slots = config.slots_per_rank or default_slots(
        layout, num_experts, spare_ranks=_most_at_once(ranks, domain_of)
    )
    require_slots(layout, num_slots)
    if config.separate_documents and packing_of(skeleton) is Packing.NONE:
        raise ConfigError(
            f"[engine] separate_documents: expected false, because {skeleton.config.model_type} "
            "carries a state from one document of a row to the next"
        )
    if config.export_dir and (Path(config.export_dir) / INDEX).exists():
        raise ConfigError(f"[engine] export_dir: {config.export_dir} holds a checkpoint already")
    sampler, evaluation = open_data(config, library.vocabulary_size(skeleton.module))
    return Job(
        skeleton=skeleton,
        source=source,
        layout=layout,
        num_slots=num_slots,
        sampler=sampler,
        evaluation=evaluation,
    )


def _divided_skeleton(config: EngineConfig) -> Skeleton:
    """The model with the virtual shards that the settings ask for."""
    attention, mlp = (1, 1) if config.tensor_size == 1 else library.finest_shards(config.model)
    attention, mlp = config.attention_shards or attention, config.mlp_shards or mlp
    return build_skeleton(config.model, num_attention_shards=attention, num_mlp_shards=mlp)


def _most_at_once(ranks: tuple[int, ...], domain_of: DomainOf) -> int:
    """Return the ranks of the largest failure domain; 1 if there is only one domain."""
    sizes = Counter(domain_of.get(rank, rank) for rank in ranks)
    return max(sizes.values()) if len(sizes) > 1 else min(len(ranks) - 1, 1)


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


def model_shape(config: EngineConfig, job: Job, engine: Engine, ranks_on_node: int) -> ModelShape:
    """Return what the planner needs to know of the model and of this rank's memory.

    Activations are those of the memory budget: an estimate, see `memory_budget`.

    Args:
        config: The settings.
        job: The job.
        engine: Of this rank.
        ranks_on_node: Ranks that share the memory of the node.
    """
    skeleton, layout = job.skeleton, engine.layout
    sizes = dict.fromkeys(BlockKind, 0)  # of the largest block of each kind
    optimizer = dense = shared = 0
    for block in layout.blocks():
        is_expert = block.kind is BlockKind.EXPERT
        if is_expert and sizes[BlockKind.EXPERT]:
            continue
        specs = engine.states.specs(block)
        size = sum(spec.size_bytes for spec in specs)
        if block.kind is BlockKind.DENSE_MLP and layout.experts[block.layer]:
            shared = max(shared, size)
        else:
            sizes[block.kind] = max(sizes[block.kind], size)
        if not is_expert:
            dense += size
            optimizer += sum(spec.size_bytes for spec in specs if spec.kind == OPTIMIZER)
    width = (_compute_dtype(config) or next(skeleton.module.parameters()).dtype).itemsize
    hidden = library.hidden_size(skeleton.module) * width
    head = library.vocabulary_size(skeleton.module) * (8 + width)
    in_layers = max(_activation_bytes(config, job) - head, 0)
    kept, whole, reserved = 0, hidden, 0
    if config.checkpoint_activations:  # inputs of layers are kept, one layer at a time is repeated
        tokens = config.rows_per_microbatch * config.row_tokens
        reserved = max(in_layers - skeleton.num_layers * hidden, 0) * tokens
    else:
        whole = 2 * hidden
        kept = max(in_layers // skeleton.num_layers - whole, 0)
    free = available_memory(engine.device, ranks_on_node)
    if free is not None:
        free += _held_bytes(engine)
    return ModelShape(
        num_layers=skeleton.num_layers,
        num_experts=skeleton.num_experts,
        experts_per_token=library.experts_per_token(skeleton.config),
        rows_per_step=config.rows_per_step,
        slots_per_rank=job.num_slots,
        schedule=layout.schedule,
        expert_bytes=sizes[BlockKind.EXPERT],
        dense_bytes=dense,
        num_microbatches=math.ceil(
            config.rows_per_step / len(layout.pipelines) / config.rows_per_microbatch
        ),
        rows_per_microbatch=config.rows_per_microbatch,
        tokens_per_row=config.row_tokens,
        hidden_bytes=hidden,
        activation_bytes=kept,
        whole_activation_bytes=whole,
        head_activation_bytes=head,
        embedding_bytes=sizes[BlockKind.EMBEDDING],
        head_bytes=sizes[BlockKind.HEAD],
        norm_router_bytes=sizes[BlockKind.NORM_ROUTER],
        attention_bytes=sizes[BlockKind.ATTENTION],
        mlp_bytes=sizes[BlockKind.DENSE_MLP],
        shared_mlp_bytes=shared,
        gradient_bytes=dense - optimizer,
        optimizer_bytes=optimizer,
        memory_bytes=max((free or 0) - reserved, 0),
    )


def _activation_bytes(config: EngineConfig, job: Job) -> int:
    """Return the activations of one more token, all layers and the head together."""
    estimates = [
        memory_budget(
            job.skeleton,
            MicroBatchShape(
                rows=rows,
                row_tokens=1,
                compute_dtype=_compute_dtype(config),
                checkpoint_activations=config.checkpoint_activations,
            ),
            num_slots=job.num_slots,
            used_slots=0,
            num_ranks=1,
        ).activations
        for rows in (1, 2)
    ]
    return estimates[1] - estimates[0]


def _held_bytes(engine: Engine) -> int:
    """Return what this rank holds already, which `available_memory` does not count."""
    if engine.device.type == "cuda":
        return torch.cuda.memory_reserved(engine.device)
    held = (one for one in engine.parameters() if not one.is_meta)
    return sum(one.numel() * one.element_size() for one in held)


def _compute_dtype(config: EngineConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision == "bfloat16" else None


_Need = tuple[int, int, int, Holding, OwnedState | None]


def _needs(config: EngineConfig, job: Job) -> dict[int, _Need]:
    """By rank, rows of a micro-batch, such micro-batches in flight, slots in use, and the rest.

    Most ranks have the same.
    """
    held = Counter(
        replica.rank for placed in job.layout.experts for replicas in placed for replica in replicas
    )
    owned = owned_state(job.skeleton, job.layout)
    count = num_micro_batches(
        job.layout.most_rows(config.rows_per_step), config.rows_per_microbatch
    )
    needs = {}
    for rank in job.layout.working:
        stage, at = job.layout.place_of(rank)
        pipeline = job.layout.pipelines[at]
        rows = len(rows_of_rank(job.layout, rank, config.rows_per_step))
        in_flight = num_in_flight(
            job.layout.schedule,
            stage,
            num_stages=len(pipeline.stages),
            num_microbatches=count,
        )
        rows = -(-rows // max(count, 1))
        holding = Holding.of(job.layout, rank)
        needs[rank] = rows, max(in_flight, 1), held[rank], holding, owned.get(rank)
    return needs


def _budget(config: EngineConfig, job: Job, need: _Need) -> MemoryBudget:
    rows, in_flight, used_slots, holding, owned = need
    shape = MicroBatchShape(
        rows=rows,
        num_in_flight=in_flight,
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
        holding=holding,
        owned=owned,
    )


def require_budget(
    config: EngineConfig, job: Job, rank: int, device: torch.device, ranks_on_node: int
) -> None:
    """Reject a job whose rank needs more memory than there is.

    Raises:
        ConfigError: It cannot fit.
    """
    needs = _needs(config, job)
    budgets = {need: _budget(config, job, need) for need in set(needs.values())}
    most = max(budgets.values(), key=lambda one: one.total)
    budget = budgets[needs[rank]] if rank in needs else most  # of one that joins
    available = available_memory(device, ranks_on_node)
    require_memory(budget, available=available, where=f"rank {rank} on {device}")


def announce(config: EngineConfig, job: Job, device: torch.device, ranks_on_node: int) -> None:
    """Log what is trained, and the memory budget of the rank that needs most."""
    needs = _needs(config, job)
    budgets = {need: _budget(config, job, need) for need in set(needs.values())}
    rank = max(needs, key=lambda r: budgets[needs[r]].total)
    available = available_memory(device, ranks_on_node)
    _log.info("%s", budget_table(budgets[needs[rank]], rank=rank, available=available))
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


def engine_options(config: EngineConfig, job: Job, device: torch.device) -> EngineOptions:
    """Return how the engine trains, by the settings."""
    return EngineOptions(
        device=device,
        num_slots=job.num_slots or None,
        compute_dtype=_compute_dtype(config),
        max_grad_norm=config.max_grad_norm or None,
        checkpoint_activations=config.checkpoint_activations,
        balance=Balance(config.balance),
        balance_weight=config.balance_weight,
        bias_rate=config.bias_rate,
    )


def batch_of(
    config: EngineConfig, sampler: Sampler, step: int, micro_batches: Iterable[range]
) -> Iterator[MicroBatch]:
    """Read the micro-batches of a step, when they are asked for.

    Args:
        config: The settings.
        sampler: Of the data.
        step: The step.
        micro_batches: Places of each in the global batch, from `Engine.micro_batches`.
    """
    for places in micro_batches:
        tensors = sampler.batch(step, places).tensors
        if not config.separate_documents:
            del tensors["position_ids"]  # they would restart with each row only
        yield tensors


def emulate(
    config: EngineConfig, job: Job, device: EngineDevice, *, is_announced: bool
) -> Skeleton:
    """Let an emulated device follow the model; return the model of its shapes.

    Args:
        config: The settings.
        job: Its ranks at the start give the size of an even step.
        device: Of this rank.
        is_announced: Whether to log it, on one rank.

    Raises:
        PacekeeperError: That model cannot be built, or is of another family.
    """
    of = build_skeleton(config.emulated_model) if config.emulated_model else job.skeleton
    num_ranks = len(job.layout.ranks)
    rows = config.rows_per_step / num_ranks
    at_once = min(rows, config.rows_per_microbatch)
    per_token = library.experts_per_token(job.skeleton.config)
    even = EmulatedWork(
        step_s=config.emulated_step_s,
        row_tokens=config.emulated_row_tokens or config.row_tokens,
        rows_per_microbatch=at_once,
        num_microbatches=rows / at_once,
        experts_per_token=per_token,
        exchanged_bytes=_exchanged_bytes(config, job, rows, per_token),
        slots=max(round(job.skeleton.num_experts * config.replicas / num_ranks), 1),
        repeats_forward=config.checkpoint_activations,
    )
    device.watch(job.skeleton, of, config.row_tokens, even)
    if is_announced:
        _log.warning(
            "the device is emulated: an even step takes %.3g s, by kernels of %s with rows of %d "
            "tokens; no time of this run is one of a real device",
            config.emulated_step_s,
            config.emulated_model or "the trained model",
            even.row_tokens,
        )
    return of


def _exchanged_bytes(config: EngineConfig, job: Job, rows: float, per_token: int) -> float:
    """Return the bytes that `rows` of a rank are, to other ranks and back, over all layers."""
    num_ranks, skeleton = len(job.layout.ranks), job.skeleton
    tokens = rows * config.row_tokens * per_token * (num_ranks - 1) / num_ranks
    layers = sum(one is not None for one in skeleton.experts)
    size = 4 if config.precision == "float32" else 2
    return 2.0 * tokens * layers * library.hidden_size(skeleton.module) * size


def warn_of_overruns(device: EngineDevice, rank: int) -> None:
    """Say that the host was too slow for an emulated device, if it was."""
    if device.overrun_s > MOST_OVERRUN * device.busy_s:
        _log.warning(
            "rank %d: arithmetic on this host took longer than the emulated device by %.0f %% of "
            "its time: steps last as long as the host needs; raise emulated_step_s",
            rank,
            100.0 * device.overrun_s / device.busy_s,
        )
