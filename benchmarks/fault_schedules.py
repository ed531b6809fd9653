"""Random fault schedules on real ranks: none may hang, none may lose a step or an expert.

`python -m benchmarks.fault_schedules --schedules 50 --seed 0`; some minutes. Ranks are killed,
frozen and woken, nodes killed and joined, plans offered, checkpoints damaged, several at once,
inside moves and inside recoveries; of some jobs all ranks die, and their launchers start them
again. `--moves`: instead plans of every kind, for 2 stages x 2 ranks x 2 pipelines, and ranks
that are struck in the middle. `--only N` runs one of them again. Prints a line for each, last one
line of JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path


def main() -> int:
    """1 where anything came out as it must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these numbers only")
    parser.add_argument("--moves", action="store_true", help="of stages and tensor groups")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.fault_judge import Reference
    from support.fault_runs import run, undisturbed
    from support.fault_schedules import drawn, drawn_moves

    outcomes = []
    references: dict[tuple[str, int], Reference] = {}
    with tempfile.TemporaryDirectory(prefix="pacekeeper-faults-") as folder:
        for number in arguments.only or range(arguments.schedules):
            schedule = (drawn_moves if arguments.moves else drawn)(arguments.seed, number)
            kind = (schedule.config.dtype, schedule.config.steps)
            if kind not in references:
                references[kind] = undisturbed(schedule, Path(folder) / "-".join(map(str, kind)))
            outcome = run(schedule, Path(folder) / str(number), references[kind])
            outcomes.append(replace(outcome, losses=()))
            print(f"{number:3d} {outcome.ending:10s} {outcome.took_s:5.1f} s  {schedule}")
            for complaint in outcome.complaints:
                print(f"      {complaint}")
            sys.stdout.flush()
    endings = Counter(outcome.ending for outcome in outcomes)
    wrong = sum(bool(outcome.complaints) for outcome in outcomes)
    print(
        json.dumps(
            {
                "schedules": len(outcomes),
                "done": endings["done"],
                "lost_state": endings["lost state"],
                "no_quorum": endings["no quorum"],
                "hung": endings["hung"],
                "wrong": wrong,
                "lost_steps": sum(outcome.num_lost_steps for outcome in outcomes),
                "lost_experts": sum(outcome.num_lost_experts for outcome in outcomes),
                "plans_followed": sum(outcome.num_moves for outcome in outcomes),
                "ranks_joined": sum(outcome.num_joined for outcome in outcomes),
                "restarts": sum(outcome.num_restarts for outcome in outcomes),
                "went_back": sum(outcome.num_went_back for outcome in outcomes),
                "checkpoints_damaged": sum(outcome.num_spoilt for outcome in outcomes),
                "first_store_lost": sum(outcome.has_lost_store for outcome in outcomes),
                "deviation_max": max(outcome.deviation for outcome in outcomes),
                "took_max_s": round(max(outcome.took_s for outcome in outcomes), 1),
                "load_average": round(os.getloadavg()[0], 1),
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
