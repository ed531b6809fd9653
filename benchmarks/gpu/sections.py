"""The sections, in the order in which they run: what is measured, and what each of them needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One function of one module of this package.

    Attributes:
        name: On the command line and in the JSON.
        title: Heading on the page.
        method: How it is measured.
        function: "module:function".
        limit_s: After so many seconds it is killed.
        least_devices: GPUs that it needs.
    """

    name: str
    title: str
    method: str
    function: str
    limit_s: float
    least_devices: int = 1


SECTIONS = (
    Section(
        name="training",
        title="Training in bfloat16",
        method="A Qwen3-MoE of 0.4 billion parameters with random weights, float32 masters and "
        "AdamW, one rank in a process group of NCCL, the same micro-batch of random tokens each "
        "step. Losses must be finite and go down.",
        function="benchmarks.gpu.training:train",
        limit_s=75.0,
    ),
    Section(
        name="slots",
        title="Moves between slots",
        method="Two experts of each layer are packed, sent through the all-to-all of NCCL by the "
        "only rank to itself, checked, and put into other slots with their moments. All blocks "
        "must be equal bit by bit before and after, and a twin that moved nothing must train on "
        "alike.",
        function="benchmarks.gpu.training:move_between_slots",
        limit_s=60.0,
    ),
    Section(
        name="grouped",
        title="Grouped products against a loop",
        method="`torch.nn.functional.grouped_mm` in bfloat16 against one product for each expert, "
        "by device events; results are compared first. `law` is the time that "
        "`core/kernel_laws` gives for the same kernels (ADR 14).",
        function="benchmarks.gpu.kernels:compare_products",
        limit_s=45.0,
    ),
    Section(
        name="event_clock",
        title="Event clock against wall time",
        method="`DeviceEventClock` beside the wall clock from idle device to idle device; then "
        "micro-batches without waiting, whose times must all be known in the end.",
        function="benchmarks.gpu.timing:compare_clocks",
        limit_s=60.0,
    ),
    Section(
        name="nvml",
        title="NVML by the agent's reader",
        method="The device is sampled by `agent/nvml`, idle and while it multiplies matrices.",
        function="benchmarks.gpu.nvml:read_device",
        limit_s=30.0,
    ),
    Section(
        name="engine_cost",
        title="The engine beside transformers",
        method="One rank against the same model with `grouped_mm` of transformers, both in "
        "bfloat16, in interleaved pairs; medians of the pairs' ratios.",
        function="benchmarks.gpu.timing:cost_of_engine",
        limit_s=90.0,
    ),
    Section(
        name="hook_cost",
        title="Cost of the hooks",
        method="Steps of an engine with a ring and of one without, in interleaved pairs; and the "
        "host's time for the hooks of a micro-batch without any work.",
        function="benchmarks.gpu.timing:cost_of_hooks",
        limit_s=75.0,
    ),
    Section(
        name="prediction",
        title="The price model on device times",
        method="Micro-batches of several numbers and lengths of rows, reported by the engine with "
        "event times and read from the ring. The price model of the predictor is fitted to part "
        "of them and judged on the rest.",
        function="benchmarks.gpu.prediction:judge_price_model",
        limit_s=75.0,
    ),
    Section(
        name="contention",
        title="A slow device",
        method="Another process multiplies matrices on the same device for a while. The detector "
        "of live jobs gets the records of the rank step by step, beside three peers that are "
        "played by the device's own times from before. No setting of the device is touched.",
        function="benchmarks.gpu.prediction:detect_competitor",
        limit_s=75.0,
    ),
    Section(
        name="shared_device",
        title="Two ranks on one device",
        method="Dispatch, sums of gradients, replicas and a move of the engine on CUDA tensors, "
        "between two processes on one device. NCCL gives a device to one rank only, so gloo "
        "carries the messages: a check, not a way to train. Losses must be those of one rank.",
        function="benchmarks.gpu.ranks:share_device",
        limit_s=75.0,
    ),
    Section(
        name="reconfigure",
        title="Groups that are left and formed again",
        method="The connector of elastic jobs (nccl2 of torch 2.15 or later) forms a group of the "
        "one rank, exchanges and adds up, interrupts it, and reconfigures it for the next "
        "generation.",
        function="benchmarks.gpu.ranks:reconfigure",
        limit_s=45.0,
    ),
    Section(
        name="launch",
        title="`pacekeeper launch` with one rank",
        method="The command trains, saves a checkpoint, and a second start resumes from it (torch "
        "2.15 or later; before, one rank of torchrun without checkpoints).",
        function="benchmarks.gpu.jobs:launch_one_rank",
        limit_s=90.0,
    ),
    Section(
        name="nccl",
        title="Ranks over NCCL",
        method="As two ranks on one device, but with a device each, over NCCL.",
        function="benchmarks.gpu.ranks:use_nccl",
        limit_s=75.0,
        least_devices=2,
    ),
    Section(
        name="survival",
        title="Moves, deaths and freezes over NCCL",
        method="Elastic jobs of `pacekeeper launch` with a device for each rank follow a plan, "
        "lose a rank by SIGKILL and one by SIGSTOP, reconfigure their groups (torch 2.15 or "
        "later) and train on; losses are those of an undisturbed run.",
        function="benchmarks.gpu.jobs:survive",
        limit_s=120.0,
        least_devices=2,
    ),
)
