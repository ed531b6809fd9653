"""`make stress`: the fuzzers and fault schedules, or a slice of them that a seed chooses.

`PYTHONPATH=tests python -m stress.run --minutes 2 --seed 7`. Half of the time goes to fuzzing
(FUZZ_S of processor time per parser; the seed chooses the parsers, so that consecutive seeds reach
all of them), half to fault schedules of this seed. Exits with 1 if either found anything.
"""

import argparse
import subprocess
import sys

from fuzz.seeds import seeds
from support.tree import ROOT

FUZZ_S = 6.0


def parsers_of_slice(names: list[str], budget_s: float, seed: int) -> list[str]:
    """Return the parsers that fit in `budget_s`; slices of seeds 0, 1, 2... go round all names."""
    count = min(len(names), max(1, int(budget_s / FUZZ_S)))
    return [names[(seed * count + k) % len(names)] for k in range(count)]


def main() -> int:
    """Run the slice; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    half_s = options.minutes * 30.0
    chosen = parsers_of_slice(sorted(seeds()), half_s, options.seed)
    each_minutes = half_s / len(chosen) / 60.0
    fuzz = ["fuzz.run", "--minutes", str(each_minutes), *(f"--only={name}" for name in chosen)]
    faults = ["stress.fault_schedules", "--minutes", str(half_s / 60.0), "--schedules", "100000"]
    codes = [
        subprocess.run(
            [sys.executable, "-m", *command, "--seed", str(options.seed)], cwd=ROOT, check=False
        ).returncode
        for command in (fuzz, faults)
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
