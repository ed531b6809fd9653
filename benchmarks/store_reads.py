"""What reading costs with many incidents in the store, on both engines.

`--incidents` closed incidents of `--jobs` jobs are stored, no more of a job than a controller keeps
in memory; a quarter of the jobs is forgotten, so that only the store has theirs. They are loaded as
a controller does at its start (`load_s`, from the store), with its settings of the garbage
collector. Then, through the web application without a network: pages of the table of incidents
(`page`) and of a search in it (`search`), both made from what is in memory (`in_memory` incidents),
and explanations of incidents (`incident`), which ask the store; `asked_store` is the number of
requests of each that did. Wall times after a first one of each, p50 and max, and the same of this
process' CPU time, which a busy host hardly lengthens. Bar: a page of incidents within 100 ms, on
both engines.

PostgreSQL needs a server (Debian: postgresql); without one the run has not passed and names the
engine in `left_out`. Prints a table, last one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from benchmarks.store_size import incident
from pacekeeper.cli.services.controller import collect_rarely
from pacekeeper.controller.api.auth.audit_log import AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.operator_actions import OperatorActions
from pacekeeper.controller.api.web.app import WebApp
from pacekeeper.controller.api.web.auth import WebAuthenticator
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.rows import incident_row
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import StoreThread
from pacekeeper.controller.storage.tables import INCIDENTS, storable
from pacekeeper.core.config.security import AccessConfig, LimitsConfig
from pacekeeper.core.incidents.findings import Incident

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.postgres import cluster, new_database, server_folder

BAR_S = 0.1
ENGINES = ("sqlite", "postgresql")
P = ParamSpec("P")
T = TypeVar("T")
TOGETHER = 5000  # incidents in a transaction


def fill(store: Store, num_incidents: int, num_jobs: int) -> None:
    """Each job has its share; a fourth of the jobs has ended and is forgotten."""
    for first in range(1, num_incidents + 1, TOGETHER):
        numbers = range(first, min(first + TOGETHER, num_incidents + 1))
        rows = [storable(incident_row(_of(number, num_jobs))) for number in numbers]
        with store.transaction(), store.connected() as connection:
            connection.execute(sa.insert(INCIDENTS), rows)
    with store.transaction():
        for number in range(num_jobs * 3 // 4):
            store.save_job(
                JobRecord(
                    name=f"job-{number}",
                    newest_generation=1,
                    step=1,
                    layout=None,
                    layout_reason="",
                    desired=None,
                    baseline=None,
                )
            )


def _of(number: int, num_jobs: int) -> Incident:
    return replace(incident(number, 1e9 + number), job=f"job-{number % num_jobs}")


async def measure(store: Store, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one engine."""
    thread = StoreThread()
    began_s = time.perf_counter()
    state = await thread.run(load_state, store, 0.0)
    load_s = time.perf_counter() - began_s

    asked = 0

    async def ask(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal asked
        asked += 1
        return await thread.run(function, *args, **kwargs)

    async def put(event: Event) -> None:
        raise AssertionError("nothing is changed here")

    audit = AuditLog(folder / "audit", max_bytes=1 << 20, kept=1, on_failure=lambda: None)
    app = WebApp(
        state=lambda: state,
        history=TimelineWriter(store=store),
        ask=ask,
        actions=OperatorActions(state=lambda: state, put=put),
        authenticator=WebAuthenticator(
            authenticator=Authenticator(is_required=False, config=AccessConfig(), tokens=None),
            is_secure=False,
            limits=LimitsConfig(calls_per_s=1e6, calls_at_once=1_000_000),
            audit=audit,
        ),
        past_layout=lambda job, generation: None,
    ).app()
    random, times, cpu = Random(7), dict[str, list[float]](), dict[str, list[float]]()
    asked_store = Counter[str]()
    for _ in range(1 + options.requests):
        first = random.randrange(max(1, options.incidents // 2))
        number = random.randrange(1, options.incidents + 1)
        for kind, path, query in (
            ("page", "/incidents", f"first={first}"),
            ("search", "/incidents", f"find=rank+{number % 8192}+power"),
            ("incident", f"/data/incidents/{number}", ""),
        ):
            began_s, asked = time.process_time(), 0
            times.setdefault(kind, []).append(await timed(app, path, query))
            cpu.setdefault(kind, []).append(time.process_time() - began_s)
            asked_store[kind] += asked > 0
    thread.close()
    audit.close()
    known = sum(len(job.incidents) for job in state.jobs.values())
    figures: dict[str, Any] = {"load_s": round(load_s, 2), "in_memory": known}
    for kind, (_, *found) in times.items():
        figures[f"{kind}_asked_store"] = f"{asked_store[kind]}/{1 + len(found)}"
        figures[f"{kind}_p50_ms"] = round(1e3 * statistics.median(found), 1)
        figures[f"{kind}_max_ms"] = round(1e3 * max(found), 1)
        figures[f"{kind}_cpu_ms"] = round(1e3 * statistics.median(cpu[kind][1:]), 1)
        figures[f"{kind}_cpu_max_ms"] = round(1e3 * max(cpu[kind][1:]), 1)
    return figures


async def timed(app: Any, path: str, query: str) -> float:
    """Seconds of one GET."""
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/html")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    began_s = time.perf_counter()
    await app(scope, receive, send)
    assert status == 200, (path, status)
    return time.perf_counter() - began_s


@contextlib.contextmanager
def places(folder: Path) -> Iterator[dict[str, str]]:
    """Where the stores are, of both engines if there is a PostgreSQL server."""
    with contextlib.ExitStack() as stack:
        found = {"sqlite": str(folder / "store.sqlite")}
        if server_folder() is not None:
            found["postgresql"] = new_database(stack.enter_context(cluster()).url())
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--incidents", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    collect_rarely()
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="store-reads-") as root, places(Path(root)) as found:
        for engine, where in found.items():
            store = Store.open(where)
            fill(store, options.incidents, options.jobs)
            figures[engine] = asyncio.run(measure(store, Path(root), options))
            store.close()
    for name in next(iter(figures.values())):
        print(f"{name:20s}" + "".join(f"{one[name]:>12}" for one in figures.values()))
    worst_s = max(one["page_max_ms"] for one in figures.values()) / 1e3
    left_out = [engine for engine in ENGINES if engine not in figures]
    print(f"left out: {', '.join(left_out) or 'nothing'}")
    passed = worst_s <= BAR_S and not left_out
    told = {"incidents": options.incidents, **figures, "left_out": left_out, "passed": passed}
    print(json.dumps(told))
    return 0 if told["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
