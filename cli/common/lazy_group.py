"""The click group `pacekeeper`: the table of its sub-commands, grouped by task.

Called by `main`. A sub-command's module is imported only when it is called, so that the help loads
neither torch nor gRPC. A `PacekeeperError` becomes one line on stderr and the error's exit code.
"""

import errno
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

import pacekeeper
from pacekeeper.core.errors import HostError, PacekeeperError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One sub-command: where its click command is, and its line in the overview."""

    module: str  # below pacekeeper.cli
    summary: str
    attribute: str = "command"


COMMAND_GROUPS: dict[str, dict[str, CommandEntry]] = {
    "Observe": {
        "status": CommandEntry("observe.status", "Show jobs, ranks and nodes."),
        "top": CommandEntry("top.command", "Watch jobs, ranks and incidents on a live screen."),
        "incidents": CommandEntry("observe.incidents", "List incidents."),
        "explain": CommandEntry("observe.explain", "Explain one incident."),
        "fleet": CommandEntry("observe.fleet", "List nodes with slow devices."),
    },
    "Operate": {
        "approve": CommandEntry("operate.proposals", "Approve a proposal.", "approve_command"),
        "deny": CommandEntry("operate.proposals", "Deny a proposal.", "deny_command"),
        "cordon": CommandEntry(
            "operate.overrides", "Remove the work from a node or a rank.", "cordon_command"
        ),
        "uncordon": CommandEntry("operate.overrides", "Cancel a cordon.", "uncordon_command"),
        "pause": CommandEntry("operate.overrides", "Stop planning for a job.", "pause_command"),
        "resume": CommandEntry("operate.overrides", "Plan for a job again.", "resume_command"),
        "dry-run": CommandEntry(
            "operate.overrides", "Make plans without offering them.", "dry_run_command"
        ),
    },
    "Services": {
        "controller": CommandEntry("services.controller", "Run the central controller."),
        "agent": CommandEntry("services.agent", "Run the daemon of this node."),
        "launch": CommandEntry("services.launch", "Start and supervise this node's ranks."),
        "run": CommandEntry("services.run", "Run a training command and attach to its ranks."),
        "healthcheck": CommandEntry("services.healthcheck", "Report whether this node is fit."),
    },
    "Administer": {
        "doctor": CommandEntry("doctor.command", "Check this machine or a settings file."),
        "certs": CommandEntry("admin.certs", "Manage a private certificate authority."),
        "tokens": CommandEntry("admin.tokens", "Manage bearer tokens."),
        "data": CommandEntry("data.command", "Make token files of text, and check them."),
        "store": CommandEntry("admin.store", "Back up, check and migrate a controller's store."),
        "checkpoint": CommandEntry("admin.checkpoint", "List, verify and delete checkpoints."),
    },
    "Analyse": {
        "replay": CommandEntry("analysis.replay", "Judge a recorded run."),
        "simulate": CommandEntry("analysis.simulate", "Compare policies on simulated failures."),
        "plan": CommandEntry("planning.command", "Plan expert placements or partitions."),
        "demo": CommandEntry("demo.command", "Run a complete demonstration on this machine."),
    },
}
_ENTRIES = {name: entry for group in COMMAND_GROUPS.values() for name, entry in group.items()}


class LazyGroup(click.Group):
    """A group of `COMMAND_GROUPS` that imports a command's module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _ENTRIES.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(
            import_module(f"pacekeeper.cli.{entry.module}"), entry.attribute
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _ENTRIES))
        for title, group in COMMAND_GROUPS.items():
            with formatter.section(title):
                rows = [(name.ljust(width), entry.summary) for name, entry in group.items()]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a PacekeeperError or a full disk ends it with one line and a code."""
        try:
            return super().invoke(ctx)
        except PacekeeperError as error:
            failure = error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = error.filename or "all output"
            failure = HostError(f"cannot write {what}: {error.strerror}", remedy="free space")
        click.echo(f"pacekeeper: {failure}", err=True)
        ctx.exit(int(failure.exit_code))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    pacekeeper.__version__, message="%(prog)s %(version)s", help="Show the version and exit."
)
def command() -> None:
    """Keep mixture-of-experts training on pace: detect, explain and mitigate slow ranks."""
