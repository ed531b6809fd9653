"""The attachment: the static description that each rank reports once, when it joins a job.

Trainers write it into the header of their ring file; agents and the controller read it. It also
holds the rules for names of jobs and nodes.
"""

import re
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The model as far as the planner needs it; sizes include optimizer state.

    Attributes:
        slots_per_rank: the most expert replicas of one layer that fit into a rank's memory.
        splits_each_step: the trainer divides the tokens of every step over an expert's replica
            ranks by the layout's speeds; otherwise it uses the layout's shares.
        schedule: the order of chunks in its pipelines, by which steps are priced. A trainer that
            does not report it runs 1F1B. None: this version does not know the reported schedule, so
            no layout with stages or tensor groups is priced.
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

    def __post_init__(self) -> None:
        for name in ("num_layers", "rows_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelShape.{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "num_experts",
            "experts_per_token",
            "slots_per_rank",
            "expert_bytes",
            "dense_bytes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"ModelShape.{name} must not be negative")


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

    def __post_init__(self) -> None:
        if self.run_id < 0:
            raise ValueError(f"run_id {self.run_id}: expected Unix milliseconds, or 0 for unknown")
        if not is_job_name(self.job):
            raise ValueError(f"job name {self.job!r}: expected {JOB_NAME_RULE}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")


def is_job_name(name: str) -> bool:
    """Whether `name` is a valid job name; it names a directory below the ring directory."""
    return _JOB_NAME.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """Whether `name` is valid as the name of a node; it appears in logs and tables."""
    return 1 <= len(name) <= MAX_NODE_NAME and name.isprintable()
