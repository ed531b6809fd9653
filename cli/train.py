"""`pacekeeper train`: the MoE trainer in one process, without launcher, agent or controller."""

import click

from pacekeeper.cli.settings import needs_torch, settings
from pacekeeper.core.config import TrainConfig
from pacekeeper.core.errors import ConfigError

# What one process alone would have to ignore, and the values that ask for nothing.
_NEEDS_A_LAUNCHER: dict[str, tuple[object, ...]] = {
    "checkpoint_dir": ("",),
    "snapshot_period_steps": (0,),
    "resume": ("auto", "never"),
    "max_restarts": (0,),
}


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML, [train].")
@click.option("--steps", type=int)
@click.option("--seed", type=int)
def command(config_file: str | None, steps: int | None, seed: int | None) -> None:
    """Train the MoE model in one process, without a fleet: to try the model and its settings.

    It writes no checkpoints and reads none; settings that ask for them are refused.
    """
    config = settings(TrainConfig, config_file, steps=steps, seed=seed)
    for name, expected in _NEEDS_A_LAUNCHER.items():
        if getattr(config, name) not in expected:
            raise ConfigError(
                f"{config_file}: [train] {name}: expected {expected[0]!r} for `pacekeeper train`, "
                f"which has no checkpoints, got {getattr(config, name)!r}",
                remedy="`pacekeeper launch --ranks-per-node 1` has them",
            )
    with needs_torch():
        from pacekeeper.trainer.solo import train_alone
    for step, loss, tokens_per_s in train_alone(config):
        click.echo(f"step {step} loss {loss:.4f} {tokens_per_s:,.0f} tokens/s")
