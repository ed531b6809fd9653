"""What follows from the settings alone, the same on every rank: no state, no torch, no clock."""

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf
from pacekeeper.core.layout.shrink import ReplicationFloor
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.core.telemetry.records import LOADS_PER_RECORD

_MAX_LOAD_RECORDS = 64  # per step; the ring holds 1024 records of all kinds


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant: a function of the step alone, never of the layout."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * warm


def load_period_steps(config: TrainConfig) -> int:
    """Loads of a large model every few steps only: they share the ring with everything else."""
    records = config.num_layers * -(-config.num_experts // LOADS_PER_RECORD)
    return 1 if records <= _MAX_LOAD_RECORDS else 4


def first_layout(config: TrainConfig, world_size: int, node_of: DomainOf = NO_DOMAINS) -> Layout:
    """The layout every job starts with: an expert's hosts on as many nodes as can be.

    A head is a virtual shard. Raises ValueError where the ranks do not make whole pipelines.
    """
    return even_layout(
        ranks=range(world_size),
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        replicas=min(config.replicas, world_size // config.num_stages),
        domain_of=node_of,
        num_virtual_shards=config.num_heads,
        num_stages=config.num_stages,
        tensor_size=config.tensor_size,
    )


def floor_of(config: TrainConfig, num_living: int, node_of: DomainOf) -> ReplicationFloor:
    """What survivors give every expert again."""
    return ReplicationFloor(
        replicas=min(config.replicas, num_living),
        domain_of=node_of,
        slots_per_rank=config.slots_per_rank or None,
    )


def model_shape(config: TrainConfig, dense: int) -> ModelShape:
    """What the planner must know, given the number of dense parameters.

    Bytes count weights and both moments.
    """
    size = 8 if config.dtype == "float64" else 4
    expert = 2 * config.hidden_size * config.expert_hidden_size
    return ModelShape(
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        rows_per_step=config.rows_per_step,
        slots_per_rank=config.slots_per_rank or config.num_experts,
        expert_bytes=3 * size * expert,
        dense_bytes=3 * size * dense,
        splits_each_step=True,
        schedule=Schedule(config.schedule),
    )


def own_rows(layout: Layout, config: TrainConfig, rank: int) -> range:
    """A rank's rows of the global batch: its group's, which take them in order, by their shares."""
    first, own = 0, layout.pipeline_of(rank).leader
    for other, count in layout.rows_of(config.rows_per_step).items():
        if other == own:
            return range(first, first + count)
        first += count
    raise AssertionError("every rank of a data-parallel job has a batch share")


def apportion_rows(rows: range, parts: int) -> list[range]:
    """Cut a rank's rows into micro-batches: as many on every rank, though of other sizes."""
    result, at = [], rows.start
    for count in apportion(len(rows), [1.0 / parts] * parts):
        result.append(range(at, at + count))
        at += count
    return result


def check_fits(new: Layout, old: Layout) -> None:
    """Raises ValueError where this trainer could not follow the plan."""
    if [len(layer) for layer in new.experts] != [len(layer) for layer in old.experts]:
        raise ValueError("the plan is for another model")
    if new.num_attention_shards != old.num_attention_shards:
        raise ValueError(
            f"the plan cuts heads into {new.num_attention_shards} virtual shards, "
            f"the job has {old.num_attention_shards}"
        )
    if not new.is_regular:
        raise ValueError(
            "the plan gives pipelines cuts of their own, or attention and MLP other runs; this "
            "trainer runs equal cuts and one run for both"
        )
    if new.shared_mlp_layers:
        raise ValueError("the plan is for a model with shared experts")
    if new.state_owners:
        raise ValueError("the plan gives optimizer state owners; here every holder has its own")
