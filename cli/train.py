"""`pacekeeper train`: the MoE trainer in one process, without launcher, agent or controller."""

import click

from pacekeeper.cli.settings import needs_torch, settings
from pacekeeper.core.config import TrainConfig


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [train].")
@click.option("--steps", type=int)
@click.option("--seed", type=int)
def command(config_file: str | None, steps: int | None, seed: int | None) -> None:
    """Train the MoE model in one process, without a fleet: to try the model and its settings."""
    config = settings(TrainConfig, config_file, steps=steps, seed=seed)
    with needs_torch():
        from pacekeeper.trainer.solo import train_alone
    for step, loss, tokens_per_s in train_alone(config):
        click.echo(f"step {step} loss {loss:.4f} {tokens_per_s:,.0f} tokens/s")
