"""All settings of controller and trainer, frozen; each comment gives unit and trade-off.

One TOML file, one table per part (`[controller]`, `[policy]`, `[train]`); those of the others are
in files of their own (`core/config/agent.py`, `core/config/detector.py` and so on).
`core/config/loader.py` reads it and says which file, which key and what was expected.
"""

from dataclasses import dataclass, field

from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.checkpoint.partial_experts import PLT_LIMIT, Order
from pacekeeper.core.config.checks import address, at_least, at_most, one_of, positive
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.metrics import MetricsConfig, WebhookConfig
from pacekeeper.core.config.security import AccessConfig, LimitsConfig, TlsConfig
from pacekeeper.core.telemetry.samples import JOB_NAME_RULE, is_job_name

SHORTEST_STORE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """What is open, ordered or running is kept however old: open incidents, proposals that wait,
    orders that stand, jobs that run. Strikes of devices have rules of their own (90 days)."""

    # Days that the past is kept: closed incidents with their courses, decisions, proposals that
    # are over, layouts that were in force, how fast jobs went.
    history_days: float = 90.0
    # The newest of each that are kept at most.
    incidents: int = 50_000
    decisions: int = 50_000
    proposals: int = 10_000
    layouts: int = 4096
    # Bytes in the store; beyond, the oldest of these go whatever their age. A standby is sent all
    # of them when it begins to follow.
    store_bytes: int = 512 << 20
    # Days, and number, of ended jobs that `pacekeeper status` still shows.
    ended_job_days: float = 3.0
    ended_jobs: int = 512

    def __post_init__(self) -> None:
        positive(self, "history_days", "ended_job_days")
        at_most(self, 36_500.0, "history_days", "ended_job_days")
        at_least(self, 1, "incidents", "decisions", "proposals", "layouts", "ended_jobs")
        at_least(self, SHORTEST_STORE_BYTES, "store_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Where the lease is kept that lets one of several controllers command."""

    # etcd://HOST:PORT,HOST:PORT/KEY or k8s://NAMESPACE/NAME; empty: this is the only controller.
    url: str = ""
    # This controller's name among them; empty: the host name.
    member: str = ""
    # host:port at which the others reach it; empty: where it listens.
    advertise: str = ""
    # Seconds without a renewal after which another takes over. Raising it bears longer pauses of
    # the lease's store, and makes a takeover as much later.
    duration_s: float = 4.0
    # Seconds between two renewals.
    renew_s: float = 1.0
    # Seconds by which the leader stops before another may begin: it bears clocks whose rates differ
    # by as large a part of duration_s.
    margin_s: float = 1.0
    # Seconds for which a standby may hold up what the leader stores before it counts no more.
    sync_within_s: float = 2.0
    # PEM files for the store of the lease: its authority, our certificate and key. Of Kubernetes
    # and of etcd://; without `ca` etcd is spoken to in the clear, on loopback only.
    ca: str = ""
    cert: str = ""
    key: str = ""
    # Kubernetes: https://HOST:PORT of the API and the file of the token; empty: as in every pod.
    api: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        positive(self, "duration_s", "renew_s", "margin_s", "sync_within_s")
        if self.url and not self.url.startswith(("etcd://", "k8s://")):
            raise ValueError(
                f"url: expected etcd://HOST:PORT/KEY or k8s://NAMESPACE/NAME, got {self.url!r}"
            )
        if self.renew_s + self.margin_s >= self.duration_s:
            raise ValueError("duration_s: expected above renew_s + margin_s")
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert, key: expected both files or neither")
        if self.advertise:
            try:
                host_and_port(self.advertise)
            except ValueError as error:
                raise ValueError(f"advertise: {error}") from None


GRPC_PORT = 7443  # below 32768, as all ports of ours: an ephemeral one any client could take
LONGEST_WAIT_S = 7 * 86400.0  # of anything in a step: beyond, clocks of libraries overflow
SHORTEST_DOCUMENT_TOKENS = 16  # of the trainer's text; a row must have room for one


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """When a finding becomes an action."""

    # "act"; "observe": decide and report, but never offer a plan; "approve": propose plans to
    # people and offer those that they approve.
    mode: str = "act"
    # Which plans wait for a person in that mode: "moves" (what copies state or leaves a rank out;
    # shares alone do not wait) or "all".
    approve: str = "moves"
    # Seconds that a proposal stands. Nobody answers: it is made anew if it still pays. Denied: its
    # kind waits as long, then twice as long each time (an hour at most, unless this is more).
    approve_within_s: float = 900.0
    # Smallest predicted gain (share of the step time) worth a plan.
    min_gain: float = 0.05
    # The same while nobody is slow (hot experts only), and steps of loads and layout before that.
    rebalance_min_gain: float = 0.08
    settle_steps: int = 40
    # Steps over which a gain must pay the cost of moving, where the duration is unknown.
    horizon_steps: int = 200
    # Seconds one byte of state costs to move (1 / bandwidth), and one plan at the least: until the
    # job's own plans have been measured.
    move_s_per_byte: float = 2e-9
    plan_s: float = 0.1
    # Least steps between two plans of one job. Raising it damps flapping and delays relief.
    min_steps_between_plans: int = 3
    # Fewest hosts of an expert after any plan.
    min_hosts: int = 2
    # Fewest nodes these stand on, where an expert has so many hosts and the job so many nodes.
    min_nodes: int = 2
    # The same of racks, where all nodes of the job have told theirs (`rack` of [agent]).
    min_racks: int = 2
    # Likelihood that a rank fails before the next plan, until the job's own losses say more, and
    # seconds that a restart costs where an expert is lost with it: what a safer placement is worth.
    failure_probability: float = 0.01
    restart_s: float = 600.0
    # Likelihood that a rack fails with all its nodes before the next plan; 0: not known, then only
    # `min_racks` speaks for racks.
    rack_failure_probability: float = 0.0
    # Most bytes of state that one plan may move; 0: as many as pay.
    max_moved_bytes: int = 0
    # Bytes that a rank has for weights, master weights and moments, where layers and shards move;
    # 0: not told, and nothing is bounded.
    memory_bytes: int = 0
    # Whether a plan may leave a slow rank without work: it stands by, and comes back when a probe
    # finds it well.
    may_leave_out: bool = False
    # Largest share of a job's ranks that may be acted on at once (circuit breaker).
    max_acted_ratio: float = 0.5
    # Weight of the newest step in the running mean of expert loads.
    load_ema: float = 0.1

    def __post_init__(self) -> None:
        one_of(self, "mode", "act", "observe", "approve")
        one_of(self, "approve", "moves", "all")
        at_least(
            self, 0.0, "min_gain", "rebalance_min_gain", "move_s_per_byte", "plan_s", "restart_s"
        )
        at_least(self, 1, "horizon_steps", "min_hosts", "min_nodes", "min_racks")
        at_least(self, 0, "min_steps_between_plans", "settle_steps", "max_moved_bytes")
        at_least(self, 0, "memory_bytes")
        positive(self, "load_ema", "max_acted_ratio", "approve_within_s")
        at_most(self, LONGEST_WAIT_S, "approve_within_s")
        for name in ("failure_probability", "rack_failure_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        if self.load_ema > 1.0:
            raise ValueError(f"load_ema: expected at most 1, got {self.load_ema}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """The central service."""

    # host:port of gRPC; loopback unless you say otherwise.
    listen: str = f"127.0.0.1:{GRPC_PORT}"
    # Whether to listen beyond loopback without encryption, or without knowing who calls.
    insecure: bool = False
    # host:port of the Prometheus endpoint; empty: none.
    metrics_listen: str = ""
    # host:port of the web page; empty: none. Needs pacekeeper[web].
    web: str = ""
    # SQLite file with jobs, incidents, decisions and layouts.
    store: str = "pacekeeper.sqlite"
    # Seconds between two ticks: policy and blindness are looked at then.
    tick_interval_s: float = 0.2
    # Seconds without a record before a job counts as blind.
    blind_after_s: float = 30.0
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    webhook: WebhookConfig = field(default_factory=WebhookConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        positive(self, "tick_interval_s", "blind_after_s")
        if not self.store:
            raise ValueError("store: expected a file, got ''")
        others = [name for name in ("metrics_listen", "web") if getattr(self, name)]
        address(self, "listen", *others, first_port=0)


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
    lost_tokens_limit: float = PLT_LIMIT
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
        at_least(self, SHORTEST_DOCUMENT_TOKENS, "row_tokens")
        positive(self, "learning_rate", "emulated_step_s", "tick_s", "peer_timeout_s")
        at_least(self, 0.0, "emulated_jitter", "weight_decay", "balance_loss")
        # A step of AdamW moves every weight by about the learning rate.
        at_most(self, 1.0, "learning_rate", "emulated_jitter")
        at_most(self, 1.0 / self.learning_rate, "weight_decay")  # beyond, signs change
        at_most(self, LONGEST_WAIT_S, "emulated_step_s", "tick_s", "peer_timeout_s")
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
        one_of(self, "expert_order", *Order)
        one_of(self, "partial_state", "both", "weights", "moments")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype: expected 'float32' or 'float64', got {self.dtype!r}")
        name = self.resume.rpartition("/")[2]
        if self.resume not in ("auto", "never") and CheckpointId.of_name(name) is None:
            raise ValueError(
                f"resume: expected 'auto', 'never' or the path of a checkpoint (its directory's "
                f"name is like {CheckpointId(life=0, generation=1, step=100).name}), "
                f"got {self.resume!r}"
            )
