"""Settings of the trainer, table `[train]`; each comment gives unit and trade-off."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from pacekeeper.core.config.base import Ratio, Wait, one_of, reject, settings
from pacekeeper.core.config.job import JobConfig

MIN_DOCUMENT_TOKENS = 16  # of the trainer's text; a row must have room for one


LearningRate = Annotated[float, Field(gt=0.0, le=1.0)]  # AdamW moves a weight by about as much


@settings
class TrainConfig(JobConfig):
    """Our own MoE trainer."""

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

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
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
        )

    @property
    def wanted_clock(self) -> str:
        return self.clock

    @property
    def default_clock(self) -> str:
        return "emulated"

    def with_clock(self, clock: str) -> "TrainConfig":
        return replace(self, clock=clock)
