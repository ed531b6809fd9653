"""`pacekeeper demo`: a real job on this machine, a fault, a repair, a death, and a report."""

import json
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pacekeeper.cli.common.extras import require
from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pacekeeper.cli.demo.metrics import Schedule
    from pacekeeper.cli.demo.script import Story


@click.command()
@click.option("--rank", type=int, default=None, help="Rank to slow down (default: by the seed).")
@click.option("--slowdown", type=float, default=1.6, show_default=True, help="Times slower.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--steps", type=int, default=200, show_default=True, help="Training steps in all.")
@click.option(
    "--clock",
    type=click.Choice(["emulated", "cpu"]),
    default="emulated",
    show_default=True,
    help="emulated: real arithmetic, modelled device time. cpu: this machine's own time.",
)
@click.option(
    "--fault",
    type=click.Choice(["compute", "stop"]),
    default="compute",
    show_default=True,
    help="compute: all work takes longer. stop: the process is stopped for a part of each 100 ms.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False),
    help="TOML: what is trained, where it shall be another model or batch.",
)
@click.option("--run-dir", default="runs/demo", show_default=True, help="Logs and report.")
@click.option("--json", "as_json", is_flag=True, help="Last line: the outcome as one JSON object.")
def command(
    rank: int | None,
    slowdown: float,
    seed: int,
    steps: int,
    clock: str,
    fault: str,
    config_file: str | None,
    run_dir: str,
    as_json: bool,
) -> None:
    """See the whole loop on this machine in three minutes.

    A controller, two agents and four ranks train a mixture-of-experts model. One rank is slowed,
    found and relieved; the fault is lifted; one rank is killed; training never stops.
    """
    from rich.console import Console

    from pacekeeper.cli.demo.fleet import NUM_RANKS
    from pacekeeper.cli.demo.metrics import Schedule
    from pacekeeper.cli.demo.run_dir import claimed
    from pacekeeper.cli.demo.script import Story

    chosen = random.Random(seed)
    victim = chosen.randrange(NUM_RANKS) if rank is None else rank
    if not 0 <= victim < NUM_RANKS:
        raise ConfigError(f"--rank: expected 0 to {NUM_RANKS - 1}, got {rank}")
    if not 1.1 <= slowdown <= 10.0:
        raise ConfigError(f"--slowdown: expected 1.1 to 10, got {slowdown}")
    if seed < 0:
        raise ConfigError(f"--seed: expected 0 or more, got {seed}")
    if fault == "stop" and clock != "cpu":
        raise ConfigError("--fault stop: expected --clock cpu; an emulated device knows no stops")
    try:
        schedule = Schedule.of(steps)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    trained = settings(TrainConfig, config_file, steps=steps, seed=seed, clock=clock)
    killed = chosen.choice([r for r in range(NUM_RANKS) if r != victim])
    require("agent", "controller", "trainer", "plot")

    story = Story(victim=victim, slowdown=slowdown, fault=fault, killed=killed, chosen=chosen)
    end_with_the_fleet()
    # Prose goes to stderr where a program reads stdout.
    console = Console(stderr=as_json)
    with claimed(Path(run_dir)) as folder:
        outcome = _play(
            console,
            folder,
            schedule,
            story=story,
            trained=trained,
            train_file=Path(config_file) if config_file else None,
        )
    if as_json:
        click.echo(json.dumps(outcome))


def end_with_the_fleet() -> None:
    """The first signal to end leaves through every `with`; later ones do not disturb that."""
    from pacekeeper.cli.demo.fleet import ENDINGS

    heard = [n for n in ENDINGS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup: no SIGHUP

    def end(number: int, _: object) -> None:
        for one in heard:
            signal.signal(one, lambda *_: None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in heard:
        signal.signal(number, end)


def _play(
    console: "Console",
    folder: Path,
    schedule: "Schedule",
    *,
    story: "Story",
    trained: TrainConfig,
    train_file: Path | None,
) -> dict[str, Any]:
    """Start the fleet, play the story, write the report; the outcome as plain values."""
    from pacekeeper.cli.demo.fleet import NUM_RANKS, Fleet
    from pacekeeper.cli.demo.live_view import View
    from pacekeeper.cli.demo.report import print_outcome, write_report
    from pacekeeper.cli.demo.script import JOB, Director

    steps, seed, clock = trained.steps, trained.seed, trained.clock
    with Fleet(
        run_dir=folder, job=JOB, steps=steps, seed=seed, clock=clock, train_file=train_file
    ) as fleet:
        console.print("[dim]started by the commands an operator would type:[/]")
        for line in fleet.commands:
            console.print(f"  {line}", style="dim", soft_wrap=True, highlight=False, markup=False)
        if clock == "emulated":
            console.print(
                "[dim]clock: emulated accelerator - real arithmetic, then each rank waits until "
                "the modelled device time has passed[/]",
                soft_wrap=True,
            )
        director = Director(fleet=fleet, schedule=schedule, folder=folder, fault=story.fault)
        with View(
            console=console,
            recorder=director.recorder,
            title=f"pacekeeper demo: {NUM_RANKS} ranks on 2 nodes, seed {seed}",
            total_steps=steps,
        ) as view:
            director.play(view, story)
    outcome = director.outcome(trained)
    print_outcome(console, outcome)  # first: a full disk shall not take it along
    for name, path in write_report(folder, outcome, director).items():
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False, markup=False)
    return outcome.to_json()
