"""`make stress`: fuzzers, fault schedules and deep tests, or a slice that a seed chooses.

`PYTHONPATH=tests python -m stress.run --minutes 2 --seed 7`. A third of the time goes to fuzzing
(FUZZ_S of processor time per parser), a third to fault schedules of this seed, a third to
files of tests that draw (DEEP_S per file): many random examples of properties, all seeds of
simulations, and the faults that `make test` leaves out. The seed chooses parsers and files so
that consecutive seeds reach all of them. Exits with 1 if anything was found.
"""

import argparse
import subprocess
import sys
import time

from fuzz.seeds import seeds
from support.tree import ROOT

FUZZ_S = 6.0
DEEP_S = 20.0
DRAWS = "from support.examples import"


def slice_of(names: list[str], count: int, seed: int) -> list[str]:
    """Return `count` of the names; the slices of seeds 0, 1, 2... go round all names."""
    count = min(len(names), max(1, count))
    return [names[(seed * count + k) % len(names)] for k in range(count)]


def deep_files() -> list[str]:
    """Return the test files that draw more examples, seeds or faults here than in `make test`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if DRAWS in path.read_text()]


def run_deep(budget_s: float, seed: int) -> int:
    """Run files of tests that draw with all that they can draw; return 1 if one failed.

    A file that does not end within the budget is stopped, which is printed and is no failure.
    """
    ends_s, failed = time.monotonic() + budget_s, False
    for file in slice_of(deep_files(), int(budget_s / DEEP_S), seed):
        left_s = ends_s - time.monotonic()
        if left_s <= 0.0:
            break
        deep = ["--hypothesis-profile", "deep", "--hypothesis-seed", str(seed)]
        only = ["-m", "stress"] if file.startswith("tests/integration/") else []
        command = [sys.executable, "-Im", "pytest", "-q", "--timeout", "0", *deep, *only, file]
        try:
            failed |= subprocess.run(command, cwd=ROOT, timeout=left_s, check=False).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"{file}: stopped after {left_s:.0f} s")
    return int(failed)


def main() -> int:
    """Run the slice; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    third_s = options.minutes * 20.0
    chosen = slice_of(sorted(seeds()), int(third_s / FUZZ_S), options.seed)
    each_minutes = third_s / len(chosen) / 60.0
    fuzz = ["fuzz.run", "--minutes", str(each_minutes), *(f"--only={name}" for name in chosen)]
    faults = ["stress.fault_schedules", "--minutes", str(third_s / 60.0), "--schedules", "100000"]
    codes = [
        subprocess.run(
            [sys.executable, "-m", *command, "--seed", str(options.seed)], cwd=ROOT, check=False
        ).returncode
        for command in (fuzz, faults)
    ]
    codes.append(run_deep(third_s, options.seed))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
