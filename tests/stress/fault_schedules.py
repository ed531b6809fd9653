"""Random fault schedules on real ranks: no run may hang, lose a step or lose an expert.

`PYTHONPATH=tests python -m stress.fault_schedules --schedules 50 --seed 0`, some minutes. Ranks are
killed, frozen and resumed, nodes are killed and join, plans are offered and checkpoints damaged,
several at once, inside moves and inside recoveries; some jobs lose all ranks and are started again
by their launchers. `--only N` repeats one schedule; `--minutes` starts no further schedule after
that time. Prints a line per schedule and one line of JSON; exits with 1 if any run was wrong.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

from support.fault_judge import Outcome, Reference
from support.fault_runs import run, undisturbed
from support.fault_schedules import drawn


def main() -> int:
    """Run the schedules; return 1 if any run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these numbers only")
    parser.add_argument("--minutes", type=float, default=inf, help="start none after this time")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    references: dict[tuple[str, int], Reference] = {}
    with tempfile.TemporaryDirectory(prefix="pacekeeper-faults-") as folder:
        for number in arguments.only or range(arguments.schedules):
            if outcomes and time.monotonic() - began_s > arguments.minutes * 60.0:
                break
            schedule = drawn(arguments.seed, number)
            kind = (schedule.dtype, schedule.config.steps)
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
