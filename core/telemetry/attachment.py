"""The attachment: the static description that each rank reports once, when it joins a job.

Trainers write it into the header of their ring file; agents and the controller read it. It also
holds the rules for names of jobs and nodes.
"""

import re
from dataclasses import dataclass, fields
from enum import StrEnum

from pacekeeper.core.layout.pipeline_schedule import Schedule

MAX_NODE_NAME = 253  # of a host name
NODE_NAME_RULE = f"1 to {MAX_NODE_NAME} printable characters"
JOB_NAME_RULE = "1 to 64 of letters, digits, '-', '_' and '.', not beginning with '.'"
_JOB_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")


class Clock(StrEnum):
    """The source of a rank's compute times."""

    CUDA = "cuda"  # CUDA events of the device
    CPU = "cpu"  # thread CPU time + run-queue wait + the rest
    EMULATED = "emulated"  # modelled device time from counted work (demonstrations, tests)
    WALL = "wall"  # a foreign trainer's own stopwatch


class Capability(StrEnum):
    """A kind of change that a trainer can carry out; the controller offers no other."""

    TOKEN_SHARES = "token_shares"  # other shares of an expert's tokens for its replica ranks
    BATCH_SHARES = "batch_shares"  # other numbers of rows for the pipelines
    # The same in whole micro-batches: a row of `rows_per_step` is one, and ranks run unequal
    # numbers of them.
    MICROBATCH_COUNTS = "microbatch_counts"
    EXPERT_REPLICAS = "expert_replicas"  # experts on other ranks
    PARTITION = "partition"  # other layers and shards, ranks without work
    SCHEDULE = "schedule"  # 1F1B or zero bubble, as the layout says


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the model that the planner needs; they include optimizer state.

    The layout says the rest: numbers of shards, layers with experts and with shared experts. Fields
    with a default need not be reported; 0 then means unknown.

    Attributes:
        expert_bytes: one expert of one layer.
        dense_bytes: all other blocks together, each counted once.
        slots_per_rank: the most expert replicas of one layer that fit into a rank's memory.
        splits_each_step: the trainer divides the tokens of every step over an expert's replica
            ranks by the layout's speeds; otherwise it uses the layout's shares.
        schedule: the order of chunks in the pipelines of a trainer that cannot change it
            (`Capability.SCHEDULE`); of others the layout says it. A trainer that does not report it
            runs 1F1B. None: this version does not know the reported schedule, so no layout with
            stages or tensor groups is priced.
        num_microbatches: of each pipeline in a step, where batch shares are equal.
        rows_per_microbatch: the most rows of a micro-batch, of a trainer that deals rows by the
            rule of `core/layout/apportion` and follows stage shares; 0: of others.
        tokens_per_row: tokens of one row of the batch.
        hidden_bytes: hidden states of one token, as they travel between stages, within tensor
            groups and to experts.
        activation_bytes: what one layer keeps of one token from its forward to its backward pass,
            all ranks of a tensor group together.
        whole_activation_bytes: the same that every rank of a tensor group keeps, whatever its
            shards.
        head_activation_bytes: what the last stage keeps of one token of one micro-batch: logits.
        embedding_bytes: the embedding.
        head_bytes: the head.
        norm_router_bytes: norms and router of one layer, the largest.
        attention_bytes: one attention shard of one layer.
        mlp_bytes: one MLP shard of a layer without experts.
        shared_mlp_bytes: one MLP shard of a layer with experts.
        gradient_bytes: gradients of all dense blocks, each counted once; not in `dense_bytes`.
        optimizer_bytes: optimizer state of all dense blocks, each counted once; in `dense_bytes`.
        memory_bytes: what this rank may use of its device.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    rows_per_step: int
    slots_per_rank: int
    expert_bytes: int
    dense_bytes: int
    splits_each_step: bool = False
    schedule: Schedule | None = Schedule.ONE_F_ONE_B
    num_microbatches: int = 0
    rows_per_microbatch: int = 0
    tokens_per_row: int = 0
    hidden_bytes: int = 0
    activation_bytes: int = 0
    whole_activation_bytes: int = 0
    head_activation_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0
    norm_router_bytes: int = 0
    attention_bytes: int = 0
    mlp_bytes: int = 0
    shared_mlp_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "rows_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelShape.{name} must be at least 1, got {getattr(self, name)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"ModelShape.{field.name} must not be negative")


ENGINE_CAPABILITIES = frozenset(Capability) - {Capability.MICROBATCH_COUNTS}
DEFAULT_CAPABILITIES = ENGINE_CAPABILITIES - {Capability.SCHEDULE}
"""Of trainers that name none: older ones run the schedule that they began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The description that a rank writes once, when it creates its ring.

    Attributes:
        role: the group of ranks that do the same work (stage, chunk, tensor share): its peers.
        device_uuid: empty for a rank without GPU.
        model: None if work cannot be moved.
        run_id: ascending number of the launch (Unix milliseconds of its start, equal on all
            ranks); 0: not set by the launcher, launches are then distinguished by pids.
        can_probe: the rank runs the fixed probe on request.
        plan_kinds: the plans that the trainer can carry out: values of `Capability`, separated by
            blanks; "": `DEFAULT_CAPABILITIES`. Words that this version does not know count as none.
    """

    job: str
    rank: int
    world_size: int
    pid: int
    role: str = "train"
    clock: Clock = Clock.WALL
    device_uuid: str = ""
    model: ModelShape | None = None
    run_id: int = 0
    can_probe: bool = False  # it runs the fixed probe when all ranks are asked for it
    plan_kinds: str = ""

    def __post_init__(self) -> None:
        if self.run_id < 0:
            raise ValueError(f"run_id {self.run_id}: expected Unix milliseconds, or 0 for unknown")
        if not is_job_name(self.job):
            raise ValueError(f"job name {self.job!r}: expected {JOB_NAME_RULE}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The kinds of plans that may be offered to the rank."""
        if self.model is None:
            return frozenset()
        if not self.plan_kinds:
            return DEFAULT_CAPABILITIES
        return frozenset(kind for kind in Capability if kind in self.plan_kinds.split())


def is_job_name(name: str) -> bool:
    """Whether `name` is a valid job name; it names a directory below the ring directory."""
    return _JOB_NAME.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """Whether `name` is valid as the name of a node; it appears in logs and tables."""
    return 1 <= len(name) <= MAX_NODE_NAME and name.isprintable()
