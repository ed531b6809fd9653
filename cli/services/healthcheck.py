"""`pacekeeper healthcheck`: is this node fit for work? One line and an exit code, in milliseconds.

It reads the verdict that this node's agent keeps beside the rings, and asks nobody.
"""

import json
import os
import socket
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.node_health import Fitness, NodeHealth

# Whoever drains nodes reads the code: no crash, wrong option or signal may look like UNFIT.
EXIT_CODES = {Fitness.FIT: ExitCode.OK, Fitness.UNFIT: ExitCode.UNFIT, Fitness.UNKNOWN: 2}
_STATUS = {Fitness.FIT: "False", Fitness.UNFIT: "True", Fitness.UNKNOWN: "Unknown"}
MAX_BYTES = 1 << 16


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [agent].")
@click.option("--ring-dir", help="Where this node's agent reads rings.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--node-condition", is_flag=True, help="A patch of a Kubernetes node's status.")
@click.pass_context
def command(
    ctx: click.Context,
    config_file: str | None,
    ring_dir: str | None,
    as_json: bool,
    node_condition: bool,
) -> None:
    """Say whether this node is fit for work, by its agent's word.

    Ends with code 0 (fit), 12 (unfit: a device is lost, must be reset or has no spare memory rows)
    or 2 (unknown: no agent, or no device answers), and prints that word with its reason. Any other
    code is a failure of this command and does not describe the node.
    """
    config = settings(AgentConfig, config_file, ring_dir=ring_dir)
    now_unix_s = time.time()
    try:
        verdict = node_health.current_health(read(Path(config.ring_dir)), now_unix_s=now_unix_s)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        verdict = node_health.unknown_health(
            f"no word of an agent: {why}",
            node=config.node or socket.gethostname(),
            now_unix_s=now_unix_s,
        )
    if node_condition:
        click.echo(json.dumps(as_condition(verdict, now_unix_s=now_unix_s)))
    elif as_json:
        click.echo(json.dumps(asdict(verdict)))
    else:
        click.echo(verdict.line)
    ctx.exit(int(EXIT_CODES[verdict.fitness]))


def read(ring_dir: Path) -> NodeHealth:
    """The verdict that the owner of the ring directory, or root, wrote.

    Everybody may write there: a link is not followed, another's file not believed. Raises OSError
    where it can not be read, ValueError where it is none.
    """
    owners = {0, ring_dir.stat().st_uid}
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(ring_dir / node_health.FILE_NAME, flags), "rb") as file:
        if os.fstat(file.fileno()).st_uid not in owners:
            raise ValueError("its file is not the agent's")
        return node_health.decode_node_health(file.read(MAX_BYTES))


def as_condition(verdict: NodeHealth, *, now_unix_s: float) -> dict[str, Any]:
    """For `kubectl patch node NAME --subresource=status --type=strategic -p ...`."""
    condition = {
        "type": node_health.CONDITION,
        "status": _STATUS[verdict.fitness],
        "reason": verdict.reason,
        "message": verdict.words,
        "lastHeartbeatTime": _moment(now_unix_s),
        "lastTransitionTime": _moment(verdict.since_unix_s),
    }
    return {"status": {"conditions": [condition]}}


def _moment(unix_s: float) -> str:
    """RFC 3339, as Kubernetes writes it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
