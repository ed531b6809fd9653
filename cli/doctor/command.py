"""`pacekeeper doctor`: print the checks of this machine or of a settings file."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.doctor.checks import check_table, exit_code_of
from pacekeeper.cli.doctor.machine_checks import run_checks
from pacekeeper.core.telemetry.shm_ring import DEFAULT_RING_DIR


@click.command()
@click.option(
    "--ring-dir",
    default=DEFAULT_RING_DIR,
    show_default=True,
    help="Directory of the rings to check.",
)
@click.option(
    "--config",
    "config_file",
    type=PathType(dir_okay=False),
    help="Check this TOML file instead of the machine, as the service that reads it would.",
)
@click.option(
    "--as",
    "readers",
    type=click.Choice(["controller", "agent", "client"]),
    multiple=True,
    help="Service that reads --config; repeatable [default: by the tables of the file].",
)
@json_option()
@click.pass_context
def command(
    ctx: click.Context,
    ring_dir: str,
    config_file: str | None,
    readers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check this machine, or a settings file, and print a remedy for every problem.

    \b
    Exit codes (the highest of all checks):
      0   nothing is broken
      3   --config: the file, or a file that it names, is invalid
      4   this machine cannot run a part of pacekeeper, or a ring holds damaged records
      5   a ring or a store has another version
      6   --config: a controller or the database does not answer
      11  --config: the controller denies access
    """
    if config_file is None:
        if readers:
            raise click.UsageError("--as needs --config FILE")
        checks = run_checks(Path(ring_dir))
    else:
        from pacekeeper.cli.doctor.config_checks import check_config

        checks = check_config(config_file, readers)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks]))
    else:
        from rich.console import Console

        Console().print(check_table(checks))
    ctx.exit(int(exit_code_of(checks)))
