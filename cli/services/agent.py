"""`pacekeeper agent`: run the daemon of one node."""

import asyncio
import os

import click

from pacekeeper.cli.common.options import settings_options
from pacekeeper.cli.common.service_logging import configure_logging
from pacekeeper.core.config.agent import AgentConfig


@click.command()
@settings_options(
    AgentConfig,
    "TOML file with [agent] and [tls].",
    click.option("--controller", help="HOST:PORT of the controller."),
    click.option("--ring-dir", help="Directory of the rings that this node's ranks write."),
    click.option("--node", help="Name of this node [default: the hostname]."),
    click.option(
        "--rack",
        envvar="PACEKEEPER_RACK",
        help="Failure domain of this node [env: PACEKEEPER_RACK].",
    ),
    click.option(
        "--record",
        "record_dir",
        help="Write trace files for `pacekeeper replay` to this directory.",
    ),
    click.option("--metrics-listen", help="HOST:PORT of the Prometheus endpoint; empty: none."),
    click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="Allow unencrypted connections beyond loopback.",
    ),
)
def command(config: AgentConfig) -> None:
    """Run the daemon of this node.

    It reads the rings and NVML and reports to the controller. Training does not depend on it. It
    stops cleanly on SIGTERM.
    """
    configure_logging("agent")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from pacekeeper.agent.daemon import Agent

    asyncio.run(_run(Agent, config))


async def _run(make: type, config: AgentConfig) -> None:
    await make(config).run()
