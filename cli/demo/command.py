"""`pacekeeper demo`: check the options, run fleet and fault script, write figures and report."""

import json
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pacekeeper.cli.common.extras import require
from pacekeeper.cli.common.options import json_option, option_group
from pacekeeper.cli.common.paths import PathType
from pacekeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pacekeeper.cli.demo.metrics import Schedule
    from pacekeeper.cli.demo.script import FaultScript
    from pacekeeper.core.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The fault and the training of a demonstration, as given on the command line."""

    rank: int | None
    slowdown: float
    seed: int
    steps: int
    clock: str
    fault: str
    config_file: str | None

    def fault_script(self) -> "FaultScript":
        """Return the faults; the seed chooses what the options leave open.

        Raises:
            ConfigError: names the option and what was expected.
        """
        from pacekeeper.cli.demo.fleet import NUM_RANKS
        from pacekeeper.cli.demo.script import FaultScript

        chosen = random.Random(self.seed)
        victim = chosen.randrange(NUM_RANKS) if self.rank is None else self.rank
        if not 0 <= victim < NUM_RANKS:
            raise ConfigError(f"--rank: expected 0 to {NUM_RANKS - 1}, got {self.rank}")
        if not 1.1 <= self.slowdown <= 10.0:
            raise ConfigError(f"--slowdown: expected 1.1 to 10, got {self.slowdown}")
        if self.seed < 0:
            raise ConfigError(f"--seed: expected 0 or more, got {self.seed}")
        if self.fault == "stop" and self.clock != "cpu":
            raise ConfigError(
                "--fault stop: expected --clock cpu; the emulated device does not stop"
            )
        return FaultScript(
            victim=victim,
            slowdown=self.slowdown,
            fault=self.fault,
            killed=chosen.choice([r for r in range(NUM_RANKS) if r != victim]),
            chosen=chosen,
        )

    def schedule(self) -> "Schedule":
        """Return the steps of the faults. Raises ConfigError if the run is too short."""
        from pacekeeper.cli.demo.metrics import Schedule

        try:
            return Schedule.of(self.steps)
        except ValueError as error:
            raise ConfigError(f"--{error}") from None

    def job_config(self, run_dir: Path) -> "EngineConfig":
        """Return the settings of the job. Raises ConfigError as `demo_config`."""
        from pacekeeper.cli.demo.job import demo_config

        return demo_config(
            run_dir,
            steps=self.steps,
            seed=self.seed,
            clock=self.clock,
            config_file=self.config_file,
        )


@click.command()
@option_group(
    "options",
    DemoOptions,
    click.option(
        "--rank", type=int, default=None, help="Rank to slow down [default: chosen by the seed]."
    ),
    click.option(
        "--slowdown",
        type=float,
        default=1.6,
        show_default=True,
        help="Slowdown factor of that rank.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the demo."),
    click.option(
        "--steps", type=int, default=160, show_default=True, help="Number of training steps."
    ),
    click.option(
        "--clock",
        type=click.Choice(["emulated", "cpu"]),
        default="emulated",
        show_default=True,
        help="emulated: real arithmetic, and times of a GPU's kernels; cpu: CPU time of this "
        "machine.",
    ),
    click.option(
        "--fault",
        type=click.Choice(["compute", "stop"]),
        default="compute",
        show_default=True,
        help="compute: slow down all work; stop: pause the process for a part of each 100 ms.",
    ),
    click.option(
        "--config",
        "config_file",
        type=PathType(dir_okay=False),
        help="TOML file with [engine], for another model or batch.",
    ),
)
@click.option(
    "--run-dir", default="runs/demo", show_default=True, help="Directory of logs and report."
)
@json_option("Print the outcome as one JSON object in the last line.")
def command(options: DemoOptions, run_dir: str, as_json: bool) -> None:
    """Run a complete demonstration on this machine in about three minutes.

    A controller, two agents and four ranks train a small Qwen3-MoE on the sources of Python's
    standard library. One rank is slowed down, detected, and relieved of work; the fault is removed;
    one rank is killed. Training continues throughout.
    """
    from rich.console import Console

    from pacekeeper.cli.demo.run_dir import claim_run_dir

    script, schedule = options.fault_script(), options.schedule()
    require("agent", "controller", "trainer", "plot")
    config = options.job_config(Path(run_dir))

    install_signal_handlers()
    # With --json stdout holds the outcome only.
    console = Console(stderr=as_json)
    with claim_run_dir(Path(run_dir)) as folder:
        outcome = _run_demo(console, folder, schedule, script, config)
    if as_json:
        click.echo(json.dumps(outcome))


def install_signal_handlers() -> None:
    """End through every `with` block at the first stop signal; ignore later ones."""
    from pacekeeper.cli.demo.fleet import STOP_SIGNALS

    # A signal that is ignored, like SIGHUP under nohup, stays ignored.
    handled = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        for one in handled:
            signal.signal(one, lambda *_: None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in handled:
        signal.signal(number, end)


def _run_demo(
    console: "Console",
    folder: Path,
    schedule: "Schedule",
    script: "FaultScript",
    config: "EngineConfig",
) -> dict[str, Any]:
    """Start the fleet, run the script, write the report; return the outcome as JSON values."""
    from pacekeeper.cli.demo.fleet import NUM_RANKS, Fleet
    from pacekeeper.cli.demo.job import write_job
    from pacekeeper.cli.demo.live_view import LiveView
    from pacekeeper.cli.demo.report import CLOCKS, print_outcome, write_report
    from pacekeeper.cli.demo.script import ScriptRunner

    tokenized = write_job(folder, config)
    with Fleet(run_dir=folder, config=config) as fleet:
        if tokenized:
            fleet.commands.insert(0, tokenized)
        console.print("[dim]started with these commands:[/]")
        for line in fleet.commands:
            console.print(f"  {line}", style="dim", soft_wrap=True, highlight=False, markup=False)
        console.print(
            CLOCKS["emulated" if config.emulate else "cpu"],
            style="dim",
            soft_wrap=True,
            highlight=False,
        )
        runner = ScriptRunner(fleet=fleet, schedule=schedule, folder=folder, fault=script.fault)
        with LiveView(
            console=console,
            recorder=runner.recorder,
            title=f"pacekeeper demo: {NUM_RANKS} ranks on 2 nodes, seed {config.seed}",
            total_steps=config.steps,
        ) as view:
            runner.play(view, script)
    outcome = runner.outcome()
    print_outcome(console, outcome)  # before the report: a full disk must not lose it
    for name, path in write_report(folder, outcome, runner).items():
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False, markup=False)
    return outcome.to_json()
