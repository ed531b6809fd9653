"""`pacekeeper top`: what its keys show and do, on a screen of 80 by 24."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="needs pacekeeper[cli]")

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from pacekeeper.cli.top.app import ConfirmScreen, ExplanationScreen, TopApp
from pacekeeper.cli.top.rows import SortKey, select_ranks
from pacekeeper.cli.top.source import Snapshot
from pacekeeper.controller.api.messages import (
    explanation_view,
    incident_view,
    job_timeline_view,
    job_view,
)
from pacekeeper.core.errors import ExitCode, UnreachableError
from pacekeeper.core.incidents.operator_orders import OrderKind
from pacekeeper.protos import status_pb2
from support.commands import pacekeeper
from support.web_scene import scene

Play = Callable[[TopApp, Pilot[None]], Awaitable[None]]


class Told:
    """A source whose controller stands still; keeps what it was told to do."""

    def __init__(self, folder: Path) -> None:
        found = scene(folder, num_nodes=8)
        state = found.state
        self.jobs = tuple(job_view(state, state.jobs[name]) for name in sorted(state.jobs))
        self.incidents = {
            name: tuple(incident_view(state, one) for one in job.incidents)
            for name, job in state.jobs.items()
        }
        self.pace = job_timeline_view(found.history.job_timeline("pretrain-moe"))
        explanation = found.history.explain(state, 1)
        assert explanation is not None
        self.explanation = explanation_view(state, explanation)
        self.done: list[tuple[Any, ...]] = []
        self.trouble = ""
        self.looked = threading.Event()
        found.history.store.close()
        found.audit.close()

    def fetch(self, job: str) -> Snapshot:
        self.looked.set()
        if self.trouble:
            raise UnreachableError(self.trouble)
        name = job or self.jobs[0].name
        return Snapshot(jobs=self.jobs, incidents=self.incidents[name], pace=self.pace)

    def explain(self, incident_id: int) -> Any:
        return self.explanation

    def answer(self, proposal_id: int, *, is_approved: bool) -> str:
        self.done.append(("answer", proposal_id, is_approved))
        return f"proposal {proposal_id} is answered"

    def order(self, kind: OrderKind, subject: str, *, is_on: bool) -> str:
        self.done.append((kind, subject, is_on))
        return f"{kind} {subject} stands"


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def played(told: Told, play: Play, *, job: str = "pretrain-moe") -> None:
    async def run() -> None:
        app = TopApp(told, job=job, period_s=60.0)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            await play(app, pilot)

    asyncio.run(run())


async def settled(app: TopApp, pilot: Pilot[None]) -> None:
    """What runs beside the screen is done, and drawn."""
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


def column(app: TopApp, table: str, at: int) -> list[str]:
    rows = app.query_one(table, DataTable)
    return [str(rows.get_row_at(i)[at]) for i in range(rows.row_count)]


def said(app: TopApp, name: str = "#message") -> str:
    return str(app.query_one(name, Static).render())


def test_the_slowest_ranks_come_first_and_all_fits_the_screen(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        assert column(app, "#ranks", 0)[:1] == ["21"]
        assert column(app, "#ranks", 3)[:1] == ["x1.62"]
        head = said(app, "#head")
        assert "pretrain-moe" in head and "4,280,000" in head
        assert "\u2581" in said(app, "#throughput")
        assert column(app, "#incidents", 0) == ["2", "1"], "open ones first"
        assert all(widget.region.right <= 80 for widget in app.screen.walk_children(Static))

    played(told, play)


def test_keys_sort_reverse_and_filter(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("s", "s")
        assert "rank" in said(app) and column(app, "#ranks", 0)[:2] == ["0", "1"]
        await pilot.press("r")
        assert column(app, "#ranks", 0)[:1] == ["47"]
        await pilot.press("slash", *"gpu-002", "enter")
        assert set(column(app, "#ranks", 1)) == {"gpu-002"}
        await pilot.press("escape")
        assert len(column(app, "#ranks", 0)) == 48

    played(told, play)


def test_the_next_job_and_the_one_before(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("j")
        await settled(app, pilot)
        assert "ablation-7" in said(app, "#head") and len(column(app, "#ranks", 0)) == 16
        await pilot.press("k")
        assert "pretrain-moe" in said(app, "#head")

    played(told, play)


def test_an_incident_is_explained_and_left_again(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("i", "enter")
        await settled(app, pilot)
        assert isinstance(app.screen, ExplanationScreen)
        text = str(app.screen.query_one(Static).render())
        assert "clock_events" in text
        await pilot.press("escape")
        assert not isinstance(app.screen, ExplanationScreen)

    played(told, play)


@pytest.mark.parametrize(
    ("key", "done"),
    [
        ("c", (OrderKind.CORDON_RANK, "ablation-7/3", True)),
        ("p", (OrderKind.PAUSE, "ablation-7", True)),
        ("y", (OrderKind.DRY_RUN, "", True)),
        ("a", ("answer", 1, True)),
        ("d", ("answer", 1, False)),
    ],
)
def test_an_act_is_done_when_a_person_is_sure(
    told: Told, key: str, done: tuple[object, ...]
) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("n")
        await settled(app, pilot)
        assert told.done == []
        await pilot.press(key, "y")
        await settled(app, pilot)
        assert told.done == [done]
        assert said(app).endswith(("stands", "answered"))

    played(told, play, job="ablation-7")


def test_a_controller_that_is_away_is_said_and_what_was_seen_stays(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        told.trouble = "no controller at 127.0.0.1:7443"
        app.poll()
        await settled(app, pilot)
        assert told.trouble in said(app)
        assert len(column(app, "#ranks", 0)) == 48
        told.trouble = ""
        app.poll()
        await settled(app, pilot)
        assert said(app) == ""

    played(told, play)


def test_the_cursor_stays_where_it_was(told: Told) -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("down", "down", "down")
        app.poll()
        await settled(app, pilot)
        assert app.query_one("#ranks", DataTable).cursor_row == 3

    played(told, play)


def test_where_nothing_can_be_drawn_another_command_is_named() -> None:
    done = pacekeeper("top")
    assert done.returncode == ExitCode.HOST
    assert "status" in done.stderr


def rank(number: int, **values: Any) -> Any:
    return status_pb2.Rank(rank=number, node=f"n{number % 2}", state="alive", **values)


def test_words_of_the_filter_must_all_match() -> None:
    ranks = [rank(1), rank(11, is_cordoned=True), rank(2), rank(3, slowdown=1.2)]

    def found(wanted: str, order: SortKey = SortKey.RANK) -> list[int]:
        return [one.rank for one in select_ranks(ranks, wanted, order, is_reversed=False)]

    assert found("") == [1, 2, 3, 11]
    assert found("1") == [1], "a number is a rank, not a part of one"
    assert found("N1 alive") == [1, 3, 11]
    assert found("n1 cordoned") == [11]
    assert found("nobody") == []
    assert found("", SortKey.SLOWDOWN)[:1] == [3], "unknown is no slowdown"
