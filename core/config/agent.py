"""Settings of the agent, table `[agent]`; each comment gives unit and trade-off."""

from dataclasses import field
from typing import Annotated

from pydantic import PositiveFloat, PositiveInt

from pacekeeper.core.addresses import AGENT_PORT, METRICS_PORT
from pacekeeper.core.config.base import Addresses, NonEmpty, OptionalListener, named, settings
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.telemetry.attachment import NODE_NAME_RULE, is_node_name
from pacekeeper.core.telemetry.shm_ring import DEFAULT_RING_DIR

NodeName = Annotated[str, named(lambda name: not name or is_node_name(name), NODE_NAME_RULE)]


@settings
class AgentConfig:
    """The daemon of one node."""

    # Directory on tmpfs, one sub-directory per job; ranks and agent must both be able to write it.
    ring_dir: NonEmpty = DEFAULT_RING_DIR
    # Name under which this node appears; empty: the host name.
    node: NodeName = ""
    # Name of the rack it stands in, the same for all nodes that one switch or feed takes along.
    # Empty: not told, and plans for its jobs count nodes only.
    rack: NodeName = ""
    # host:port of the controller for agents; of several, with commas: the leader is found.
    controller: Addresses = f"127.0.0.1:{AGENT_PORT}"
    # File with the bearer token to show it; empty: none, the certificate tells the node.
    token_file: str = ""
    # Whether to attach to a controller, and to serve metrics, beyond loopback without encryption.
    insecure: bool = False
    # host:port of the Prometheus endpoint; empty: none.
    metrics_listen: OptionalListener = f"127.0.0.1:{METRICS_PORT}"
    # Seconds between two looks into the rings. Raising it saves CPU and delays findings.
    poll_interval_s: PositiveFloat = 0.1
    # Seconds between two readings of every device (NVML) and of the kernel (load, pressure).
    sample_interval_s: PositiveFloat = 1.0
    # Batches kept while the controller is away; the oldest are dropped and counted beyond it.
    spool_batches: PositiveInt = 4096
    # Seconds without an acknowledgement before the stream is opened anew.
    ack_timeout_s: PositiveFloat = 15.0
    # Longest back-off between two attempts to connect (full jitter).
    reconnect_max_s: PositiveFloat = 10.0
    # Directory for trace files of everything read, for `pacekeeper replay`; empty: none.
    record_dir: str = ""
    # A trace file ends at this size.
    record_max_bytes: PositiveInt = 1 << 30
    # Unix socket on which NVRx's ft_launcher asks whether this node may join; empty: none.
    health_socket: str = ""
    # Unix socket of NVSentinel's platform connector, which is told of changes; empty: none.
    sentinel_socket: str = ""
    # Whether NVSentinel may act on them (cordon, drain, reset); otherwise it stores them.
    sentinel_remediates: bool = False
    # Whether the controller may ask for a dump of the stacks of a rank that hangs (faulthandler in
    # the rank, or py-spy). A rank refuses it by PACEKEEPER_STACK_DUMPS=0 in its environment.
    stack_dumps: bool = True
    tls: TlsConfig = field(default_factory=TlsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
