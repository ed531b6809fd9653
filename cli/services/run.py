"""`pacekeeper run`: run a training command that knows nothing of pacekeeper, and attach to it."""

import os
import shutil
import sys

import click

from pacekeeper.core.errors import ConfigError


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--job", help="Name of the job [default: PACEKEEPER_JOB, then the script's name].")
@click.option(
    "--ring-dir", help="Directory in which this node's agent reads rings [default: the agent's]."
)
@click.argument("training_command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(training_command: tuple[str, ...], job: str | None, ring_dir: str | None) -> None:
    """Run a training command whose ranks attach themselves, with no line in the script.

    TRAINING_COMMAND is a command of torchrun, `accelerate launch` or python, such as
    `torchrun --nproc-per-node 8 train.py --lr 1e-4`. Its script is run through a module of
    pacekeeper, which attaches once the first optimizer has stepped (docs/trainers.md). Signals and
    the exit code are the command's own.
    """
    from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name
    from pacekeeper.trainer.adapters.run.command import JOB_VARIABLE, job_of_script, rewrite
    from pacekeeper.trainer.hooks.hooks import RING_DIR_VARIABLE

    rewritten = rewrite(training_command)
    job = job or os.environ.get(JOB_VARIABLE) or job_of_script(rewritten.script)
    if not is_job_name(job):
        raise ConfigError(f"--job {job!r}: expected {JOB_NAME_RULE}", remedy="give --job NAME")
    if rewritten.runs_here and not os.path.exists(rewritten.script):
        raise ConfigError(f"{rewritten.script}: no such file", remedy="check the script's path")
    program = shutil.which(rewritten.words[0])
    if program is None:
        raise ConfigError(
            f"{rewritten.words[0]}: no such command", remedy="check the command and PATH"
        )
    os.environ[JOB_VARIABLE] = job
    if ring_dir:
        os.environ[RING_DIR_VARIABLE] = os.path.abspath(ring_dir)
    sys.stdout.flush()
    os.execv(program, rewritten.words)
