"""`pacekeeper agent`: the daemon of one node."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from pacekeeper.core.config import AgentConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.toml_reader import override, read_config


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [agent].")
@click.option("--controller", help="HOST:PORT of the controller.")
@click.option("--ring-dir", help="Where this node's ranks write their rings.")
@click.option("--node", help="This node's name (default: the host name).")
@click.option("--metrics-listen", help="HOST:PORT for Prometheus; empty: none.")
def command(
    config_file: str | None,
    controller: str | None,
    ring_dir: str | None,
    node: str | None,
    metrics_listen: str | None,
) -> None:
    """Run the daemon of this node: reads rings and NVML, reports to the controller.

    Training never depends on it. Ends cleanly on SIGTERM.
    """
    config = AgentConfig()
    if config_file is not None:
        try:
            text = Path(config_file).read_text()
        except OSError as error:
            raise ConfigError(f"{config_file}: {error.strerror}") from None
        config = read_config(AgentConfig, text, file=config_file)
    config = override(
        config,
        controller=controller,
        ring_dir=ring_dir,
        node=node,
        metrics_listen=metrics_listen,
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s agent %(message)s", stream=sys.stderr
    )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from pacekeeper.agent.runtime import Agent

    asyncio.run(_run(Agent, config))


async def _run(make: type, config: AgentConfig) -> None:
    await make(config).run()
