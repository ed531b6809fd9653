"""`pacekeeper tokens`: bearer tokens that a controller takes; only their digests are kept."""

import json
import secrets
import time
from pathlib import Path

import click

from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import (
    Records,
    TokenRecord,
    change_tokens,
    format_token,
    read_tokens,
    secret_digest,
)
from pacekeeper.core.errors import ConfigError

DAYS = 30
_DAY_S = 86400.0
_FILE = click.option(
    "--file",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="As in [access] tokens of the controller.",
)


@click.group()
def command() -> None:
    """Bearer tokens that a controller takes.

    A running controller needs no restart: it reads the file again when it changes.
    """


@command.command("add")
@_FILE
@click.option("--days", type=click.IntRange(1, 825), default=DAYS, show_default=True)
@click.argument("role", type=click.Choice(["viewer", "operator", "agent"]))
@click.argument("name")
def add(path: Path, days: int, role: str, name: str) -> None:
    """Make a token for NAME (of an agent: its node) and print it; it can not be had again."""
    secret, now_unix_s = secrets.token_urlsafe(32), time.time()
    try:
        record = TokenRecord(
            token_id=secrets.token_hex(4),
            secret_sha256=secret_digest(secret),
            role=Role(role),
            name=name,
            created_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + days * _DAY_S,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def with_it(records: Records) -> Records:
        kept = [one for one in records if one.expires_unix_s > now_unix_s]
        return (*kept, record)  # those that are over go

    change_tokens(path, with_it)
    click.echo(format_token(record.token_id, secret))


@command.command("ls")
@_FILE
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def ls(path: Path, as_json: bool) -> None:
    """List tokens: id, role, name and end."""
    now_unix_s = time.time()
    records = read_tokens(path)
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "token_id": one.token_id,
                        "role": one.role,
                        "name": one.name,
                        "created_unix_s": one.created_unix_s,
                        "expires_unix_s": one.expires_unix_s,
                        "is_over": one.expires_unix_s <= now_unix_s,
                    }
                    for one in records
                ]
            )
        )
        return
    if not records:
        click.echo("no tokens")
    for one in records:
        left_days = (one.expires_unix_s - now_unix_s) / _DAY_S
        state = f"{left_days:.1f} days left" if left_days > 0 else "expired"
        click.echo(f"{one.token_id} {one.role} {one.name} ({state})")


@command.command("revoke")
@_FILE
@click.argument("token_ids", nargs=-1, required=True)
def revoke(path: Path, token_ids: tuple[str, ...]) -> None:
    """Take tokens back, from the next call on."""

    def without(records: Records) -> Records:
        unknown = sorted(set(token_ids) - {one.token_id for one in records})
        if unknown:
            raise ConfigError(f"no token {', '.join(unknown)} in {path}")
        return tuple(one for one in records if one.token_id not in token_ids)

    change_tokens(path, without)
    click.echo(f"{len(set(token_ids))} revoked")
