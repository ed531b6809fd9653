"""A store that is not whole is refused when it is opened, with what is wrong; never half read."""

import asyncio
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.store import command
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage.restore import restored
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.protos import status_pb2

INCIDENTS = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with many incidents of a job that is over."""
    path = tmp_path / "store"
    store = Store.open(path)
    finding = Finding(
        kind=FindingKind.DEVICE, tier=Tier.PROBABLE, rank=1, slowdown=1.5, onset_step=1, step=2,
        reason="slow " * 20,
    )  # fmt: skip
    with store.transaction():
        for number in range(1, INCIDENTS + 1):
            store.save_incident(
                Incident(incident_id=number, job="j", finding=finding, opened_unix_s=1.0)
            )
    store.close()
    return path


def changed(path: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def pages_of(path: Path, table: str) -> Iterator[int]:
    """Where the leaves of a table begin."""
    data = path.read_bytes()
    connection = sqlite3.connect(path)
    (root,) = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)
    ).fetchone()
    connection.close()
    at = (root - 1) * 4096
    assert data[at] == 5, "an inner page"
    for i in range(int.from_bytes(data[at + 3 : at + 5], "big")):
        cell = at + int.from_bytes(data[at + 12 + 2 * i : at + 14 + 2 * i], "big")
        yield (int.from_bytes(data[cell : cell + 4], "big") - 1) * 4096


def test_a_page_that_has_lost_rows_is_damage_though_sqlite_would_read_the_others(
    path: Path,
) -> None:
    data = bytearray(path.read_bytes())
    leaf = next(pages_of(path, "incidents"))
    count = int.from_bytes(data[leaf + 3 : leaf + 5], "big")
    data[leaf + 3 : leaf + 5] = (count - 2).to_bytes(2, "big")
    path.write_bytes(data)
    connection = sqlite3.connect(path)
    (left,) = connection.execute("SELECT count(*) FROM incidents").fetchone()
    connection.close()
    assert left == INCIDENTS - 2, "without a word"
    with pytest.raises(HostError, match="damaged"):
        Store.open(path)
    to = path.with_name("copy")
    done = CliRunner().invoke(command, ["backup", str(path), str(to)])
    assert isinstance(done.exception, HostError)
    assert not to.exists()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE incidents SET reason = x'ff' WHERE incident_id = 8",
        "UPDATE incidents SET reason = CAST(x'ff' AS TEXT)",
        "UPDATE incidents SET step = -1",
        "UPDATE incidents SET rank = 4294967296",
        "UPDATE incidents SET onset_step = 'seven'",
    ],
)
def test_a_row_that_cannot_be_decoded_is_damage_when_it_is_read(statement: str, path: Path) -> None:
    changed(path, statement)
    store = Store.open(path)
    with pytest.raises(DamagedError):
        store.incident(8)
    store.close()


def test_a_job_that_has_not_ended_a_step_is_no_damage(path: Path) -> None:
    before = JobRecord(
        name="young", newest_generation=1, step=-1, layout=None, layout_reason="", desired=None,
        baseline=None,
    )  # fmt: skip
    store = Store.open(path)
    store.save_job(before)
    store.save_decision(
        "young", -1, Decision(level=MitigationLevel.NOTHING, layout=None, reason="r"), 1.0
    )
    (last,) = [one for one in [store.incident(INCIDENTS)] if one is not None]
    store.save_incident(replace(last, closed_unix_s=2.0, closed_step=-1))
    store.close()
    store = Store.open(path)
    assert store.load()[0] == (before,)
    store.close()


def test_an_older_store_is_not_taken_over_with_what_is_left_of_it(path: Path) -> None:
    changed(path, "PRAGMA user_version = 12")
    data = bytearray(path.read_bytes())
    leaf = next(pages_of(path, "incidents"))
    data[leaf + 3 : leaf + 5] = (1).to_bytes(2, "big")
    path.write_bytes(data)
    with pytest.raises(HostError, match="damaged"):
        Store.open(path)
    assert path.read_bytes() == data


class Context:
    """Refuses as gRPC does."""

    async def abort(self, code: grpc.StatusCode, why: str) -> None:
        raise LookupError(code, why)


def test_who_asks_for_what_is_damaged_is_told_so_and_others_are_answered(path: Path) -> None:
    store = Store.open(path)
    changed(path, "UPDATE incidents SET kind = 'ghost' WHERE incident_id = 3")
    jobs, incidents, next_id = store.load()
    state = restored(jobs, incidents, next_incident_id=next_id, unix_offset_s=0.0)
    status = StatusService(
        state=lambda: state, past_layout=store.layout, history=TimelineWriter(store=store)
    )

    def explained(number: int) -> Any:
        request = status_pb2.GetExplanationRequest(incident_id=number)
        return asyncio.run(status.GetExplanation(request, Context()))

    with pytest.raises(LookupError) as caught:
        explained(3)
    assert caught.value.args[0] is grpc.StatusCode.DATA_LOSS
    assert "ghost" in caught.value.args[1]
    assert explained(4).explanation.incident.incident_id == 4
    store.close()


def test_an_emptied_store_is_begun_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Store.open(tmp_path / "new").close()
    assert caplog.messages == []
    (tmp_path / "emptied").touch()
    Store.open(tmp_path / "emptied").close()
    (said,) = caplog.messages
    assert "was an empty file: it begins without a past" in said
