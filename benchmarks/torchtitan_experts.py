"""Expert replicas and batch shares in torchtitan: loss and gradients beside runs without them.

`python -m benchmarks.torchtitan_experts [--torchtitan DIR] [--steps N]`; two minutes. Four ranks
(gloo, CPU, float64) train a small Qwen3 MoE with torchtitan's own Trainer, FSDP2, optimizer,
clipping and checkpoints. `plain` has torchtitan's dispatcher and experts; `replicas` has ours, and
before every third step another placement, which all ranks vote for: each expert on one to three
ranks with drawn shares. `resumed-plain` and `resumed-replicas` go on from the checkpoint that
`replicas` saved. `even` has no expert parallelism; in `batch-shares` ranks run drawn numbers of
micro-batches, others every three steps, and `resumed-shares` goes on from its checkpoint.

`max_loss_error`: the largest difference of a step's loss from that of `plain` or `even`;
`max_norm_error` likewise of the norm to clip by; `max_gradient_error`: the largest difference of
any gradient in any step, over the step's largest gradient. Ends with 1 where an error is above
1e-9, or where `replicas`, `batch-shares` or a run resumed from it has fewer changes than a sixth
of its steps. DIR holds the package `torchtitan`.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pacekeeper.core.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.torchtitan_cpu import use_cpu
from support.torchtitan_replicas import Run, run

MOST_ERROR = 1e-9
ERRORS = ("max_loss_error", "max_norm_error", "max_gradient_error")
MOST_STEPS_PER_CHANGE = 6  # a plan is offered every third step; some find the old one in force


def runs(steps: int) -> list[Run]:
    """Return the runs, the one without replicas first."""
    saved = steps // 20 * 10
    again: dict[str, Any] = {"starts_from": "replicas", "starts_at": saved, "beside": "plain"}
    return [
        Run(name="plain", steps=steps),
        Run(name="replicas", steps=steps, has_replicas=True, starts_from="plain", beside="plain"),
        Run(name="resumed-plain", steps=steps, **again),
        Run(name="resumed-replicas", steps=steps, has_replicas=True, **again),
        Run(name="even", steps=steps, is_parallel=False),
        Run(
            name="batch-shares", steps=steps, is_parallel=False, has_shares=True,
            starts_from="even", beside="even",
        ),
        Run(
            name="resumed-shares", steps=steps, is_parallel=False, has_shares=True,
            starts_from="batch-shares", starts_at=saved, beside="even",
        ),
    ]  # fmt: skip


def compared(told: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest differences of a run from the plain one."""
    by_step = {one["step"]: one for one in plain}
    pairs = [(one, by_step[one["step"]]) for one in told]
    return {
        "steps": len(told),
        "changes": len({one["generation"] for one in told}) - 1,
        "max_loss_error": max(abs(one["loss"] / other["loss"] - 1.0) for one, other in pairs),
        "max_norm_error": max(abs(one["norm"] / other["norm"] - 1.0) for one, other in pairs),
        "max_gradient_error": max(one["gradient_error"] for one in told),
    }


def misses(one: Run, found: dict[str, Any]) -> list[str]:
    """Return the bars that a run misses."""
    said = [f"{key} is {found[key]:.1e}" for key in ERRORS if not found[key] <= MOST_ERROR]
    least = found["steps"] // MOST_STEPS_PER_CHANGE
    if (one.has_replicas or one.has_shares) and found["changes"] < least:
        said.append(f"{found['changes']} changes, expected at least {least}")
    return [f"{one.name}: {text}" for text in said]


def load(folder: str | None) -> str:
    """Make torchtitan importable; return its version.

    Raises:
        ConfigError: It is not there, or cannot be imported.
    """
    if folder is not None:
        sys.path.insert(0, folder)
    if find_spec("torchtitan") is None:
        raise ConfigError(
            f"torchtitan is not in {folder}" if folder else "torchtitan is not installed",
            remedy="pip install torchtitan triton, or give the folder that holds it by "
            "--torchtitan DIR",
        )
    use_cpu()
    try:
        import torchtitan.trainer
    except ImportError as error:
        raise ConfigError(
            f"torchtitan cannot be imported: {error}",
            remedy="install what it depends on: pip install torchtitan triton",
        ) from error
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return f"of {Path(torchtitan.trainer.__file__).parents[1]}"


def main() -> int:
    """Run all, print the table and the line of JSON; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--torchtitan", metavar="DIR")
    parser.add_argument("--steps", type=int, default=30, help="at least 20 (default: 30)")
    parser.add_argument("--data", help="not used: the batches are drawn")
    options = parser.parse_args()
    try:
        version = load(options.torchtitan)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    table = Table("run", "steps", "changes", "loss error", "norm error", "gradient error")
    found, missed = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps_of: dict[str, list[dict[str, Any]]] = {}
        for one in runs(options.steps):
            if any(run(one, folder)):
                print((folder / f"{one.name}.0.log").read_text(), file=sys.stderr)
                return 1
            told = json.loads((folder / f"{one.name}.json").read_text())
            steps_of[one.name] = told
            found[one.name] = compared(told, steps_of[one.beside or one.name])
            missed += misses(one, found[one.name])
            figures = [f"{found[one.name][key]:.1e}" for key in ERRORS]
            table.add_row(one.name, str(len(told)), str(found[one.name]["changes"]), *figures)
    Console().print(table)
    worst = {key: max(one[key] for one in found.values()) for key in ERRORS}
    versions = {"torchtitan": version, "torch": torch.__version__}
    print(*missed, sep="\n", end="\n" * bool(missed), file=sys.stderr)
    changes = found["replicas"]["changes"]
    met = {"is_met": not missed, "changes": changes}
    print(json.dumps({**worst, **met, **versions, "runs": found}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
