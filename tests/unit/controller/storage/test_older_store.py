"""A store that an older version wrote opens as it was: tests/golden has it as SQL.

It is of a job of four ranks on two nodes whose plans an operator approves: rank 2 became slow,
proposal 1 was denied, proposal 2 approved and applied, rank 1 died, proposal 3 waits.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.store import command
from pacekeeper.controller.observability.timeline_codec import (
    decode_incident_timeline,
    decode_job_timeline,
)
from pacekeeper.controller.state.state import RankStatus, State
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import FindingKind, Tier
from pacekeeper.core.incidents.operator_orders import OrderKind
from pacekeeper.core.incidents.proposals import ProposalState
from support.stores import execute
from support.tree import ROOT

DUMP = ROOT / "tests/golden/controller/storage/older_store.sql"


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Store, State]]:
    """Taken over where it was written, with a copy kept; and read into PostgreSQL, unchanged."""
    path = tmp_path / "store.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(DUMP.read_text())
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    before = list(connection.iterdump())
    connection.close()
    if request.param == "sqlite":
        store, kept_at = Store.open(path), f"{path}.schema-{version}"
    else:
        url = str(request.getfixturevalue("postgres_url"))
        migrated = CliRunner().invoke(command, ["migrate", str(path), url])
        assert migrated.exit_code == 0, migrated.output
        store, kept_at = Store.open(url), str(path)
    kept = sqlite3.connect(kept_at)
    assert list(kept.iterdump()) == before
    kept.close()
    yield store, load_state(store, 1_760_000_000.0)
    store.close()


def test_its_job_goes_on_with_its_layout(opened: tuple[Store, State]) -> None:
    job = opened[1].jobs["moe"]
    assert job.layouts.current is not None
    assert (job.layouts.current.generation, job.layouts.current.ranks) == (3, (0, 2, 3))
    assert [job.remembered[rank].status for rank in (0, 1)] == [RankStatus.ALIVE, RankStatus.DEAD]
    first = opened[0].layout("moe", 1)
    assert first is not None and first[0].batch_shares == tuple((rank, 0.25) for rank in range(4))


def test_its_incidents_are_read(opened: tuple[Store, State]) -> None:
    jobs, incidents, next_id = opened[0].load()
    assert len(jobs) == 1 and next_id == 3
    (slow,) = [one for one in incidents if one.is_open]
    assert (slow.incident_id, slow.finding.kind, slow.finding.rank) == (1, FindingKind.DEVICE, 2)
    assert slow.finding.tier is Tier.PROBABLE and slow.finding.slowdown == 1.5983960658383538
    assert (slow.finding.onset_step, len(slow.actions)) == (12, 6)
    death = opened[0].incident(2)
    assert death is not None and death.finding.kind is FindingKind.DEATH
    assert (death.closed_step, death.nodes) == (34, ("node-0",))
    assert [(one.ranks, one.step, one.closed_step) for one in death.rank_failures] == [
        (((1, 1),), 34, 34)
    ]


def test_its_proposal_still_waits(opened: tuple[Store, State]) -> None:
    (proposal,), next_id = opened[0].open_proposals()
    assert (proposal.proposal_id, next_id) == (3, 4)
    assert proposal.answer is ProposalState.WAITING
    assert (proposal.base.generation, proposal.plan.generation) == (3, 4)
    assert dict(proposal.slow) == {2: pytest.approx(1.6, abs=0.01)}
    assert opened[1].next_proposal_id == 4


def test_its_orders_and_device_history_are_read(opened: tuple[Store, State]) -> None:
    (order,) = opened[0].orders()
    assert (order.kind, order.subject) == (OrderKind.CORDON_NODE, "node-1")
    ((strike,),) = opened[0].strikes().values()
    assert (strike.incident_id, strike.node, strike.device_uuid) == (1, "node-1", "GPU-2")
    decisions = execute(opened[0], "SELECT level, step, moved_bytes FROM decisions")
    assert decisions == [("token_shares", 26, 0)]


def test_its_timelines_are_read(opened: tuple[Store, State]) -> None:
    stored = opened[0].history_tables.incident_timeline(1)
    assert stored is not None
    timeline = decode_incident_timeline(stored)
    assert (timeline.incident_id, timeline.rank, timeline.left_steps) == (1, 2, None)
    assert [note.generation for note in timeline.plans] == [2, 2, 2, None, 4]
    assert [row.generation for row in timeline.rows][-1] == 3
    stored = opened[0].history_tables.job_timeline("moe")
    assert stored is not None
    assert sum(row.num_steps for row in decode_job_timeline(stored)) == 43
