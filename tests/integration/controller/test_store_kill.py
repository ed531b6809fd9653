"""kill -9 in mid-write, again and again: what was acknowledged is there, nothing is half there."""

import random
import subprocess
import sys
import time
from pathlib import Path

from pacekeeper.controller.storage.store import Store

LIVES = 8
WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.layout.even_layout import even_layout

store = Store.open(Path(sys.argv[1]))
jobs, incidents, number = store.load()
layout = even_layout(ranks=range(8), num_layers=4, num_experts=16, replicas=2)
while True:
    finding = Finding(kind=FindingKind.DEVICE, tier=Tier.PROBABLE, rank=1, slowdown=1.5,
                      onset_step=number, step=number, reason="x" * 3000)
    with store.transaction():
        store.save_incident(
            Incident(incident_id=number, job="j", finding=finding, opened_unix_s=0.0))
        store.save_layout("j", replace(layout, generation=number), f"of {number}", 0.0)
        store.save_job(JobRecord(name="j", newest_generation=number, step=number, layout=None,
                                 layout_reason="", desired=None, baseline=None))
    print(number, flush=True)
    number += 1
"""


def test_everything_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "store"
    moments = random.Random(7)
    total = 0
    for _ in range(LIVES):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline())]  # it writes: now the clock runs
            time.sleep(moments.uniform(0.0, 0.1))
            writer.kill()
            acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
        store = Store.open(path)
        (job,), incidents, next_id = store.load()
        assert [i.incident_id for i in incidents] == list(range(1, next_id)), "without a gap"
        assert next_id - 1 in (acknowledged[-1], acknowledged[-1] + 1), "all, at most one more"
        assert job.newest_generation == next_id - 1, "a transaction is whole or not there"
        found = store.layout("j", next_id - 1)
        assert found is not None and found[1] == f"of {next_id - 1}"
        store.close()
        assert next_id - 1 > total
        total = next_id - 1
