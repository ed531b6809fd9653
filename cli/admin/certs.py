"""`pacekeeper certs`: a private authority, and certificates of nodes, people and controllers."""

import json
from pathlib import Path
from typing import Any

import click

from pacekeeper.core.config.security import TRUST_DOMAIN
from pacekeeper.core.errors import ConfigError, ExitCode, PacekeeperError

_DIRECTORY = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default="pki",
    show_default=True,
    help="Of the authority; its key never leaves it.",
)
_DAYS = click.option("--days", type=click.IntRange(1, 825), help="Until it ends [default: 7].")


@click.group()
def command() -> None:
    """A private authority: certificates of nodes, people and controllers.

    A fleet with an authority of its own needs none of this: docs/security.md says what names its
    certificates must have.
    """


@command.command("init")
@_DIRECTORY
@click.option("--name", default="pacekeeper authority", show_default=True, help="Its own name.")
@click.option("--days", type=click.IntRange(1, 3650), help="Until it ends [default: 1825].")
def init(directory: Path, name: str, days: int | None) -> None:
    """Make an authority."""
    from pacekeeper.cli.admin import ca

    made = ca.found(directory, name, days or ca.CA_DAYS, ca.utc_now())
    click.echo(f"{made}: give it to everybody; {made.with_suffix('.key')}: to nobody")


@command.command("issue")
@_DIRECTORY
@_DAYS
@click.option("--host", "hosts", multiple=True, help="DNS name or IP of who answers; repeatable.")
@click.option("--trust-domain", default=TRUST_DOMAIN, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Path without ending [default: KIND-NAME in the authority's directory].",
)
@click.argument("kind", type=click.Choice(["node", "operator", "viewer", "controller", "metrics"]))
@click.argument("name")
def issue(
    directory: Path,
    days: int | None,
    hosts: tuple[str, ...],
    trust_domain: str,
    out: Path | None,
    kind: str,
    name: str,
) -> None:
    """Make a certificate and its key: OUT.crt and OUT.key."""
    from pacekeeper.cli.admin import ca

    made = ca.issue(
        directory,
        ca.Kind(kind),
        name,
        hosts=hosts,
        domain=trust_domain,
        days=days or ca.DAYS,
        now=ca.utc_now(),
        out=out or directory / f"{kind}-{name}",
    )
    _say(made)


@command.command("renew")
@_DIRECTORY
@_DAYS
@click.option("--within", type=click.IntRange(0), help="Only what ends within so many days.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def renew(directory: Path, days: int | None, within: int | None, files: tuple[Path, ...]) -> None:
    """Renew certificates FILES.crt in place: the same identity, a new key, a new end.

    Who uses them needs no restart: files that changed are read at the next connection.
    """
    from pacekeeper.cli.admin import ca

    now = ca.utc_now()
    for file in files:
        if file.suffix != ".crt":
            raise ConfigError(f"{file}: expected a file NAME.crt, its key beside it")
        if within is not None and (ca.show(file).ends - now).days >= within:
            click.echo(f"{file}: not yet")
            continue
        _say(ca.renew(directory, file, days or ca.DAYS, now))


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.pass_context
def show(ctx: click.Context, as_json: bool, files: tuple[Path, ...]) -> None:
    """Say whose certificates these are and until when.

    Ends with code 3 where one is over, or is none; with code 4 where a file is not there or can not
    be read, also where others are over: the highest code counts.
    """
    from pacekeeper.cli.admin import ca

    now, told, codes = ca.utc_now(), list[dict[str, Any]](), [ExitCode.OK]
    for file in files:
        try:
            one = ca.show(file)
        except PacekeeperError as error:
            codes.append(error.exit_code)
            told.append({"file": str(file), "trouble": error.what})
            if not as_json:
                click.echo(f"{error.what}")
            continue
        if one.is_over(now):
            codes.append(ConfigError.exit_code)
        told.append(_plain(one, now) | {"trouble": ""})
        if not as_json:
            _say(file)
    if as_json:
        click.echo(json.dumps(told))
    ctx.exit(int(max(codes)))


def _plain(one: Any, now: Any) -> dict[str, Any]:
    return {
        "file": one.file,
        "identity": one.identity,
        "hosts": list(one.hosts),
        "issuer": one.issuer,
        "is_authority": one.is_authority,
        "begins_unix_s": one.begins.timestamp(),
        "ends_unix_s": one.ends.timestamp(),
        "is_over": one.is_over(now),
        "sha256": one.sha256,
    }


def _say(file: Path) -> None:
    """One line on a certificate."""
    from pacekeeper.cli.admin import ca

    one, now = ca.show(file), ca.utc_now()
    whose = "an authority" if one.is_authority else one.identity or "no identity"
    at = f" at {', '.join(one.hosts)}" if one.hosts else ""
    state = (
        "over" if one.is_over(now) else f"{(one.ends - now).total_seconds() / 86400:.1f} days left"
    )
    click.echo(f"{one.file}: {whose}{at}, until {one.ends:%Y-%m-%d %H:%M} UTC ({state})")
