"""`pacekeeper certs`: a private authority and its certificates for nodes, users, controllers."""

import json
from pathlib import Path
from typing import Any

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType
from pacekeeper.core.config.security import TRUST_DOMAIN
from pacekeeper.core.errors import ConfigError, ExitCode, PacekeeperError

_DIRECTORY = click.option(
    "--dir",
    "directory",
    type=PathType(file_okay=False, path_type=Path),
    default="pki",
    show_default=True,
    help="Directory of the authority.",
)
_DAYS = click.option(
    "--days", type=click.IntRange(1, 825), help="Days until the certificate expires [default: 7]."
)


@click.group()
def command() -> None:
    """Create a private authority and issue certificates for nodes, users and controllers.

    A fleet with its own authority does not need it: docs/security.md lists the names that
    certificates must contain.
    """


@command.command("init")
@_DIRECTORY
@click.option(
    "--name",
    default="pacekeeper authority",
    show_default=True,
    help="Common name of the authority.",
)
@click.option(
    "--days", type=click.IntRange(1, 3650), help="Days until the authority expires [default: 1825]."
)
def init(directory: Path, name: str, days: int | None) -> None:
    """Create an authority."""
    from pacekeeper.cli.admin import ca

    made = ca.create_authority(directory, name, days or ca.CA_DAYS, ca.utc_now())
    click.echo(f"{made}: install it on every machine; {made.with_suffix('.key')}: keep it secret")


@command.command("issue")
@_DIRECTORY
@_DAYS
@click.option(
    "--host", "hosts", multiple=True, help="DNS name or IP address of a server; repeatable."
)
@click.option(
    "--trust-domain",
    default=TRUST_DOMAIN,
    show_default=True,
    help="Trust domain of the SPIFFE identity.",
)
@click.option(
    "--out",
    type=PathType(path_type=Path),
    help="Path without suffix [default: KIND-NAME in the authority's directory].",
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
    """Issue a certificate OUT.crt with its key OUT.key."""
    from pacekeeper.cli.admin import ca

    made = ca.issue_certificate(
        directory,
        ca.CertificateSubject(kind=ca.Kind(kind), name=name, hosts=hosts, domain=trust_domain),
        days=days or ca.DAYS,
        now=ca.utc_now(),
        out=out or directory / f"{kind}-{name}",
    )
    _print_certificate(made)


@command.command("renew")
@_DIRECTORY
@_DAYS
@click.option(
    "--within",
    type=click.IntRange(0),
    help="Renew only certificates that expire within N days.",
    metavar="N",
)
@click.argument("files", nargs=-1, required=True, type=PathType(path_type=Path))
def renew(directory: Path, days: int | None, within: int | None, files: tuple[Path, ...]) -> None:
    """Renew certificates in place: same identity, new key, new expiry.

    Services need no restart: they read changed files at the next connection.
    """
    from pacekeeper.cli.admin import ca

    now = ca.utc_now()
    for file in files:
        if file.suffix != ".crt":
            raise ConfigError(f"{file}: expected a file NAME.crt with its key NAME.key")
        if within is not None and (ca.read_certificate(file).ends - now).days >= within:
            click.echo(f"{file}: not renewed, valid for more than {within} days")
            continue
        _print_certificate(ca.renew_certificate(directory, file, days or ca.DAYS, now))


@command.command("show")
@json_option()
@click.argument("files", nargs=-1, required=True, type=PathType(path_type=Path))
@click.pass_context
def show(ctx: click.Context, as_json: bool, files: tuple[Path, ...]) -> None:
    """Show identity, hosts and expiry of certificates.

    Exit code 3: a file is expired or not a certificate. 4: a file is not readable. The highest code
    counts.
    """
    from pacekeeper.cli.admin import ca

    now, documents, codes = ca.utc_now(), list[dict[str, Any]](), [ExitCode.OK]
    for file in files:
        try:
            one = ca.read_certificate(file)
        except PacekeeperError as error:
            codes.append(error.exit_code)
            documents.append({"file": str(file), "error": error.what})
            if not as_json:
                click.echo(f"{error.what}")
            continue
        if one.is_expired(now):
            codes.append(ConfigError.exit_code)
        documents.append(_as_document(one, now) | {"error": ""})
        if not as_json:
            _print_certificate(file)
    if as_json:
        click.echo(json.dumps(documents))
    ctx.exit(int(max(codes)))


def _as_document(one: Any, now: Any) -> dict[str, Any]:
    return {
        "file": one.file,
        "identity": one.identity,
        "hosts": list(one.hosts),
        "issuer": one.issuer,
        "is_authority": one.is_authority,
        "begins_unix_s": one.begins.timestamp(),
        "ends_unix_s": one.ends.timestamp(),
        "is_expired": one.is_expired(now),
        "sha256": one.sha256,
    }


def _print_certificate(file: Path) -> None:
    """Print one line on a certificate."""
    from pacekeeper.cli.admin import ca

    one, now = ca.read_certificate(file), ca.utc_now()
    holder = "authority" if one.is_authority else one.identity or "no identity"
    at = f" at {', '.join(one.hosts)}" if one.hosts else ""
    state = (
        "expired"
        if one.is_expired(now)
        else f"{(one.ends - now).total_seconds() / 86400:.1f} days left"
    )
    click.echo(f"{one.file}: {holder}{at}, until {one.ends:%Y-%m-%d %H:%M} UTC ({state})")
