"""`pacekeeper tokens`: manage the file of bearer tokens, which holds digests only."""

import json
import secrets
import time
from pathlib import Path

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType
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
    type=PathType(dir_okay=False, path_type=Path),
    help="File named by [access] tokens of the controller.",
)


@click.group()
def command() -> None:
    """Add, list and revoke bearer tokens for a controller.

    A running controller rereads the file when it changes.
    """


@command.command("add")
@_FILE
@click.option(
    "--days",
    type=click.IntRange(1, 825),
    default=DAYS,
    show_default=True,
    help="Days until the token expires.",
)
@click.argument("role", type=click.Choice(["viewer", "operator", "agent"]))
@click.argument("name")
def add(path: Path, days: int, role: str, name: str) -> None:
    """Add a token for NAME (for an agent: its node) and print it once."""
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

    def with_new(records: Records) -> Records:
        kept = [one for one in records if one.expires_unix_s > now_unix_s]
        return (*kept, record)  # expired tokens are removed

    change_tokens(path, with_new)
    click.echo(format_token(record.token_id, secret))


@command.command("ls")
@_FILE
@json_option()
def ls(path: Path, as_json: bool) -> None:
    """List tokens: ID, role, name and days left."""
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
                        "is_expired": one.expires_unix_s <= now_unix_s,
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
    """Revoke tokens; the next call with one of them is denied."""

    def without(records: Records) -> Records:
        unknown = sorted(set(token_ids) - {one.token_id for one in records})
        if unknown:
            raise ConfigError(f"no token {', '.join(unknown)} in {path}")
        return tuple(one for one in records if one.token_id not in token_ids)

    change_tokens(path, without)
    click.echo(f"{len(set(token_ids))} tokens revoked")
