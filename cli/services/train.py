"""`pacekeeper train`: the MoE trainer in one process, without launcher, agent or controller."""

import logging
import sys

import click

from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

# What one process alone would have to ignore, and the values that ask for nothing.
_NEEDS_A_LAUNCHER: dict[str, tuple[object, ...]] = {
    "snapshot_period_steps": (0,),
    "max_restarts": (0,),
}


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [train].")
@click.option("--job", help="Its name: of the directory of its checkpoints.")
@click.option("--steps", type=int)
@click.option("--seed", type=int)
@click.option("--checkpoint-dir", help="One directory below it per job; none are written without.")
@click.option(
    "--checkpoint-every",
    "checkpoint_period_steps",
    type=int,
    help="Steps between two checkpoints; 0: measured.",
)
@click.option("--resume", help="auto, never, or the path of a checkpoint.")
def command(config_file: str | None, **given: int | str | None) -> None:
    """Train the MoE model in one process, without a fleet: to try the model and its settings.

    Its checkpoints are those of `pacekeeper launch`: what one saved, the other goes on from.
    Settings that ask for other processes are refused.
    """
    config = settings(TrainConfig, config_file, **given)
    for name, expected in _NEEDS_A_LAUNCHER.items():
        if getattr(config, name) not in expected:
            raise ConfigError(
                f"{config_file}: [train] {name}: expected {expected[0]!r} for `pacekeeper train`, "
                f"which has no other processes, got {getattr(config, name)!r}",
                remedy="`pacekeeper launch --ranks-per-node 1` has them",
            )
    from pacekeeper.trainer.engine.single_process import train_and_save

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s train %(message)s", stream=sys.stderr
    )
    for step, loss, tokens_per_s in train_and_save(config):
        click.echo(f"step {step} loss {loss:.4f} {tokens_per_s:,.0f} tokens/s")
