"""What is over goes by age, by number and by size; what is open, ordered or counted on never does;
after months of jobs the store and the memory are as large as after weeks.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from pacekeeper.controller.state.device_history import Strike
from pacekeeper.controller.state.events import Event, NodeReported
from pacekeeper.controller.state.state import JobState
from pacekeeper.controller.storage import retention
from pacekeeper.controller.storage.retention import DAY_S, LOOK_EVERY_S, Retention
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.write_batch import WriteBatch, write
from pacekeeper.core.config.controller import ControllerConfig, RetentionConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from support.machine_driver import (
    FIRST,
    UNIX_OFFSET_S,
    WARM,
    Driver,
    applied,
    attachment,
    exited,
    step,
)
from support.stores import execute

NOW_S = 1000.0 * DAY_S
LETTERS = [chr(code) for code in range(0x100, 0x7FF)]  # nothing that PostgreSQL can compress
LONG_AGO_S = NOW_S - 91.0 * DAY_S


@pytest.fixture
def store(place: str | Path) -> Iterator[Store]:
    found = Store.open(place)
    if isinstance(place, Path):
        execute(found, "PRAGMA synchronous = OFF")  # nobody kills us here
    yield found
    found.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    found = Store.open(tmp_path / "store")
    yield found
    found.close()


def incident(number: int, closed_unix_s: float | None, kind: str = "device") -> Incident:
    finding = Finding(
        kind=FindingKind(kind),
        tier=Tier.PROBABLE,
        rank=2,
        slowdown=1.5,
        onset_step=1,
        step=2,
        reason="slow",
    )
    return Incident(
        incident_id=number,
        job="moe",
        finding=finding,
        opened_unix_s=1.0,
        closed_unix_s=closed_unix_s,
    )


def proposal(number: int, answer: ProposalState, made_unix_s: float) -> Proposal:
    decision = Decision(
        level=MitigationLevel.MOVE_REPLICAS,
        layout=FIRST,
        reason="",
        current_step_s=2.0,
        planned_step_s=1.0,
    )
    return Proposal(
        proposal_id=number,
        job="moe",
        decision=decision,
        base=FIRST,
        slow={},
        incident_ids=(),
        made_unix_s=made_unix_s,
        expires_unix_s=made_unix_s + 1.0,
        answer=answer,
    )


def decision(text: str = "why") -> Decision:
    return Decision(
        level=MitigationLevel.NOTHING,
        layout=None,
        reason=text,
        current_step_s=1.0,
        planned_step_s=1.0,
    )


def let_go(store: Store, config: RetentionConfig | None = None, ticks: int = 200) -> None:
    """Ticks of the first minute: it begins to look once."""
    keeper = Retention(store=store, config=config or RetentionConfig())
    for i in range(ticks):
        keeper.on_tick(100.0 + i * LOOK_EVERY_S / (ticks + 1), NOW_S)


def numbers(store: Store, table: str, key: str) -> list[int]:
    return [n for (n,) in execute(store, f"SELECT {key} FROM {table} ORDER BY {key}")]


class TestByAge:
    def test_closed_incidents_go_with_their_courses_and_open_ones_never(self, store: Store) -> None:
        for number, closed in ((1, LONG_AGO_S), (2, None), (3, NOW_S - DAY_S), (4, NOW_S)):
            store.save_incident(incident(number, closed))
            store.history_tables.save_incident_timeline(number, "moe", b"course")
        let_go(store)
        assert numbers(store, "incidents", "incident_id") == [2, 3, 4]
        assert numbers(store, "incident_timelines", "incident_id") == [2, 3, 4]

    def test_the_newest_number_is_not_given_twice(self, store: Store) -> None:
        for number in (1, 2):
            store.save_incident(incident(number, LONG_AGO_S))
            store.save_proposal(proposal(number, ProposalState.DENIED, LONG_AGO_S))
        let_go(store)
        assert store.load()[2] == 3 and store.open_proposals()[1] == 3

    def test_proposals_that_wait_or_were_approved_stay(self, store: Store) -> None:
        answers = (
            ProposalState.WAITING,
            ProposalState.APPROVED,
            ProposalState.DENIED,
            ProposalState.EXPIRED,
            ProposalState.WAITING,
        )
        for number, answer in enumerate(answers):
            store.save_proposal(proposal(number, answer, LONG_AGO_S))
        let_go(store)
        assert numbers(store, "proposals", "proposal_id") == [0, 1, 4]

    def test_decisions_layouts_and_paces_go(self, store: Store) -> None:
        for unix_s, name in ((LONG_AGO_S, "old"), (NOW_S, "new")):
            store.save_decision(name, 1, decision(), unix_s)
            store.save_layout(name, FIRST, "", unix_s)
            store.history_tables.save_job_timeline(name, b"0", unix_s)
        let_go(store)
        for table in ("decisions", "layouts", "job_timelines"):
            assert execute(store, f"SELECT job FROM {table}") == [("new",)]

    def test_orders_and_what_fleet_memory_needs_have_no_end_here(self, store: Store) -> None:
        order = OperatorOrder(
            kind=OrderKind.CORDON_NODE,
            subject="n",
            operator="ada",
            reason="noise",
            since_unix_s=LONG_AGO_S,
        )
        strike = Strike(
            incident_id=1,
            node="n",
            device_uuid="GPU-1",
            job="moe",
            kind=FindingKind.DEVICE,
            slowdown=1.6,
            unix_s=LONG_AGO_S + 2.0 * DAY_S,
        )
        store.history_tables.save_order(order)
        store.history_tables.save_strike(strike)
        store.save_incident(incident(1, LONG_AGO_S))
        store.save_incident(incident(2, NOW_S))
        let_go(store)
        assert numbers(store, "incidents", "incident_id") == [2]
        assert store.orders() == (order,) and store.strikes() == {"n": (strike,)}


class TestByNumber:
    def test_the_newest_stay_whatever_closed_at_one_moment(self, store: Store) -> None:
        for number in range(200):
            store.save_incident(incident(number, NOW_S))
            store.save_decision("moe", number, decision(), NOW_S + number)
            store.save_layout("moe", replace(FIRST, generation=number + 1), "", NOW_S - number)
        few = RetentionConfig(incidents=20, decisions=30, layouts=10)
        let_go(store, few)
        assert numbers(store, "incidents", "incident_id") == [*range(179, 200)]
        assert numbers(store, "decisions", "step") == [*range(170, 200)]
        assert numbers(store, "layouts", "generation") == [*range(1, 11)]

    def test_open_incidents_are_not_counted(self, store: Store) -> None:
        for number in range(1, 40):
            store.save_incident(incident(number, None if number <= 30 else NOW_S))
        let_go(store, RetentionConfig(incidents=3))
        assert numbers(store, "incidents", "incident_id") == [*range(1, 31), 36, 37, 38, 39]


class TestBySize:
    def test_the_oldest_of_each_kind_go_until_the_rest_fits(self, store: Store) -> None:
        text = "".join(Random(0).choices(LETTERS, k=2000))
        for number in range(400):
            store.save_decision("moe", number, decision(text), NOW_S + number)
            store.save_incident(incident(number, NOW_S + number))
            store.save_layout("moe", replace(FIRST, generation=number + 1), text, NOW_S + number)
        small = RetentionConfig(store_bytes=1 << 20)
        assert store.database.used_bytes > 2 << 20
        let_go(store, small)
        assert store.database.used_bytes <= 1 << 20
        firsts = []
        for table, key, newest in (("decisions", "step", 399), ("layouts", "generation", 400)):
            left = numbers(store, table, key)
            assert left == [*range(left[0], newest + 1)], f"the newest {table}"
            firsts.append(left[0])
        assert abs(firsts[0] - firsts[1]) <= retention.DECISION_RULE.batch, "they go side by side"

    def test_what_is_open_stays_and_is_said_to_be_too_much(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = "".join(Random(0).choices(LETTERS, k=2000))
        for number in range(400):
            open_one = incident(number, None)
            store.save_incident(replace(open_one, finding=replace(open_one.finding, reason=text)))
        with caplog.at_level(logging.WARNING, "pacekeeper.controller.storage.retention"):
            let_go(store, RetentionConfig(store_bytes=1 << 20), ticks=10)
        assert numbers(store, "incidents", "incident_id") == [*range(400)]
        assert [r.getMessage() for r in caplog.records] == [
            "store: running jobs and open incidents need more than store_bytes = 1048576"
        ]


class TestLittleByLittle:
    def test_a_tick_drops_one_batch_at_most(self, store: Store) -> None:
        for number in range(300):
            store.save_incident(incident(number, LONG_AGO_S))
        keeper = Retention(store=store, config=RetentionConfig())
        left = []
        for tick in range(6):
            keeper.on_tick(100.0 + 0.2 * tick, NOW_S)
            left.append(len(numbers(store, "incidents", "incident_id")))
        batch = retention.INCIDENT_RULE.batch
        assert left == [300 - batch, 300 - 2 * batch, 300 - 3 * batch, 300 - 4 * batch, 1, 1]

    def test_nothing_is_looked_for_again_within_a_minute(self, store: Store) -> None:
        keeper = Retention(store=store, config=RetentionConfig())
        keeper.on_tick(100.0, NOW_S)
        store.save_incident(incident(1, LONG_AGO_S))
        store.save_incident(incident(2, LONG_AGO_S))
        keeper.on_tick(99.0 + LOOK_EVERY_S, NOW_S)
        assert numbers(store, "incidents", "incident_id") == [1, 2]
        keeper.on_tick(100.0 + LOOK_EVERY_S, NOW_S)
        assert numbers(store, "incidents", "incident_id") == [2]

    def test_a_store_that_refuses_is_told_of_once_and_tried_again(
        self, file_store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = file_store
        store.save_incident(incident(1, LONG_AGO_S))
        store.save_incident(incident(2, NOW_S))
        execute(store, "PRAGMA query_only = 1")
        keeper = Retention(store=store, config=RetentionConfig())
        with caplog.at_level(logging.WARNING, "pacekeeper.controller.storage.retention"):
            for i in range(3):
                keeper.on_tick(i * LOOK_EVERY_S, NOW_S)
        assert ["cannot be deleted" in r.getMessage() for r in caplog.records] == [True]
        execute(store, "PRAGMA query_only = 0")
        keeper.on_tick(3 * LOOK_EVERY_S, NOW_S)
        assert numbers(store, "incidents", "incident_id") == [2]

    def test_a_log_that_somebody_keeps_from_being_written_back_is_told_of(
        self, file_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(retention, "LONG_LOG_BYTES", 0)
        file_store.save_incident(incident(1, None))
        assert file_store.database.log_bytes > 0
        with caplog.at_level(logging.WARNING, "pacekeeper.controller.storage.retention"):
            let_go(file_store, ticks=5)
        assert "another process has read it" in caplog.text


@dataclass(kw_only=True)
class Months(Driver):
    """A controller whose state is stored as the real one's is; each job has a name of its own."""

    name: str = ""
    store: Store
    writes: WriteBatch = field(default_factory=WriteBatch)

    @property
    def job(self) -> JobState:
        return self.state.jobs[self.name]

    def event(self, event: Event) -> None:
        if isinstance(event, NodeReported):
            (part,) = event.report.jobs
            attached = tuple(replace(one, job=self.name) for one in part.attached)
            part = replace(part, job=self.name, attached=attached)
            event = replace(event, report=replace(event.report, jobs=(part,)))
        super().event(event)
        with self.store.transaction():
            for command in self.writes.of(self.state, self.said, self.now_s):
                write(self.store, self.state, command, self.now_s + UNIX_OFFSET_S)

    def days(self, day: int, keeper: Retention) -> None:
        """A job begins, has a slow rank, is helped, ends; then the ticks of five days."""
        self.name = f"job-{day}"
        for node in ("node-0", "node-1"):
            self.agent(node)
        self.report(attached=[attachment(r) for r in (0, 1)], layouts=[FIRST])
        self.report(attached=[attachment(r) for r in (2, 3)], node="node-1")
        self.report(*applied(FIRST))
        for number in range(WARM + 12):
            self.now_s += 0.2
            self.report(*step(number, slow=2 if number >= WARM else None))
            if self.job.plan.desired is not None:
                break
        assert any(i.finding.kind is FindingKind.DEVICE for i in self.job.incidents), "it is found"
        self.report(*[exited(rank, signal=0) for rank in range(4)])
        for _ in range(10):
            self.tick(DAY_S / 2)
            for _ in range(8):
                keeper.on_tick(self.now_s, self.now_s + UNIX_OFFSET_S)


def test_after_months_store_and_memory_are_as_large_as_after_weeks(store: Store) -> None:
    kept = RetentionConfig(history_days=15.0, ended_job_days=4.0)
    config = ControllerConfig(detector=DetectorConfig(warmup_steps=8), retention=kept)
    fleet, keeper = Months(config=config, store=store), Retention(store=store, config=kept)
    open_one, counts, sizes = incident(10_000, None), [], []
    for day in range(0, 90, 5):
        fleet.days(day, keeper)
        if day == 0:
            store.save_incident(open_one)
        tables = ("incidents", "decisions", "layouts", "jobs")
        rows = [len(execute(store, f"SELECT 1 FROM {table}")) for table in tables]
        counts.append((*rows, len(fleet.state.jobs)))
        sizes.append(store.database.used_bytes // 4096)
    assert counts[0][:3] < counts[4][:3], "what is young is there"
    assert counts[5:10] == counts[-5:], "as many rows, as many jobs"
    assert max(sizes[-5:]) <= max(sizes[5:10])
    assert store.incident(10_000) == open_one, "open since the first day"
