"""The command `pacekeeper`: each sub-command's module is imported only when it is called."""

from importlib import import_module
from typing import Any

import click

import pacekeeper
from pacekeeper.core.errors import PacekeeperError

# name -> (module:click command, one line for the overview); the command is `command` by default.
_COMMANDS = {
    "demo": ("pacekeeper.cli.demo.command", "See the whole loop on this machine in three minutes."),
    "agent": ("pacekeeper.cli.services.agent", "Run the daemon of this node."),
    "controller": ("pacekeeper.cli.services.controller", "Run the central controller."),
    "launch": (
        "pacekeeper.cli.services.launch",
        "Start and watch this node's ranks of a training job.",
    ),
    "train": (
        "pacekeeper.cli.services.train",
        "Train the MoE model in one process, without a fleet.",
    ),
    "status": ("pacekeeper.cli.observe.status", "Ask the controller for jobs, ranks and nodes."),
    "top": ("pacekeeper.cli.top.command", "Watch jobs, ranks and incidents live, with keys."),
    "fleet": ("pacekeeper.cli.observe.nodes", "Ask which nodes were found slow, lemons first."),
    "incidents": ("pacekeeper.cli.observe.incidents", "Ask the controller for incidents."),
    "explain": ("pacekeeper.cli.observe.explain", "Say all that is known of one incident."),
    "approve": (
        "pacekeeper.cli.operate.proposals:approve_command",
        "Approve a plan that waits for a person.",
    ),
    "deny": (
        "pacekeeper.cli.operate.proposals:deny_command",
        "Deny a plan that waits for a person.",
    ),
    "cordon": (
        "pacekeeper.cli.operate.overrides:cordon_command",
        "Take the work from a node or a rank.",
    ),
    "uncordon": ("pacekeeper.cli.operate.overrides:uncordon_command", "Take a cordon back."),
    "pause": (
        "pacekeeper.cli.operate.overrides:pause_command",
        "Make no plans for a job; findings go on.",
    ),
    "resume": ("pacekeeper.cli.operate.overrides:resume_command", "Make plans for a job again."),
    "dry-run": (
        "pacekeeper.cli.operate.overrides:dry_run_command",
        "Make and tell plans, and offer none, of any job.",
    ),
    "replay": (
        "pacekeeper.cli.analysis.replay",
        "Judge a recorded run: who was slow, and what it cost.",
    ),
    "simulate": (
        "pacekeeper.cli.analysis.simulate",
        "Play recorded failures against several policies.",
    ),
    "checkpoint": ("pacekeeper.cli.admin.checkpoint", "List, check and show checkpoints."),
    "plan": (
        "pacekeeper.cli.planning.command",
        "Plan experts or partitions for a trainer of your own.",
    ),
    "backup": (
        "pacekeeper.cli.admin.backup",
        "Copy a controller's store, also while it is in use.",
    ),
    "certs": (
        "pacekeeper.cli.admin.certs",
        "A private authority: certificates of nodes and people.",
    ),
    "tokens": ("pacekeeper.cli.admin.tokens", "Bearer tokens that the controller takes."),
    "healthcheck": (
        "pacekeeper.cli.services.healthcheck",
        "Say whether this node is fit for work.",
    ),
    "doctor": (
        "pacekeeper.cli.doctor.command",
        "Say what works on this machine and what does not.",
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports a module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a failure with a remedy ends in one line and its exit code."""
        try:
            return super().invoke(ctx)
        except PacekeeperError as error:
            click.echo(f"pacekeeper: {error}", err=True)
            ctx.exit(int(error.exit_code))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    pacekeeper.__version__,
    message="%(prog)s %(version)s",
    help="Say the version and end.",
)
def command() -> None:
    """Keep mixture-of-experts training on pace."""
