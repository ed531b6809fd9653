"""`pacekeeper train`: train the MoE model in one process, without launcher, agent or controller."""

import logging
import sys

import click

from pacekeeper.cli.common.settings import load_settings
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

# Settings that need several processes, with the values that disable them.
_NEEDS_A_LAUNCHER: dict[str, tuple[object, ...]] = {
    "snapshot_period_steps": (0,),
    "max_restarts": (0,),
}


@click.command()
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False), help="TOML file with [train]."
)
@click.option("--job", help="Name of the job, also of its checkpoint directory.")
@click.option("--steps", type=int, help="Number of training steps.")
@click.option("--seed", type=int, help="Seed of weights and data order.")
@click.option(
    "--checkpoint-dir",
    help="Checkpoint directory; each job has a sub-directory [default: no checkpoints].",
)
@click.option(
    "--checkpoint-every",
    "checkpoint_period_steps",
    type=int,
    help="Steps between checkpoints (0 = choose automatically).",
)
@click.option("--resume", help="auto, never, or the path of a checkpoint to restore.")
def command(config_file: str | None, **given: int | str | None) -> None:
    """Train the MoE model in one process, to try a model and its settings.

    Checkpoints have the format of `pacekeeper launch`; either command restores those of the other.
    Settings that need several processes are rejected.
    """
    config = load_settings(TrainConfig, config_file, **given)
    for name, expected in _NEEDS_A_LAUNCHER.items():
        if getattr(config, name) not in expected:
            raise ConfigError(
                f"{config_file}: [train] {name}: expected {expected[0]!r} for `pacekeeper train`, "
                f"which runs in one process, got {getattr(config, name)!r}",
                remedy="use `pacekeeper launch --ranks-per-node 1`",
            )
    from pacekeeper.trainer.toy.engine.single_process import train_and_save

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s train %(message)s", stream=sys.stderr
    )
    for step, loss, tokens_per_s in train_and_save(config):
        click.echo(f"step {step} loss {loss:.4f} {tokens_per_s:,.0f} tokens/s")
