"""Slow ranks of a live job, in data, tensor and pipeline parallelism: how close plans come.

Each case is a real fleet as `pacekeeper demo` starts it (controller, two agents, launchers, four
ranks on gloo) on the emulated device. Some ranks become slow; the controller finds them and
changes the layout while training goes on.

- `fluid_fraction`: the limit of a step's time over what it takes after the last plan. At the fluid
  limit, the devices' part of a healthy step lasts longer by as much as the mean speed is lower, and
  the rest of it (exchanges, optimizer, votes: work of this host) as long as before. The devices'
  part is their mean time of compute, and in pipelines their idle time with it, by the schedule.
  What a step takes is the lower quartile of a phase: other processes of this host only lengthen
  steps.
- `without_plan`: the same of the steps from the onset to the first plan. A case in which that
  reaches the bar shows nothing, and misses it.
- `is_beyond_limit`: after the plans a step took less than the limit, by more than 2 %. No plan has
  fewer bubbles, since the emulated device has no weight gradients apart; but a host that is busier
  while the ranks are healthy makes the limit too long. The case misses its bar: run it again.
- `busy_healthy`, `busy_after`: the share of the devices' time, at their speeds, that is spent on
  work.
- `overrun_share`: the share of the time in which a device waited for this host's arithmetic.

- `loss_difference`: the largest relative difference of a step's loss from that of one process
  without faults, agents and emulation, in float32; also of the steps `before_onset`, `before_plan`
  and `after_plan`, and as `control_difference` of the same ranks in the layout of the start,
  without faults, plans and emulation. Above 1e-4 and twice the control's a case misses its bar.
- `float64_difference`, with `--replay`: the same of the layouts of the run, replayed in float64
  from the step on at which each came into force; at most 1e-9.

Healthy layouts are even in work: every rank holds all experts of its layers, and the emulated head
is small. Prints a table, last one line of JSON; ends with 1 where a bar is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rank_processes import exit_on_stop_signals
from benchmarks.replayed_layouts import largest_difference, replay_difference
from pacekeeper.cli.demo.fleet import NUM_RANKS, Fleet
from pacekeeper.cli.demo.job import MODEL, SHAPES, demo_config, write_job, write_settings
from pacekeeper.cli.demo.metrics import (
    MAX_OVERRUN_SHARE,
    LoggedStep,
    busy_share,
    overrun_share,
)
from pacekeeper.cli.demo.process import command_line
from pacekeeper.cli.demo.recorder import Recorder, read_injected_faults, read_step_log
from pacekeeper.cli.demo.run_dir import claim_run_dir
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.layout import Layout

ONE_BAR, TWO_BAR = 0.95, 0.9
BEYOND = 1.02  # of the limit: by more than noise
SLOWDOWN = 1.6
ONSET_STEP = 20  # the detector has its cost model by then
FIRST_HEALTHY_STEP = 8
SETTLED_STEPS = 8  # after the last plan, at least
# Float32 adds up in another order under another layout; a router may then choose another expert,
# in a layout that never changes, too.
LOSS_TOLERANCE, TIMES_CONTROL = 1e-4, 2.0
MOST_IN_FLOAT64 = 1e-9
PATIENCE_S = 180.0  # without a step
# Divided by the speeds of the cases, 36 heads are nearly whole numbers: rounding takes little.
COMMON: dict[str, Any] = {"num_attention_heads": 36, "num_key_value_heads": 36}
ROWS = 64  # of a step
# Of the emulated model: heads as wide as the tiles of products, so that one more takes no more than
# its work, and an output head of less than a tenth of a layer's work.
EMULATED: dict[str, Any] = {"head_dim": 256, "vocab_size": 2048}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout at the start, and the ranks that become slow.

    Attributes:
        name: For the table.
        slow: Slowdown of each slow rank.
        num_stages: Pipeline stages.
        tensor_size: Ranks of a tensor group.
        num_layers: Of the model.
        rows_per_microbatch: Of a step's rows.
        step_s: Emulated seconds of an even step of a rank, without bubbles.
    """

    name: str
    slow: Mapping[int, float]
    num_stages: int = 1
    tensor_size: int = 1
    num_layers: int = 4
    rows_per_microbatch: int = ROWS
    step_s: float = 4.0

    @property
    def replicas(self) -> int:
        """Of each expert: one on every rank of a stage."""
        return NUM_RANKS // self.num_stages

    @property
    def idle_factor(self) -> float:
        """How much longer a pipeline's step takes than the work of one of its even stages."""
        pipelines = NUM_RANKS // (self.num_stages * self.tensor_size)
        count = num_micro_batches(ROWS // pipelines, self.rows_per_microbatch)
        return (count + self.num_stages - 1) / count

    @property
    def bar(self) -> float:
        """The least `fluid_fraction`."""
        return ONE_BAR if len(self.slow) == 1 else TWO_BAR


def _cases() -> tuple[Case, ...]:
    one, two = {1: SLOWDOWN}, {1: SLOWDOWN, 2: SLOWDOWN}
    layouts: dict[str, dict[str, Any]] = {
        "data": {},
        "tensor": {"tensor_size": 4},
        "pipeline": {
            "num_stages": 4, "num_layers": 32, "rows_per_microbatch": 8, "step_s": 2.5,
        },
        "data, pipeline": {
            "num_stages": 2, "num_layers": 16, "rows_per_microbatch": 10, "step_s": 2.5,
        },
        "tensor, pipeline": {
            "num_stages": 2, "tensor_size": 2, "num_layers": 16, "rows_per_microbatch": 16,
            "step_s": 2.5,
        },
    }  # fmt: skip
    return tuple(
        Case(name=f"{name}: {len(slow)} slow", slow=slow, **settings)
        for slow in (one, two)
        for name, settings in layouts.items()
    )


CASES = _cases()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the logs and the controller say of a run.

    Attributes:
        logs: Committed steps of each rank.
        onset_step: First step with all faults.
        layouts: By generation, with the reason.
        found: Ranks that findings name.
    """

    logs: Mapping[int, Sequence[LoggedStep]]
    onset_step: int
    layouts: Mapping[int, tuple[Layout, str]]
    found: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a case; see the module's docstring. None: there was no settled plan."""

    fluid_fraction: float | None
    without_plan: float | None
    steps_to_first_plan: int | None
    steps_to_last_plan: int | None
    num_plans: int
    busy_healthy: float | None
    busy_after: float | None
    overrun_share: float
    loss_difference: float
    before_onset: float
    before_plan: float
    after_plan: float
    found: Sequence[int]
    plan: str
    reasons: Sequence[str] = field(default_factory=list)
    control_difference: float = 0.0
    float64_difference: float | None = None


def fluid_step_s(
    healthy_s: float, device_s: float, slow: Mapping[int, float], num_ranks: int
) -> float:
    """Return what a step takes if the devices' part of it scales with the sum of the speeds.

    Args:
        healthy_s: Seconds of a step with all devices well.
        device_s: The devices' part of it.
        slow: Slowdown of each slow rank.
        num_ranks: Of the job.
    """
    speeds = num_ranks - len(slow) + sum(1.0 / slowdown for slowdown in slow.values())
    return healthy_s + min(device_s, healthy_s) * (num_ranks / speeds - 1.0)


def usual_step_s(steps: Sequence[LoggedStep], phase: range) -> float | None:
    """Return the lower quartile of the seconds of a phase's steps; None: it has none."""
    ended_s = {s.step: s.ended_s for s in steps}
    spent_s = sorted(ended_s[n] - ended_s[n - 1] for n in phase)
    return spent_s[len(spent_s) // 4] if spent_s else None


def figures_of(run: Run, case: Case, losses: Sequence[float]) -> Figures:
    """Compute a case's figures.

    Args:
        run: The run with slow ranks.
        case: The case.
        losses: Of the undisturbed run, by step.
    """
    steps = run.logs[min(run.logs)]
    first, last = steps[0].step, steps[-1].step
    generations = {s.step: s.generation for s in steps}
    changes = [n for n in range(first + 1, last + 1) if generations[n] != generations[n - 1]]
    plans = [n for n in changes if n > run.onset_step]
    start = max((n for n in changes if n <= run.onset_step), default=first)
    healthy = range(max(start + 1, FIRST_HEALTHY_STEP), run.onset_step)
    degraded = range(run.onset_step, plans[0] if plans else last + 1)
    after = range(plans[-1] + 1 if plans else last + 1, last + 1)
    healthy_s = usual_step_s(steps, healthy)
    computed = [s.compute_s for log in run.logs.values() for s in log if s.step in healthy]
    limit_s = None
    if healthy_s is not None and None not in computed:
        device_s = mean(filter(None, computed)) * case.idle_factor
        limit_s = fluid_step_s(healthy_s, device_s, case.slow, len(run.logs))

    def fraction(phase: range, least: int) -> float | None:
        taken_s = usual_step_s(steps, phase) if len(phase) >= least else None
        return None if taken_s is None or limit_s is None else limit_s / taken_s

    def loss_difference(phase: range) -> float:
        found = [abs(s.loss / losses[s.step] - 1.0) for s in steps if s.step in phase]
        return max(found, default=0.0)

    layout, _ = run.layouts.get(generations[last], (None, ""))
    return Figures(
        fluid_fraction=fraction(after, SETTLED_STEPS),
        without_plan=fraction(degraded, 1),
        steps_to_first_plan=plans[0] - run.onset_step if plans else None,
        steps_to_last_plan=plans[-1] - run.onset_step if plans else None,
        num_plans=len(plans),
        busy_healthy=busy_share(run.logs, healthy, {}),
        busy_after=busy_share(run.logs, after, case.slow),
        overrun_share=max(overrun_share(run.logs, phase) for phase in (healthy, after)),
        loss_difference=loss_difference(range(first, last + 1)),
        before_onset=loss_difference(range(first, run.onset_step)),
        before_plan=loss_difference(degraded),
        after_plan=loss_difference(range(degraded.stop, last + 1)),
        found=sorted(run.found),
        plan="" if layout is None else layout_text(layout, ROWS),
        reasons=[reason for _, (_, reason) in sorted(run.layouts.items())][1:],
    )


def layout_text(layout: Layout, num_rows: int) -> str:
    """Describe layers of the stages, shards of the groups, and rows of the pipelines."""
    words = ["layers " + "+".join(str(len(span)) for span in layout.spans)]
    groups = [
        "+".join(str(run.end - run.first) for run in stage.attention)
        for pipeline in layout.pipelines
        for stage in pipeline.stages
        if len(stage.attention) > 1
    ]
    words += ["shards " + ", ".join(groups)] * bool(groups)
    stages = range(len(layout.stage_shares) or 1)
    rows = ["+".join(str(len(own)) for own in layout.rows_at(at, num_rows)) for at in stages]
    words += ["rows " + ", ".join(rows)] * (len(layout.pipelines) > 1)
    if layout.standing_by:
        words.append("standby " + ", ".join(map(str, layout.standing_by)))
    return "; ".join(words)


def is_kept(case: Case, figures: Figures) -> bool:
    """Return whether a case keeps its bars: throughput, due to the plan, and equal losses."""
    fraction, without = figures.fluid_fraction, figures.without_plan
    tolerance = max(LOSS_TOLERANCE, TIMES_CONTROL * figures.control_difference)
    is_equal = (
        figures.loss_difference <= tolerance
        and (figures.float64_difference or 0.0) <= MOST_IN_FLOAT64
    )
    if fraction is None or without is None or not is_equal:
        return False
    return without < case.bar <= fraction <= BEYOND


def layouts_by_step(run: Run) -> dict[int, Layout]:
    """Return the layouts of a run by the first step on each.

    Raises:
        KeyError: One was in force so shortly that the controller's answer came too late.
    """
    found, newest = dict[int, Layout](), 0
    for s in run.logs[min(run.logs)]:
        if s.generation != newest:
            found[s.step], newest = run.layouts[s.generation][0], s.generation
    return found


def config_of(case: Case, folder: Path, *, steps: int, scale: float) -> EngineConfig:
    """Write model and kernel shapes of a case; return the settings of its job."""
    config = demo_config(folder, steps=steps, seed=0, clock="emulated", config_file=None)
    layers = {"num_hidden_layers": case.num_layers}
    for name, content in (
        ("model", MODEL | {"head_dim": 4}),
        ("shapes", SHAPES | EMULATED),
    ):
        path = folder / "model-of-case" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(content | COMMON | layers))
    return replace(
        config,
        model=str(folder / "model-of-case" / "model"),
        emulated_model=str(folder / "model-of-case" / "shapes"),
        emulated_step_s=case.step_s * scale,
        learning_rate=1e-3,
        num_stages=case.num_stages,
        tensor_size=case.tensor_size,
        rows_per_microbatch=case.rows_per_microbatch,
        replicas=case.replicas,
    )


def disturbed(case: Case, folder: Path, *, steps: int, scale: float) -> Run:
    """Run a case: the faults begin at ONSET_STEP and stay."""
    with claim_run_dir(folder) as run_dir:
        config = config_of(case, run_dir, steps=steps, scale=scale)
        write_job(run_dir, config)
        with Fleet(run_dir=run_dir, config=config) as fleet:
            recorder = Recorder(address=fleet.address, job=config.job)
            log = run_dir / "train" / "steps-0.jsonl"
            _await(fleet, log, ONSET_STEP - 1)
            for rank, slowdown in case.slow.items():
                fleet.set_fault(rank, slowdown)
            _await(fleet, log, steps)
            time.sleep(1.0)  # the last reports are on their way
            recorder.close()
        truth = read_injected_faults(run_dir / "faults" / "truth.jsonl")
        return Run(
            logs={r: read_step_log(log.with_name(f"steps-{r}.jsonl")) for r in range(NUM_RANKS)},
            onset_step=max(int(entry["step"]) for entry in truth),
            layouts=dict(recorder.layouts),
            found={i.rank for i in recorder.incidents.values() if i.rank is not None},
        )


def _await(fleet: Fleet, log: Path, step: int) -> None:
    """Wait until a step has ended, or the job."""
    seen, moved_s = -1, time.monotonic()
    while not fleet.is_training_finished:
        fleet.check()
        newest = max((s.step for s in read_step_log(log)), default=-1)
        if newest > seen:
            seen, moved_s = newest, time.monotonic()
        if seen >= step:
            return
        if time.monotonic() - moved_s > PATIENCE_S:
            raise PacekeeperError(f"no step for {PATIENCE_S:.0f} s", remedy=f"see {log.parent}")
        time.sleep(0.1)
    fleet.check()


def undisturbed(case: Case, folder: Path, *, steps: int, num_ranks: int = 1) -> list[float]:
    """Return the losses of the same steps without faults: of one process on the whole model and
    all rows at once, or of as many ranks in the case's layout.
    """
    (folder / "job").mkdir(parents=True)
    config = replace(config_of(case, folder, steps=steps, scale=1.0), emulate=False)
    if num_ranks == 1:
        config = replace(config, num_stages=1, tensor_size=1, replicas=1)
        config = replace(config, rows_per_microbatch=ROWS)
    write_job(folder, config)
    settings = write_settings(folder, config)
    command = command_line(
        "launch", "--config", str(settings), "--ranks-per-node", str(num_ranks),
        "--ring-dir", str(folder / "rings"), "--run-dir", str(folder / "train"),
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PacekeeperError(f"the undisturbed run failed: {done.stderr[-2000:]}")
    return [s.loss for s in read_step_log(folder / "train" / "steps-0.jsonl")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--steps", type=int, default=22, help="after the onset of the faults")
    parser.add_argument("--scale", type=float, default=1.0, help="of all emulated times")
    parser.add_argument("--replay", action="store_true", help="compare losses in float64, too")
    parser.add_argument("--keep", type=Path, help="copy the run directories to this one")
    given = parser.parse_args(arguments)
    exit_on_stop_signals()
    table = Table(title="Throughput after the controller's plan, over the fluid limit")
    for column in ("case", "fluid", "bar", "without plan", "busy", "steps to plans", "loss differs",
                   "host", "plan"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("case", "plan") else "right")
    result: dict[str, Any] = {"cores": os.cpu_count(), "loss_tolerance": LOSS_TOLERANCE}
    loads, kept = [os.getloadavg()[0]], []
    references: dict[str, list[float]] = {}  # by layout
    controls: dict[str, float] = {}
    steps = ONSET_STEP + given.steps
    for case in CASES:
        if given.cases and case.name not in given.cases:
            continue
        alike = case.name.partition(":")[0]
        with tempfile.TemporaryDirectory(prefix="pacekeeper-") as name:
            if alike not in references:
                references[alike] = undisturbed(case, Path(name) / "alone", steps=steps)
                controls[alike] = largest_difference(
                    undisturbed(case, Path(name) / "control", steps=steps, num_ranks=NUM_RANKS),
                    references[alike],
                )
            folder = Path(name) / "run" if given.keep is None else given.keep / case.name
            run = disturbed(case, folder, steps=steps, scale=given.scale)
            figures = figures_of(run, case, references[alike])
            figures = replace(figures, control_difference=controls[alike])
            if given.replay:
                config = config_of(case, folder, steps=steps, scale=given.scale)
                exact = replay_difference(
                    config, layouts_by_step(run), Path(name) / "replay", steps=steps
                )
                figures = replace(figures, float64_difference=exact)
        loads.append(os.getloadavg()[0])
        kept.append(is_kept(case, figures))
        result[case.name] = {k: _rounded(v) for k, v in asdict(figures).items()} | {
            "bar": case.bar,
            "is_beyond_limit": (figures.fluid_fraction or 0.0) > BEYOND,
            "host_was_measured": figures.overrun_share > MAX_OVERRUN_SHARE,
        }
        table.add_row(case.name, *_cells(case, figures))
        print(json.dumps({case.name: result[case.name]}), file=sys.stderr, flush=True)
    Console(width=140).print(table)
    print(f"load average meanwhile: {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    result |= {"load_min": round(min(loads), 1), "load_max": round(max(loads), 1)}
    print(json.dumps(result | {"is_met": all(kept)}))
    return 0 if all(kept) else 1


def _cells(case: Case, figures: Figures) -> list[str]:
    def text(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    is_beyond = (figures.fluid_fraction or 0.0) > BEYOND
    return [
        text(figures.fluid_fraction) + " (beyond: run again)" * is_beyond,
        f"{case.bar:.2f}",
        text(figures.without_plan),
        f"{text(figures.busy_healthy, '.0%')} {text(figures.busy_after, '.0%')}",
        f"{text(figures.steps_to_first_plan, 'd')} {text(figures.steps_to_last_plan, 'd')}",
        f"{figures.loss_difference:.1g}"
        + ("" if figures.float64_difference is None else f", {figures.float64_difference:.0e}"),
        f"{figures.overrun_share:.1%}",
        figures.plan,
    ]


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
