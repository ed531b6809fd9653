"""`pacekeeper healthcheck`: report whether this node is fit for work, within milliseconds.

Called by Slurm, node-problem-detector and operators. It reads the verdict file that this node's
agent writes into the ring directory and connects to no service.
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

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.common.settings import load_settings
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.node_health import Fitness, NodeHealth

# Schedulers drain nodes by this code: no crash, wrong option or signal may return UNFIT.
EXIT_CODES = {Fitness.FIT: ExitCode.OK, Fitness.UNFIT: ExitCode.UNFIT, Fitness.UNKNOWN: 2}
_STATUS = {Fitness.FIT: "False", Fitness.UNFIT: "True", Fitness.UNKNOWN: "Unknown"}
MAX_BYTES = 1 << 16


@click.command()
@click.option(
    "--config", "config_file", type=PathType(dir_okay=False), help="TOML file with [agent]."
)
@click.option("--ring-dir", help="Directory in which this node's agent reads rings.")
@json_option()
@click.option(
    "--node-condition", is_flag=True, help="Print a patch for the status of a Kubernetes node."
)
@click.pass_context
def command(
    ctx: click.Context,
    config_file: str | None,
    ring_dir: str | None,
    as_json: bool,
    node_condition: bool,
) -> None:
    """Report whether this node is fit for work, from its agent's verdict.

    Prints the verdict with its reason and exits with 0 (fit), 12 (unfit: a GPU is lost, must be
    reset or has no spare memory rows) or 2 (unknown: no agent, or no GPU answers). Any other exit
    code is a failure of this command and does not describe the node.
    """
    config = load_settings(AgentConfig, config_file, ring_dir=ring_dir)
    now_unix_s = time.time()
    try:
        verdict = node_health.current_health(
            read_verdict(Path(config.ring_dir)), now_unix_s=now_unix_s
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        verdict = node_health.unknown_health(
            f"no verdict of an agent: {why}",
            node=config.node or socket.gethostname(),
            now_unix_s=now_unix_s,
        )
    if node_condition:
        click.echo(json.dumps(node_condition_patch(verdict, now_unix_s=now_unix_s)))
    elif as_json:
        click.echo(json.dumps(asdict(verdict)))
    else:
        click.echo(verdict.line)
    ctx.exit(int(EXIT_CODES[verdict.fitness]))


def read_verdict(ring_dir: Path) -> NodeHealth:
    """Read the verdict file in a ring directory.

    Any user may write there: links are not followed, and the file must belong to root or to the
    owner of the directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it belongs to another user or is not a verdict.
    """
    owners = {0, ring_dir.stat().st_uid}
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(ring_dir / node_health.FILE_NAME, flags), "rb") as file:
        if os.fstat(file.fileno()).st_uid not in owners:
            raise ValueError("the verdict file belongs to another user")
        return node_health.decode_node_health(file.read(MAX_BYTES))


def node_condition_patch(verdict: NodeHealth, *, now_unix_s: float) -> dict[str, Any]:
    """Return the patch for `kubectl patch node NAME --subresource=status --type=strategic -p`."""
    condition = {
        "type": node_health.CONDITION,
        "status": _STATUS[verdict.fitness],
        "reason": verdict.reason,
        "message": verdict.words,
        "lastHeartbeatTime": _rfc3339(now_unix_s),
        "lastTransitionTime": _rfc3339(verdict.since_unix_s),
    }
    return {"status": {"conditions": [condition]}}


def _rfc3339(unix_s: float) -> str:
    """Format a Unix time as RFC 3339, like Kubernetes."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
