"""How large the controller's store becomes over a year of a fleet, and how long a tick it holds.

Each simulated day stores `--incidents` incidents with their courses' length of reasons, as many
decisions and `--layouts` layouts of jobs with `--ranks` ranks, and then lets retention have the
ticks that a real day would have for it, at the default settings but `--history-days`. Times are of
this machine's disk, `fsync` included. Prints a table; last line one line of JSON: `level`: the file
at the end is at most a tenth larger than half way.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from pacekeeper.controller.storage.retention import DAY_S, LOOK_EVERY_S, Retention
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import RetentionConfig
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.layout.even_layout import even_layout

TICKS_A_DAY = 400_000  # of 0.2 s each; only those that have something to do are played
GROWTH = 1.1


def incident(number: int, unix_s: float) -> Incident:
    """One that was opened and closed on this day."""
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=number % 8192,
        slowdown=1.6,
        onset_step=number,
        step=number + 10,
        reason="x1.60 slower than its work explains, over 10 steps; its peers of the stage are not",
        cause="clocks held down by power: 1410 MHz, its peers 1980 MHz",
    )
    return Incident(
        incident_id=number,
        job=f"job-{number % 97}",
        finding=finding,
        opened_unix_s=unix_s,
        closed_unix_s=unix_s + 600.0,
        actions=("token_shares as generation 2 at step 40", "recovered at step 400"),
    )


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--incidents", type=int, default=200)
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--history-days", type=float, default=90.0)
    parser.add_argument("--data", type=Path, help="not needed")
    options = parser.parse_args()
    layout = even_layout(ranks=range(options.ranks), num_layers=4, num_experts=64, replicas=2)
    config = RetentionConfig(history_days=options.history_days)
    times_s, sizes, number = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        store = Store.open(path)
        keeper = Retention(store=store, config=config)
        print("day  file MB  used MB  log MB  longest tick ms")
        for day in range(options.days):
            unix_s = 1e9 + day * DAY_S
            with store.transaction():
                for _ in range(options.incidents):
                    number += 1
                    store.save_incident(incident(number, unix_s))
                    decision = Decision(
                        level=MitigationLevel.NOTHING,
                        layout=None,
                        reason="moving costs more than it brings within 200 steps",
                        current_step_s=1.0,
                        planned_step_s=0.9,
                    )
                    store.save_decision("job", number, decision, unix_s)
                for at in range(options.layouts):
                    store.save_layout(f"job-{day}", replace(layout, generation=at + 1), "", unix_s)
            for tick in range(TICKS_A_DAY):
                used = store.database.used_bytes
                began_s = time.perf_counter()
                keeper.on_tick(day * DAY_S + min(tick, 1) * LOOK_EVERY_S, unix_s)
                times_s.append(time.perf_counter() - began_s)
                if (
                    tick > 1
                    and store.database.used_bytes == used
                    and not store.database.give_back()
                ):
                    break
            sizes.append(path.stat().st_size)
            if day % 30 == 29:
                print(
                    f"{day + 1:3}  {sizes[-1] / 1e6:7.1f}  {store.database.used_bytes / 1e6:7.1f}"
                    f"  {store.database.log_bytes / 1e6:6.1f}  {1e3 * max(times_s):.1f}"
                )
        log_bytes = store.database.log_bytes
        store.close()
    is_level = sizes[-1] <= GROWTH * sizes[len(sizes) // 2]
    print(
        json.dumps(
            {
                "days": options.days,
                "incidents": number,
                "file_mb": round(sizes[-1] / 1e6, 1),
                "largest_mb": round(max(sizes) / 1e6, 1),
                "log_mb": round(log_bytes / 1e6, 1),
                "tick_p99_ms": round(1e3 * sorted(times_s)[len(times_s) * 99 // 100], 1),
                "longest_tick_ms": round(1e3 * max(times_s), 1),
                "level": is_level,
            }
        )
    )


if __name__ == "__main__":
    main()
