"""The right to command in one term, and when it is given up."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from pacekeeper.controller.ha.leader_election import LeaseLeadership, open_store
from pacekeeper.controller.ha.lease import ElectionMember, Timing
from pacekeeper.controller.ha.standby_reads import StandbyReads
from pacekeeper.core.errors import HostError
from support.database_faults import DatabaseProxy

PATIENCE_S = 60.0

TIMING = Timing(duration_s=4.0, renew_s=1.0, margin_s=1.0)
MEMBER = ElectionMember(name="a", run_id="a1", address="a:1", timing=TIMING)


class Renewer:
    """Leads in term 7, and counts resignations."""

    resignations = 0

    def term(self) -> int | None:
        return None if self.resignations else 7

    def resign(self, term: int, why: str) -> None:
        assert term == 7 and "write" in why
        self.resignations += 1

    def has_resigned(self, term: int) -> bool:
        return term == 7 and bool(self.resignations)


@pytest.mark.parametrize(("waits_s", "resigns"), [(0.0, False), (2.9, False), (3.0, True)])
def test_a_leader_resigns_once_a_write_has_waited_as_long_as_a_renewal_may(
    waits_s: float, resigns: bool
) -> None:
    renewer: Any = Renewer()
    leadership = LeaseLeadership(renewer, 7, MEMBER)
    leadership.check_write(waits_s)
    assert (leadership.has_resigned, renewer.resignations) == (resigns, int(resigns))
    assert leadership.term() == (None if resigns else 7)


class Ending(Renewer):
    """Its term ends once `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def term(self) -> int | None:
        return None if self.is_over.is_set() else 7

    def show_alive(self) -> None:
        """The loop runs."""


@pytest.mark.parametrize("what", ["no answer", "the term ends", "it is stopped"])
def test_a_takeover_ends_although_no_answer_comes_after_the_handshake(
    postgres_url: str, what: str
) -> None:
    """SQLAlchemy asks a new connection before it hands it out: that one, too, has to be cut."""
    asyncio.run(open_without_answers(postgres_url, what))


async def open_without_answers(url: str, what: str) -> None:
    parsed = sa.make_url(url)
    assert parsed.port is not None
    proxy = DatabaseProxy(parsed.port)
    proxy.loses_next = True
    through = parsed.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    duration_s = 3.0 if what == "no answer" else 1000.0
    timing = Timing(duration_s=duration_s, renew_s=1.0, margin_s=1.0)
    renewer: Any = Ending()
    stop = asyncio.Event()
    leadership = LeaseLeadership(renewer, 7, replace(MEMBER, timing=timing))
    opening = asyncio.create_task(open_store(through, leadership, stop))
    while not proxy.num_effects:
        await asyncio.sleep(0.01)
    if what == "the term ends":
        renewer.is_over.set()
    elif what == "it is stopped":
        stop.set()
    done, _ = await asyncio.wait([opening], timeout=PATIENCE_S)
    proxy.close()
    assert done, "it waits for ever"
    assert isinstance(opening.exception(), HostError)


def test_a_standby_that_closes_ends_a_first_read_without_answers(postgres_url: str) -> None:
    asyncio.run(close_without_answers(postgres_url))


async def close_without_answers(url: str) -> None:
    parsed = sa.make_url(url)
    assert parsed.port is not None
    proxy = DatabaseProxy(parsed.port)
    proxy.loses_next = True
    through = parsed.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    reads = StandbyReads(through)
    reading = asyncio.create_task(reads.run())
    while not proxy.num_effects:
        await asyncio.sleep(0.01)
    reading.cancel()
    closing = asyncio.create_task(reads.close())
    done, _ = await asyncio.wait([closing], timeout=PATIENCE_S)
    proxy.close()
    assert done, "it waits for ever"
