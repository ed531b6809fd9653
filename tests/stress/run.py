"""`make stress`: fuzzers, fault schedules and deep properties, or a slice that a seed chooses.

`PYTHONPATH=tests python -m stress.run --minutes 2 --seed 7`. A third of the time goes to fuzzing
(FUZZ_S of processor time per parser), a third to fault schedules of this seed, a third to the
properties with many random examples (PROPERTIES_S per file). The seed chooses parsers and files so
that consecutive seeds reach all of them. Exits with 1 if anything was found.
"""

import argparse
import subprocess
import sys
import time

from fuzz.seeds import seeds
from support.tree import ROOT

FUZZ_S = 6.0
PROPERTIES_S = 20.0


def slice_of(names: list[str], count: int, seed: int) -> list[str]:
    """Return `count` of the names; the slices of seeds 0, 1, 2... go round all names."""
    count = min(len(names), max(1, count))
    return [names[(seed * count + k) % len(names)] for k in range(count)]


def run_properties(budget_s: float, seed: int) -> int:
    """Run files of properties with many examples; return 1 if one failed.

    A file that does not end within the budget is stopped, which is printed and is no failure.
    """
    files = sorted(str(path) for path in (ROOT / "tests" / "property").rglob("test_*.py"))
    ends_s, failed = time.monotonic() + budget_s, False
    for file in slice_of(files, int(budget_s / PROPERTIES_S), seed):
        left_s = ends_s - time.monotonic()
        if left_s <= 0.0:
            break
        deep = ["--hypothesis-profile", "deep", "--hypothesis-seed", str(seed)]
        command = [sys.executable, "-Im", "pytest", "-q", "--timeout", "0", *deep, file]
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
    codes.append(run_properties(third_s, options.seed))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
