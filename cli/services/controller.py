"""`pacekeeper controller`: the central service."""

import asyncio
import gc
import os
from dataclasses import replace

import click

from pacekeeper.cli.common.service_logging import log_lines
from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import override

GARBAGE_AFTER = 100_000  # allocations


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML.")
@click.option("--listen", help="HOST:PORT of gRPC (port 0: any free one).")
@click.option("--store", help="SQLite file.")
@click.option("--metrics-listen", help="HOST:PORT for Prometheus; empty: none.")
@click.option("--web", help="HOST:PORT of the web page; empty: none.")
@click.option("--lease", help="etcd://HOST:PORT/KEY or k8s://NAMESPACE/NAME: one of several.")
@click.option("--advertise", help="HOST:PORT where the other controllers reach this one.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback unprotected.")
def command(
    config_file: str | None,
    listen: str | None,
    store: str | None,
    metrics_listen: str | None,
    web: str | None,
    lease: str | None,
    advertise: str | None,
    insecure: bool | None,
) -> None:
    """Run the central controller: many jobs, one service.

    Training never depends on it. Everything that must last is in the store: start it again and it
    goes on.
    """
    config = settings(
        ControllerConfig,
        config_file,
        listen=listen,
        store=store,
        metrics_listen=metrics_listen,
        web=web,
        insecure=insecure,
    )
    config = replace(config, lease=override(config.lease, url=lease, advertise=advertise))
    log_lines("controller")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters we say ourselves
    # Our matrices are small: threads of BLAS only wait for each other (11 s of planning for 0.7 s).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # State is replaced, never changed: no cycles, and a fleet's is millions of values to walk.
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)
    asyncio.run(_run(config))


async def _run(config: ControllerConfig) -> None:
    if config.lease.url:
        from pacekeeper.controller.ha import leader_election

        await leader_election.run(config)
        return
    from pacekeeper.controller.app import Controller

    await Controller(config).run()
