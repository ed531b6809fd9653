"""`pacekeeper launch`: one supervisor per node starts and watches this node's ranks."""

import logging
import os
import sys

import click
from click.core import ParameterSource

from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

_TOLD_BY_THE_JOB = (
    "node_rank", "num_nodes", "rendezvous", "steps", "seed", "clock", "checkpoint_dir",
    "checkpoint_period_steps", "checkpoint_window_steps", "snapshot_period_steps",
    "experts_per_checkpoint", "resume", "max_restarts",
)  # fmt: skip


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML.")
@click.option("--job", help="Name of the job; one directory below the ring directory.")
@click.option("--node-rank", type=int, default=0, show_default=True)
@click.option("--num-nodes", type=int, default=1, show_default=True)
@click.option("--ranks-per-node", type=int, default=2, show_default=True)
@click.option("--rendezvous", default="127.0.0.1:29400", show_default=True, help="Node 0's store.")
@click.option(
    "--join",
    "join_at",
    metavar="HOST:PORT,...",
    help="Join the job that is running at these stores, of which one must be alive.",
)
@click.option("--ring-dir", help="Where this node's agent reads (default: that of [agent]).")
@click.option("--run-dir", help="Step logs (default: runs/JOB).")
@click.option("--faults", "faults_dir", default="", help="Obey fault files in this directory.")
@click.option("--steps", type=int)
@click.option("--seed", type=int)
@click.option("--checkpoint-dir", help="Seen by all nodes; one directory below it per job.")
@click.option(
    "--checkpoint-every",
    "checkpoint_period_steps",
    type=int,
    help="Steps between two checkpoints; 0: measured.",
)
@click.option(
    "--window-steps",
    "checkpoint_window_steps",
    type=int,
    help="That an exact one is spread over; 0: measured.",
)
@click.option(
    "--snapshot-every",
    "snapshot_period_steps",
    type=int,
    help="Steps between two copies of the state in memory, also on another node; 0: none.",
)
@click.option("--experts-per-checkpoint", type=int, help="Of each layer, in turn; 0: all.")
@click.option("--resume", help="auto, never, or the path of a checkpoint.")
@click.option("--max-restarts", type=int, help="Of everything, from the newest checkpoint.")
@click.option("--clock", type=click.Choice(["auto", "device", "cpu", "emulated"]))
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config_file: str | None,
    job: str | None,
    node_rank: int,
    num_nodes: int,
    ranks_per_node: int,
    rendezvous: str,
    join_at: str | None,
    ring_dir: str | None,
    run_dir: str | None,
    faults_dir: str,
    **given: int | str | None,
) -> None:
    """Start and watch this node's ranks of a training job.

    Run it on every node with its --node-rank. When a rank dies the others go on; it ends with 0
    when the survivors of this node do. Ctrl-C, SIGTERM, a closed terminal: all end after a step.

    With --join, on a node that is new, or whose ranks died: its ranks get ready while the others
    train, and come in between two steps. Settings are those of the running job.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s launch %(message)s", stream=sys.stderr
    )
    # A node that dies would put torch's C++ frames onto every terminal; ours is one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rings = settings(AgentConfig, config_file, ring_dir=ring_dir).ring_dir
    if join_at is not None:
        _refuse_what_the_job_tells(ctx)
        ctx.exit(_join(join_at, ranks_per_node, rings, run_dir or "", faults_dir, job or ""))
    config = settings(TrainConfig, config_file, job=job, **given)
    from pacekeeper.trainer.elastic.launch_spec import NodeSpec
    from pacekeeper.trainer.elastic.restart_policy import supervise_to_the_end

    try:
        spec = NodeSpec(
            config=config,
            node_rank=node_rank,
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            rendezvous=rendezvous,
            ring_dir=rings,
            run_dir=run_dir or f"runs/{config.job}",
            faults_dir=faults_dir,
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from None
    ctx.exit(int(supervise_to_the_end(spec)))


def _refuse_what_the_job_tells(ctx: click.Context) -> None:
    for name in _TOLD_BY_THE_JOB:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            (option,) = (p.opts[0] for p in ctx.command.params if p.name == name)
            raise click.UsageError(f"{option} is the running job's: leave it out with --join")


def _join(
    at: str,
    ranks_per_node: int,
    ring_dir: str,
    run_dir: str,
    faults_dir: str,
    job: str,
) -> int:
    from pacekeeper.trainer.elastic.node_join import JoinSpec, join

    try:
        spec = JoinSpec(
            addresses=tuple(part.strip() for part in at.split(",") if part.strip()),
            ranks_per_node=ranks_per_node,
            ring_dir=ring_dir,
            run_dir=run_dir,
            faults_dir=faults_dir,
            job=job,
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from None
    return int(join(spec))
