"""`pacekeeper agent`: the daemon of one node."""

import asyncio
import os

import click

from pacekeeper.cli.common.service_logging import log_lines
from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.agent import AgentConfig


@click.command()
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [agent] and [tls]."
)
@click.option("--controller", help="HOST:PORT of the controller.")
@click.option("--ring-dir", help="Where this node's ranks write their rings.")
@click.option("--node", help="This node's name (default: the host name).")
@click.option(
    "--rack",
    envvar="PACEKEEPER_RACK",
    help="What this node fails together with (or the environment's PACEKEEPER_RACK).",
)
@click.option("--record", "record_dir", help="Keep trace files for `replay` in this directory.")
@click.option("--metrics-listen", help="HOST:PORT for Prometheus; empty: none.")
@click.option("--insecure", is_flag=True, default=None, help="Go beyond loopback in the clear.")
def command(
    config_file: str | None,
    controller: str | None,
    ring_dir: str | None,
    node: str | None,
    rack: str | None,
    record_dir: str | None,
    metrics_listen: str | None,
    insecure: bool | None,
) -> None:
    """Run the daemon of this node: reads rings and NVML, reports to the controller.

    Training never depends on it. Ends cleanly on SIGTERM.
    """
    config = settings(
        AgentConfig,
        config_file,
        controller=controller,
        ring_dir=ring_dir,
        node=node,
        rack=rack,
        record_dir=record_dir,
        metrics_listen=metrics_listen,
        insecure=insecure,
    )
    log_lines("agent")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from pacekeeper.agent.daemon import Agent

    asyncio.run(_run(Agent, config))


async def _run(make: type, config: AgentConfig) -> None:
    await make(config).run()
