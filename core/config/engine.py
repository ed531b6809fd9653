"""Settings of training with the engine, table `[engine]`; comments give units and trade-offs."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pacekeeper.core.config.base import NonEmpty, Ratio, one_of, reject, settings
from pacekeeper.core.config.job import JobConfig

# From an array of the file; a text for its characters would be one more wrong value.
Paths = Annotated[tuple[NonEmpty, ...], Field(strict=False)]
LearningRate = Annotated[float, Field(gt=0.0, le=10.0)]  # AdamW uses 1e-4 or so, SGD up to 1
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

# They name places on one node: ranks of several nodes may have them elsewhere.
PATHS = (
    "model", "data", "evaluation_data", "tensorboard_dir", "export_dir", "emulated_model",
)  # fmt: skip


@settings
class EngineConfig(JobConfig):
    """Training of a model of Hugging Face by `pacekeeper launch`."""

    # Folder with config.json, on every node; required.
    model: str = ""
    # Where the weights come from: "new" (drawn by the seed) or "checkpoint" (safetensors in that
    # folder).
    weights: Annotated[str, one_of("new", "checkpoint")] = "new"
    # Token files (docs/engine.md), one or several that make one stream; required.
    data: Paths = ()
    # Type of tokens in files without description: "uint16" or "uint32". "": no such files.
    data_dtype: Annotated[str, one_of("", "uint16", "uint32")] = ""
    # Token that ends documents in such files; -1: each file is one document.
    data_end_of_document: Annotated[int, Field(ge=-1)] = -1
    # Global batch: rows of `row_tokens` tokens, divided among the ranks; at least one for each.
    rows_per_step: PositiveInt = 32
    row_tokens: Annotated[int, Field(ge=2)] = 1024
    # Rows that a rank computes at once; fewer need less memory for activations and more time.
    rows_per_microbatch: PositiveInt = 4
    # Whether attention stays within documents. Models with recurrent layers cannot.
    separate_documents: bool = True
    # Share of the data that is held out for evaluation, at its end; 0: none.
    evaluation_fraction: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    # Token files for evaluation instead of a share of the data.
    evaluation_data: Paths = ()
    # Steps between two evaluations, with one after the last step; 0: only that one.
    evaluation_period_steps: NonNegativeInt = 100
    # Rows of an evaluation, the same each time; more give a smoother curve and take longer.
    evaluation_rows: PositiveInt = 32
    # Highest learning rate of AdamW, steps of linear warm-up to it, and what follows: "cosine",
    # "linear" or "constant", down to `final_ratio` of it at the last step.
    learning_rate: LearningRate = 3e-4
    warmup_steps: NonNegativeInt = 0
    decay: Annotated[str, one_of("cosine", "linear", "constant")] = "cosine"
    final_ratio: Ratio = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: PositiveFloat = 1e-8
    # Of matrices; vectors (norms, biases) are not decayed.
    weight_decay: NonNegativeFloat = 0.1
    # Bound of the L2 norm of all gradients together; 0: none.
    max_grad_norm: NonNegativeFloat = 1.0
    # Of the computation: "bfloat16" is mixed precision, with weights, gradients, optimizer state
    # and routers in float32.
    precision: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    # Weight of the load-balancing loss (0: none), and what it is computed over: each "sequence" (a
    # row: exact for any layout) or the "batch" (as transformers; one micro-batch per step only).
    balance_weight: NonNegativeFloat = 0.0
    balance: Annotated[str, one_of("sequence", "batch")] = "sequence"
    # Step of the update of correction biases of routers that have them (DeepSeek-V3: 1e-3).
    bias_rate: NonNegativeFloat = 0.0
    # Compute decoder layers twice instead of keeping their activations: less memory, a third more
    # compute.
    checkpoint_activations: bool = False
    # Replica ranks of each expert, at most all ranks; more balance better and need more memory.
    replicas: PositiveInt = 1
    # Experts of a layer that a rank has memory for. 0: those it starts with, or its share after the
    # loss of a node (of a rank, if there is one node), and one more for moves.
    slots_per_rank: NonNegativeInt = 0
    # Pipeline stages, and ranks of a tensor group; the ranks of the job are a multiple of both.
    num_stages: PositiveInt = 1
    tensor_size: PositiveInt = 1
    # Virtual shards of attention and of dense MLPs, which move between the ranks of a tensor group.
    # 0: 1 with tensor_size = 1, else as many as the model's heads and columns allow, at most 64.
    attention_shards: NonNegativeInt = 0
    mlp_shards: NonNegativeInt = 0
    # Whether two ranks, and not all, keep the optimizer state of a dense block that several hold
    # (ZeRO-1): less memory with more than two pipelines, and one more message in each step.
    shard_optimizer_state: bool = False
    # Order of forward and backward passes in a pipeline: "1f1b", or "zero_bubble", which computes
    # gradients of weights where a stage would wait.
    schedule: Annotated[str, one_of("1f1b", "zero_bubble")] = "1f1b"
    # "cuda", "cpu", or "auto": CUDA where there is a device.
    device: Annotated[str, one_of("auto", "cuda", "cpu")] = "auto"
    # Emulate the device: real arithmetic on CPU, and times of measured kernels (docs/engine.md).
    emulate: bool = False
    # Seconds that an even step of a rank takes on it, without noise, the optimizer and exchanges.
    # Real arithmetic should take a fraction of it.
    emulated_step_s: PositiveFloat = 0.5
    # Folder with the config.json of a larger model of the same family, which gives the shapes of
    # the kernels; "": those of `model`.
    emulated_model: str = ""
    # Tokens that a row has on the device; documents are longer in proportion. 0: `row_tokens`.
    emulated_row_tokens: NonNegativeInt = 0
    # Drift, tails and hiccups of its times; false: none.
    emulated_noise: bool = True
    # Without a GPU: time exchanges of experts' rows by wall time, by which slow links are found.
    # For ranks with cores of their own: on shared cores an exchange mostly waits for a core.
    time_transfers: bool = False
    # Steps between two lines on the console.
    log_period_steps: PositiveInt = 10
    # Folder of TensorBoard events; "": none.
    tensorboard_dir: str = ""
    # Folder, shared by all nodes, for the trained model as a Hugging Face checkpoint; "": none.
    export_dir: str = ""

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
        reject(
            self.rows_per_microbatch > self.rows_per_step
            and f"rows_per_microbatch: expected at most rows_per_step = {self.rows_per_step}, "
            f"got {self.rows_per_microbatch}",
            self.warmup_steps > self.steps
            and f"warmup_steps: expected at most steps = {self.steps}, got {self.warmup_steps}",
            self.emulate
            and self.device == "cuda"
            and 'device: expected "cpu" or "auto" with emulate: a CUDA device has its own clock',
            self.schedule == "zero_bubble"
            and self.checkpoint_activations
            and 'schedule: expected "1f1b" with checkpoint_activations',
            self.num_stages > 1
            and self.balance_weight > 0.0
            and self.balance == "batch"
            and 'balance: expected "sequence" with several stages',
            self.evaluation_fraction > 0.0
            and bool(self.evaluation_data)
            and "evaluation_fraction: expected 0 with evaluation_data set",
        )

    @property
    def wanted_device(self) -> str:
        """Device of the ranks: "auto", "cuda" or "cpu"; an emulated device computes on CPU."""
        return "cpu" if self.emulate else self.device
