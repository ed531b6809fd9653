"""Settings that every trainer has: its job, its deadlines, its checkpoints."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.checkpoint.partial_experts import LOST_TOKENS_LIMIT, ExpertOrder
from pacekeeper.core.config.base import Wait, named, one_of, reject, settings
from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name


def _is_resume(text: str) -> bool:
    name = text.rpartition("/")[2]
    return text in ("auto", "never") or CheckpointId.of_name(name) is not None


JobName = Annotated[str, named(is_job_name, JOB_NAME_RULE)]
Resume = Annotated[
    str,
    named(
        _is_resume,
        "'auto', 'never' or the path of a checkpoint (its directory's name is like "
        f"{CheckpointId(run_id=0, generation=1, step=100).name})",
    ),
]


@settings
class JobConfig:
    """Settings of a job on any trainer."""

    # Name of the job, also of its directories and of its checkpoints.
    job: JobName = "train"
    steps: PositiveInt = 200
    # Of new weights and of the order of the data.
    seed: NonNegativeInt = 0
    # Seconds a collective may wait before its rank looks at the abort flag again.
    tick_s: Wait = 0.1
    # Seconds from the moment a rank or a node freezes until the others train on: it is waited for,
    # the others say how far they are, it is fenced (killed for good). At least twice the longest
    # compute of a step.
    peer_timeout_s: Wait = 30.0
    # Seconds that ranks wait for each other at the start, while each loads its part of the model.
    start_timeout_s: Wait = 600.0
    # Steps between two bitwise comparisons of all replicas of weights, moments and gradients (0:
    # none): one small exchange, and a checksum of everything a rank holds. Those that a majority
    # contradicts are replaced; where none has a majority, all go back to a checkpoint.
    replica_check_period_steps: NonNegativeInt = 0
    # Directory that all nodes see (or a URL that fsspec knows); checkpoints lie below it in one
    # directory per job. Empty: none are written.
    checkpoint_dir: str = ""
    # Steps between two checkpoints; raising it saves storage and redoes more after a loss. 0: what
    # costs least, by measured times and the restores so far; windows follow without a pause.
    checkpoint_period_steps: NonNegativeInt = 100
    # Steps over which a checkpoint is spread (a window): after each some blocks are copied, which
    # holds training for less; going back does all but one again, and is exact. 1: all after one
    # step; 0: as few as hold training for 2 % of a step, measured.
    checkpoint_window_steps: NonNegativeInt = 1
    # Complete checkpoints that stay. At least 2: the newest may turn out damaged.
    checkpoints_kept: Annotated[int, Field(ge=2)] = 3
    # Experts of each layer in a checkpoint (0: all). Fewer make it smaller; going back then takes
    # the others from older checkpoints: the tokens they saw since are lost, counted and said. An
    # expert that lost all its hosts then goes back alone, the others stay where they are.
    experts_per_checkpoint: NonNegativeInt = 0
    # Which ones: "turn" (one after the other), "load" (most tokens since they were saved) or "risk"
    # (most tokens likely to be lost: few hosts, or slow ones).
    expert_order: Annotated[str, one_of(*ExpertOrder)] = "turn"
    # What is left out of the others: "both" weights and moments, or "weights" or "moments" only.
    partial_state: Annotated[str, one_of("both", "weights", "moments")] = "both"
    # Share of the run's tokens that restores may lose (PLT): where one more would pass it, twice as
    # many experts are saved from then on. 0: always as many.
    lost_tokens_limit: NonNegativeFloat = LOST_TOKENS_LIMIT
    # Steps between two snapshots (0: none): each rank's part of the state in host memory, with a
    # copy on another node. Lost state comes from there where that is newer than storage.
    snapshot_period_steps: NonNegativeInt = 0
    # Experts of each layer in a snapshot, in turn (0: all); with experts_per_checkpoint set only,
    # and at least as many. -1: as many as hold training for 2 % of a step, or on a device as fit
    # beside one, measured. What is restored from memory then has experts of several steps.
    experts_per_snapshot: Annotated[int, Field(ge=-1)] = 0
    # Where to begin: "auto" (the newest checkpoint below checkpoint_dir, else step 0), "never"
    # (step 0), or the path of one checkpoint.
    resume: Resume = "auto"
    # Times the launchers start everything again, from the newest checkpoint, when all ranks of all
    # nodes have ended without having finished.
    max_restarts: NonNegativeInt = 0

    def __post_init__(self) -> None:
        kept_steps = self.checkpoint_period_steps * (self.checkpoints_kept - 1)
        reject(
            bool(self.checkpoint_dir)
            and 0 < kept_steps < self.replica_check_period_steps
            and "replica_check_period_steps: expected at most checkpoint_period_steps x "
            f"(checkpoints_kept - 1) = {kept_steps}, so that a checkpoint from before the last "
            f"check is kept, got {self.replica_check_period_steps}",
            self.experts_per_checkpoint > 0
            and self.checkpoint_window_steps != 1
            and "checkpoint_window_steps: expected 1 with experts_per_checkpoint set",
            self.experts_per_checkpoint > 0
            and self.checkpoint_period_steps == 0
            and "checkpoint_period_steps: expected at least 1 with experts_per_checkpoint set",
            self.experts_per_snapshot != 0
            and self.experts_per_checkpoint == 0
            and "experts_per_snapshot: expected 0 without experts_per_checkpoint",
            0 < self.experts_per_snapshot < self.experts_per_checkpoint
            and "experts_per_snapshot: expected at least experts_per_checkpoint = "
            f"{self.experts_per_checkpoint}, got {self.experts_per_snapshot}",
        )
