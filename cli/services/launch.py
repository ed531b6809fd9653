"""`pacekeeper launch`: start and supervise the ranks of one node."""

import logging
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource

from pacekeeper.cli.common.options import option_group
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.common.settings import load_settings
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.elastic.agreement.job_key import MIN_SECRET_BYTES, UNSIGNED, JobKey

_SET_BY_RUNNING_JOB = (
    "node_rank", "num_nodes", "rendezvous", "steps", "seed", "checkpoint_dir",
    "checkpoint_period_steps", "checkpoint_window_steps", "snapshot_period_steps",
    "experts_per_checkpoint", "resume", "max_restarts", "device", "emulate",
)  # fmt: skip
_SET_BY_TORCHRUN = ("node_rank", "num_nodes", "ranks_per_node", "rendezvous")
_NO_SECRET_UNDER_TORCHRUN = ("secret_file", "insecure_rendezvous")
_SECRET = "PACEKEEPER_JOB_SECRET"
_MAX_SECRET_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """This node's place in the job and its directories, as given on the command line."""

    node_rank: int
    num_nodes: int
    ranks_per_node: int
    rendezvous: str
    join_at: str | None
    secret_file: str | None
    insecure_rendezvous: bool
    ring_dir: str | None
    run_dir: str | None
    faults_dir: str

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each store that --join names."""
        parts = (part.strip() for part in (self.join_at or "").split(","))
        return tuple(filter(None, parts))

    def job_key(self, environment: Mapping[str, str]) -> JobKey:
        """The key of the job's secret; of a random one for a job of one node.

        Raises:
            ConfigError: The secret is missing, too short, or readable by other users.
        """
        if self.insecure_rendezvous:
            if self.secret_file:
                raise ConfigError(
                    "--insecure-rendezvous: a secret is given, too",
                    remedy=f"leave out one of both: --secret-file is also read from {_SECRET}_FILE",
                )
            return UNSIGNED
        if self.secret_file:
            return JobKey(_long_enough(_read_secret(Path(self.secret_file)), self.secret_file))
        if _SECRET in environment:
            return JobKey(_long_enough(environment[_SECRET].strip().encode(), _SECRET))
        if self.num_nodes == 1 and self.join_at is None:
            return JobKey(secrets.token_bytes(32))
        what = (
            "a node that joins" if self.join_at is not None else f"a job of {self.num_nodes} nodes"
        )
        raise ConfigError(
            f"{what} needs the job's secret, and none is given",
            remedy="make one, `(umask 077; openssl rand -hex 32 > FILE)`, copy it to all nodes and "
            f"give it by --secret-file FILE, {_SECRET}_FILE or {_SECRET}; "
            "--insecure-rendezvous starts without one",
        )


def _read_secret(path: Path) -> bytes:
    """Raises ConfigError where the file is unreadable, or readable by other users."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SECRET_BYTES:
                raise ConfigError(f"{path}: expected a file of at most {_MAX_SECRET_BYTES} bytes")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: users other than its owner can access it", remedy=f"chmod 600 {path}"
                )
            return file.read(_MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _long_enough(secret: bytes, place: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{place}: expected a secret of at least {MIN_SECRET_BYTES} bytes, got {len(secret)}",
            remedy="make one by `openssl rand -hex 32`",
        )
    return secret


@click.command()
@click.option(
    "--config",
    "config_file",
    type=PathType(dir_okay=False),
    help="TOML file with [engine] and [agent].",
)
@click.option("--job", help="Name of the job, also of its directory below the ring directory.")
@option_group(
    "node",
    NodeOptions,
    click.option(
        "--node-rank", type=int, default=0, show_default=True, help="Number of this node."
    ),
    click.option("--num-nodes", type=int, default=1, show_default=True, help="Nodes of the job."),
    click.option(
        "--ranks-per-node", type=int, default=2, show_default=True, help="Ranks per node."
    ),
    click.option(
        "--rendezvous",
        default="127.0.0.1:29400",
        show_default=True,
        help="HOST:PORT of the store on node 0.",
    ),
    click.option(
        "--join",
        "join_at",
        metavar="HOST:PORT,...",
        help="Join a running job; at least one of these stores must be alive.",
    ),
    click.option(
        "--secret-file",
        envvar=f"{_SECRET}_FILE",
        show_envvar=True,
        help="File with the secret that all nodes of the job share, mode 0600 [default: the "
        "environment's PACEKEEPER_JOB_SECRET; for a job of one node, a random one].",
    ),
    click.option(
        "--insecure-rendezvous",
        is_flag=True,
        help="Use no secret: any process that reaches the stores can change the job.",
    ),
    click.option(
        "--ring-dir",
        help="Directory in which this node's agent reads rings [default: ring_dir of [agent]].",
    ),
    click.option("--run-dir", help="Directory of the step logs [default: runs/JOB]."),
    click.option(
        "--faults",
        "faults_dir",
        default="",
        help="Inject the faults described by files in this directory; with --emulate or "
        "--device cpu.",
    ),
)
@click.option("--steps", type=int, help="Number of training steps.")
@click.option("--seed", type=int, help="Seed of weights and data order.")
@click.option(
    "--checkpoint-dir",
    help="Checkpoint directory shared by all nodes; each job has a sub-directory.",
)
@click.option(
    "--checkpoint-every",
    "checkpoint_period_steps",
    type=int,
    help="Steps between checkpoints (0 = choose automatically).",
)
@click.option(
    "--window-steps",
    "checkpoint_window_steps",
    type=int,
    help="Number of steps over which an exact checkpoint is spread (0 = choose automatically).",
)
@click.option(
    "--snapshot-every",
    "snapshot_period_steps",
    type=int,
    help="Steps between in-memory snapshots, replicated to another node (0 = none).",
)
@click.option(
    "--experts-per-checkpoint",
    type=int,
    help="Experts per layer in each checkpoint, in rotation (0 = all).",
)
@click.option("--resume", help="auto, never, or the path of a checkpoint to restore.")
@click.option(
    "--max-restarts",
    type=int,
    help="Maximum number of restarts of the whole job from its newest checkpoint.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    help="Where ranks compute; auto: CUDA where there is a device.",
)
@click.option(
    "--emulate",
    is_flag=True,
    default=None,
    help="Let ranks take the times of an emulated device, on CPU.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config_file: str | None,
    job: str | None,
    node: NodeOptions,
    **given: int | str | bool | None,
) -> None:
    """Start and supervise this node's ranks of a training job.

    Run it on every node with that node's --node-rank. Ctrl-C, SIGTERM and SIGHUP end all ranks
    after the current step.

    The ranks train a mixture-of-experts model of Hugging Face (docs/engine.md). If a rank dies, the
    others continue; the exit code is 0 if the survivors of this node finish. With --join, the ranks
    of a new or recovered node prepare while the job trains and join between two steps. Settings are
    those of the running job. Launchers and ranks sign their messages with the job's secret
    (docs/security.md).

    Started by torchrun, this process is one rank of the job, which survives no death then.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s launch %(message)s", stream=sys.stderr
    )
    # Else torch prints C++ frames on every terminal if a node dies.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ring_dir = load_settings(AgentConfig, config_file, ring_dir=node.ring_dir).ring_dir
    if node.join_at is not None:
        _reject(ctx, _SET_BY_RUNNING_JOB, "is set by the running job: leave it out with --join")
        ctx.exit(_join(node, ring_dir, job or ""))
    config = load_settings(EngineConfig, config_file, job=job, **given)
    for name in ("model", "data"):
        if not getattr(config, name):
            place = f"{config_file}: " if config_file else "no --config: "
            raise ConfigError(f"{place}[engine] {name}: missing", remedy="see docs/engine.md")
    if node.faults_dir and not config.emulate and config.device != "cpu":
        raise click.UsageError(
            "--faults slows an emulated device, or ranks on CPU: add --emulate or --device cpu"
        )
    from pacekeeper.trainer.engine.rank_process import is_a_rank, run_rank

    if not is_a_rank(os.environ):
        ctx.exit(_start(node, ring_dir, config))
    _reject(ctx, _SET_BY_TORCHRUN, "is set by torchrun: give it there")
    _reject(ctx, _NO_SECRET_UNDER_TORCHRUN, "does nothing in torchrun's own store: leave it out")
    run_dir = node.run_dir or f"runs/{config.job}"
    run_rank(config, ring_dir, run_dir, node.faults_dir, os.environ)


def _reject(ctx: click.Context, names: tuple[str, ...], reason: str) -> None:
    """Raise UsageError if one of these options is on the command line."""
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            (option,) = (p.opts[0] for p in ctx.command.params if p.name == name)
            raise click.UsageError(f"{option} {reason}")


def _join(node: NodeOptions, ring_dir: str, job: str) -> int:
    from pacekeeper.trainer.elastic.joining.node_join import JoinSpec, join

    try:
        spec = JoinSpec(
            addresses=node.join_addresses,
            ranks_per_node=node.ranks_per_node,
            ring_dir=ring_dir,
            run_dir=node.run_dir or "",
            faults_dir=node.faults_dir,
            job=job,
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from None
    return int(join(replace(spec, key=node.job_key(os.environ))))


def _start(node: NodeOptions, ring_dir: str, config: EngineConfig) -> int:
    from pacekeeper.trainer.elastic.launch_spec import NodeSpec
    from pacekeeper.trainer.elastic.restart_policy import supervise_with_restarts

    try:
        spec = NodeSpec(
            config=config,
            node_rank=node.node_rank,
            num_nodes=node.num_nodes,
            ranks_per_node=node.ranks_per_node,
            rendezvous=node.rendezvous,
            ring_dir=ring_dir,
            run_dir=node.run_dir or f"runs/{config.job}",
            faults_dir=node.faults_dir,
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from None
    return int(supervise_with_restarts(replace(spec, key=node.job_key(os.environ))))
