"""Settings of the trainer, table `[train]`; each comment gives unit and trade-off."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.checkpoint.partial_experts import LOST_TOKENS_LIMIT, ExpertOrder
from pacekeeper.core.config.base import Ratio, Wait, named, one_of, reject, settings
from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name

MIN_DOCUMENT_TOKENS = 16  # of the trainer's text; a row must have room for one


def _is_resume(text: str) -> bool:
    name = text.rpartition("/")[2]
    return text in ("auto", "never") or CheckpointId.of_name(name) is not None


LearningRate = Annotated[float, Field(gt=0.0, le=1.0)]  # AdamW moves a weight by about as much
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
class TrainConfig:
    """Our own MoE trainer."""

    job: JobName = "train"
    steps: PositiveInt = 200
    seed: NonNegativeInt = 0
    # Model.
    num_layers: PositiveInt = 4
    hidden_size: PositiveInt = 64
    num_heads: PositiveInt = 4
    expert_hidden_size: PositiveInt = 128
    num_experts: PositiveInt = 8
    experts_per_token: PositiveInt = 2
    balance_loss: NonNegativeFloat = 0.01
    # Hosts of each expert at the start; memory for replicas per rank and layer (0: all experts).
    replicas: PositiveInt = 2
    slots_per_rank: NonNegativeInt = 0
    # Pipeline stages, and ranks of a tensor group, at the start: the ranks make whole pipelines of
    # num_stages x tensor_size. A plan may change both while the job runs.
    num_stages: PositiveInt = 1
    tensor_size: PositiveInt = 1
    # Order of the work in a pipeline: "1f1b", or "zero_bubble" (weight gradients fill the bubbles).
    schedule: Annotated[str, one_of("1f1b", "zero_bubble")] = "1f1b"
    # Global batch: rows of `row_tokens` tokens, packed with whole documents.
    rows_per_step: PositiveInt = 32
    row_tokens: Annotated[int, Field(ge=MIN_DOCUMENT_TOKENS)] = 160
    num_microbatches: PositiveInt = 1
    learning_rate: LearningRate = 3e-3
    weight_decay: NonNegativeFloat = 0.01
    warmup_steps: NonNegativeInt = 20
    # Where compute times come from: "device" (CUDA events; the model is there), "cpu", "emulated",
    # or "auto": "device" where node 0 has a CUDA device, else "emulated". The launcher says which.
    clock: Annotated[str, one_of("auto", "device", "cpu", "emulated")] = "auto"
    # Emulated device: seconds of device time per step at full speed with an even layout.
    emulated_step_s: Wait = 0.25
    # Standard deviation of the emulated device's log-normal jitter per segment.
    emulated_jitter: Ratio = 0.02
    # "float32"; "float64" is for tests of exactness.
    dtype: Annotated[str, one_of("float32", "float64")] = "float32"
    # Seconds a collective may wait before its rank looks at the abort flag again.
    tick_s: Wait = 0.1
    # Seconds from the moment a rank or a node freezes until the others train on: it is waited for,
    # the others say how far they are, it is fenced (killed for good). At least twice the longest
    # compute of a step.
    peer_timeout_s: Wait = 30.0
    # Steps between two bitwise comparisons of all copies of weights, moments and gradients (0:
    # none): one small exchange, and a checksum of everything a rank holds. A difference ends the
    # job.
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
    # Where to begin: "auto" (the newest checkpoint below checkpoint_dir, else step 0), "never"
    # (step 0), or the path of one checkpoint.
    resume: Resume = "auto"
    # Times the launchers start everything again, from the newest checkpoint, when all ranks of all
    # nodes have ended without having finished.
    max_restarts: NonNegativeInt = 0

    def __post_init__(self) -> None:
        reject(
            self.weight_decay > 1.0 / self.learning_rate  # beyond, signs change
            and f"weight_decay: expected at most 1 / learning_rate, got {self.weight_decay}",
            self.experts_per_token > self.num_experts
            and f"experts_per_token: expected at most num_experts = {self.num_experts}, "
            f"got {self.experts_per_token}",
            self.hidden_size % (self.num_heads * 4) != 0
            and "hidden_size: expected a multiple of 4 x num_heads",
            self.num_stages > self.num_layers
            and f"num_stages: expected at most num_layers = {self.num_layers}, "
            f"got {self.num_stages}",
            self.tensor_size > self.num_heads
            and f"tensor_size: expected at most num_heads = {self.num_heads}, "
            f"got {self.tensor_size}",
            self.rows_per_step % self.num_microbatches != 0
            and "rows_per_step: expected a multiple of num_microbatches",
            self.experts_per_checkpoint > 0
            and self.checkpoint_window_steps != 1
            and "checkpoint_window_steps: expected 1 with experts_per_checkpoint set",
            self.experts_per_checkpoint > 0
            and self.checkpoint_period_steps == 0
            and "checkpoint_period_steps: expected at least 1 with experts_per_checkpoint set",
        )
