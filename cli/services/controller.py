"""`pacekeeper controller`: run the central service, alone or as one of several."""

import asyncio
import gc
import os

import click

from pacekeeper.cli.common.options import settings_options
from pacekeeper.cli.common.service_logging import configure_logging
from pacekeeper.core.config.controller import ControllerConfig

GARBAGE_AFTER = 100_000  # allocations


@click.command()
@settings_options(
    ControllerConfig,
    "TOML file with the controller's settings.",
    click.option("--listen", help="HOST:PORT that agents attach to; port 0: any free port."),
    click.option("--api-listen", help="HOST:PORT of commands and status; port 0: any free port."),
    click.option(
        "--store", help="Path of an SQLite file, or postgresql://... of several controllers."
    ),
    click.option("--metrics-listen", help="HOST:PORT of the Prometheus endpoint; empty: none."),
    click.option("--web", help="HOST:PORT of the web page; empty: none."),
    click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="Allow listening beyond loopback without TLS.",
    ),
)
def command(config: ControllerConfig) -> None:
    """Run the central controller; one serves many jobs.

    Training does not depend on it. All durable state is in the store: a restarted controller
    continues from there.
    """
    configure_logging("controller")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the controller logs what matters
    # The matrices are small: with BLAS threads planning took 11 s instead of 0.7 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    collect_rarely()
    asyncio.run(_run(config))


def collect_rarely() -> None:
    """Set the garbage collector: state has no cycles, a full collection would walk all of it."""
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)


async def _run(config: ControllerConfig) -> None:
    if config.is_shared:
        from pacekeeper.controller.ha import leader_election

        await leader_election.run(config)
        return
    from pacekeeper.controller.app.controller import Controller

    await Controller(config).run()
