"""Settings of the trainer, table `[train]`; each comment gives unit and trade-off."""

from dataclasses import dataclass

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.checkpoint.partial_experts import LOST_TOKENS_LIMIT, ExpertOrder
from pacekeeper.core.config.checks import MAX_WAIT_S, at_least, at_most, one_of, positive
from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name

MIN_DOCUMENT_TOKENS = 16  # of the trainer's text; a row must have room for one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Our own MoE trainer."""

    job: str = "train"
    steps: int = 200
    seed: int = 0
    # Model.
    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 4
    expert_hidden_size: int = 128
    num_experts: int = 8
    experts_per_token: int = 2
    balance_loss: float = 0.01
    # Hosts of each expert at the start; memory for replicas per rank and layer (0: all experts).
    replicas: int = 2
    slots_per_rank: int = 0
    # Pipeline stages, and ranks of a tensor group, at the start: the ranks make whole pipelines of
    # num_stages x tensor_size. A plan may change both while the job runs.
    num_stages: int = 1
    tensor_size: int = 1
    # Order of the work in a pipeline: "1f1b", or "zero_bubble" (weight gradients fill the bubbles).
    schedule: str = "1f1b"
    # Global batch: rows of `row_tokens` tokens, packed with whole documents.
    rows_per_step: int = 32
    row_tokens: int = 160
    num_microbatches: int = 1
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    # Where compute times come from: "device" (CUDA events; the model is there), "cpu", "emulated",
    # or "auto": "device" where node 0 has a CUDA device, else "emulated". The launcher says which.
    clock: str = "auto"
    # Emulated device: seconds of device time per step at full speed with an even layout.
    emulated_step_s: float = 0.25
    # Standard deviation of the emulated device's log-normal jitter per segment.
    emulated_jitter: float = 0.02
    # "float32"; "float64" is for tests of exactness.
    dtype: str = "float32"
    # Seconds a collective may wait before its rank looks at the abort flag again.
    tick_s: float = 0.1
    # Seconds from the moment a rank or a node freezes until the others train on: it is waited for,
    # the others say how far they are, it is fenced (killed for good). At least twice the longest
    # compute of a step.
    peer_timeout_s: float = 30.0
    # Steps between two bitwise comparisons of all copies of weights, moments and gradients (0:
    # none): one small exchange, and a checksum of everything a rank holds. A difference ends the
    # job.
    replica_check_period_steps: int = 0
    # Directory that all nodes see (or a URL that fsspec knows); checkpoints lie below it in one
    # directory per job. Empty: none are written.
    checkpoint_dir: str = ""
    # Steps between two checkpoints; raising it saves storage and redoes more after a loss. 0: what
    # costs least, by measured times and the restores so far; windows follow without a pause.
    checkpoint_period_steps: int = 100
    # Steps over which a checkpoint is spread (a window): after each some blocks are copied, which
    # holds training for less; going back does all but one again, and is exact. 1: all after one
    # step; 0: as few as hold training for 2 % of a step, measured.
    checkpoint_window_steps: int = 1
    # Complete checkpoints that stay. At least 2: the newest may turn out damaged.
    checkpoints_kept: int = 3
    # Experts of each layer in a checkpoint (0: all). Fewer make it smaller; going back then takes
    # the others from older checkpoints: the tokens they saw since are lost, counted and said. An
    # expert that lost all its hosts then goes back alone, the others stay where they are.
    experts_per_checkpoint: int = 0
    # Which ones: "turn" (one after the other), "load" (most tokens since they were saved) or "risk"
    # (most tokens likely to be lost: few hosts, or slow ones).
    expert_order: str = "turn"
    # What is left out of the others: "both" weights and moments, or "weights" or "moments" only.
    partial_state: str = "both"
    # Share of the run's tokens that restores may lose (PLT): where one more would pass it, twice as
    # many experts are saved from then on. 0: always as many.
    lost_tokens_limit: float = LOST_TOKENS_LIMIT
    # Steps between two snapshots (0: none): each rank's part of the state in host memory, with a
    # copy on another node. Lost state comes from there where that is newer than storage.
    snapshot_period_steps: int = 0
    # Where to begin: "auto" (the newest checkpoint below checkpoint_dir, else step 0), "never"
    # (step 0), or the path of one checkpoint.
    resume: str = "auto"
    # Times the launchers start everything again, from the newest checkpoint, when all ranks of all
    # nodes have ended without having finished.
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not is_job_name(self.job):
            raise ValueError(f"job: expected {JOB_NAME_RULE}, got {self.job!r}")
        at_least(
            self,
            1,
            "steps",
            "num_layers",
            "hidden_size",
            "num_heads",
            "experts_per_token",
            "replicas",
            "rows_per_step",
            "num_microbatches",
            "expert_hidden_size",
            "num_stages",
            "tensor_size",
        )
        at_least(self, 0, "slots_per_rank", "warmup_steps", "seed", "replica_check_period_steps")
        at_least(self, 0, "max_restarts", "experts_per_checkpoint", "lost_tokens_limit")
        at_least(self, 0, "checkpoint_window_steps", "snapshot_period_steps")
        at_least(self, min(1, self.experts_per_checkpoint), "checkpoint_period_steps")
        at_least(self, 2, "checkpoints_kept")
        at_least(self, MIN_DOCUMENT_TOKENS, "row_tokens")
        positive(self, "learning_rate", "emulated_step_s", "tick_s", "peer_timeout_s")
        at_least(self, 0.0, "emulated_jitter", "weight_decay", "balance_loss")
        # A step of AdamW moves every weight by about the learning rate.
        at_most(self, 1.0, "learning_rate", "emulated_jitter")
        at_most(self, 1.0 / self.learning_rate, "weight_decay")  # beyond, signs change
        at_most(self, MAX_WAIT_S, "emulated_step_s", "tick_s", "peer_timeout_s")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: expected at most num_experts = {self.num_experts}, "
                f"got {self.experts_per_token}"
            )
        if self.hidden_size % (self.num_heads * 4):
            raise ValueError("hidden_size: expected a multiple of 4 x num_heads")
        if self.num_stages > self.num_layers:
            raise ValueError(
                f"num_stages: expected at most num_layers = {self.num_layers}, "
                f"got {self.num_stages}"
            )
        if self.tensor_size > self.num_heads:
            raise ValueError(
                f"tensor_size: expected at most num_heads = {self.num_heads}, "
                f"got {self.tensor_size}"
            )
        if self.experts_per_checkpoint and self.checkpoint_window_steps != 1:
            raise ValueError("checkpoint_window_steps: expected 1 with experts_per_checkpoint set")
        if self.schedule not in ("1f1b", "zero_bubble"):
            raise ValueError(f"schedule: expected '1f1b' or 'zero_bubble', got {self.schedule!r}")
        if self.rows_per_step % self.num_microbatches:
            raise ValueError("rows_per_step: expected a multiple of num_microbatches")
        if self.clock not in ("auto", "device", "cpu", "emulated"):
            raise ValueError(
                f"clock: expected 'auto', 'device', 'cpu' or 'emulated', got {self.clock!r}"
            )
        one_of(self, "expert_order", *ExpertOrder)
        one_of(self, "partial_state", "both", "weights", "moments")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype: expected 'float32' or 'float64', got {self.dtype!r}")
        name = self.resume.rpartition("/")[2]
        if self.resume not in ("auto", "never") and CheckpointId.of_name(name) is None:
            raise ValueError(
                f"resume: expected 'auto', 'never' or the path of a checkpoint (its directory's "
                f"name is like {CheckpointId(run_id=0, generation=1, step=100).name}), "
                f"got {self.resume!r}"
            )
