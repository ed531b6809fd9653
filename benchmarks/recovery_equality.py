"""A run with moves, deaths and joins beside the undisturbed one, step by step.

The first node dies as a whole, with the leader and the store that all met at. float64: losses must
agree within 1e-9. float32 drifts by itself with another order of summation: there the bound is the
largest distance between undisturbed runs of five layouts. Prints a table, last one line of JSON.
"""

import argparse
import json
import sys
import tempfile
from itertools import combinations
from pathlib import Path

STEPS = 200
BOUND = 1e-9
SPREAD_RANKS = (1, 2, 3, 4, 6)  # of the undisturbed runs in float32; the first is the reference


def main() -> int:
    """1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.fault_judge import apart
    from support.fault_runs import run, undisturbed
    from support.fault_schedules import disturbed_run

    result: dict[str, object] = {"steps": arguments.steps}
    is_kept = True
    with tempfile.TemporaryDirectory(prefix="pacekeeper-equality-") as folder:
        for dtype, worlds in (("float64", SPREAD_RANKS[:1]), ("float32", SPREAD_RANKS)):
            schedule = disturbed_run(steps=arguments.steps, dtype=dtype)
            print(schedule)
            references = [
                undisturbed(schedule, Path(folder) / f"{dtype}-{n}", num_ranks=n) for n in worlds
            ]
            infinite = float("inf")
            outcome = run(schedule, Path(folder) / dtype, references[0], tolerance=infinite)
            is_kept &= not outcome.complaints and outcome.ending == "done"
            spread = max(
                (apart(a.losses, b.losses) for a, b in combinations(references, 2)), default=BOUND
            )
            is_kept &= outcome.deviation <= spread
            done = f"{outcome.num_moves} moves, {outcome.num_regroups} regroups"
            done += f", {outcome.num_joined} ranks joined"
            print(f"{dtype}: {done}, apart {outcome.deviation:.1e}, bound {spread:.1e}")
            is_kept &= outcome.num_moves >= 3 and outcome.num_regroups >= 5
            is_kept &= outcome.num_joined == 3 and outcome.has_lost_store
            for complaint in outcome.complaints:
                print(complaint)
            result |= {dtype: outcome.deviation, f"{dtype}_bound": spread}
            result |= {f"{dtype}_steps_lost": outcome.num_lost_steps}
            result |= {f"{dtype}_moves": outcome.num_moves}
            result |= {f"{dtype}_regroups": outcome.num_regroups}
            result |= {f"{dtype}_ranks_joined": outcome.num_joined}
    print(json.dumps(result | {"is_kept": is_kept}))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
