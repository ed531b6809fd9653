"""What people say over gRPC reaches the machine, and what the machine makes of it reaches them."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.api.operator_service import OperatorService
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import Event, ProposalAnswered
from pacekeeper.core.text import MAX_CHARACTERS
from pacekeeper.protos import operator_pb2
from support.proposed import STANDS_S, asking


class Refused(Exception):
    """What gRPC makes of an abort."""


class Caller:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(code, details)


class Desk:
    """The service on a machine whose decisions are made later, by nobody."""

    def __init__(self) -> None:
        self.driver = asking()
        self.driver.is_deciding = False
        self.heard: list[Event] = []

    async def put(self, event: Event) -> None:
        self.heard.append(event)
        driver = self.driver
        driver.state, driver.said = advance(
            driver.state, event, config=driver.config, now_s=driver.now_s
        )

    def call(self, name: str, request: Any, put: Callable[..., Any] | None = None) -> Any:
        service = OperatorService(state=lambda: self.driver.state, put=put or self.put)
        return asyncio.run(getattr(service, name)(request, Caller()))

    def approve(self, number: int = 1, operator: str = "ada") -> Any:
        request = operator_pb2.ApproveProposalRequest(proposal_id=number, operator=operator)
        return self.call("ApproveProposal", request).proposal

    def deny(self, number: int = 1, reason: str = "", operator: str = "ada") -> Any:
        request = operator_pb2.DenyProposalRequest(
            proposal_id=number, operator=operator, reason=reason
        )
        return self.call("DenyProposal", request).proposal

    def order(self, kind: str, subject: str, *, is_on: bool = True, reason: str = "") -> Any:
        request = operator_pb2.GiveOrderRequest(
            kind=kind, subject=subject, is_on=is_on, operator="ada", reason=reason
        )
        return self.call("GiveOrder", request).order


def test_who_approves_and_from_where_is_kept_and_the_plan_is_priced_again() -> None:
    desk = Desk()
    shown = job_view(desk.driver.state, desk.driver.job).proposal
    assert (shown.proposal_id, shown.answer, shown.base_generation) == (1, "waiting", 1)
    proposal = desk.approve()
    assert (proposal.answer, proposal.operator) == ("approved", "ada (open)")
    assert proposal.level == "batch_shares" and proposal.reason
    assert proposal.planned_step_s < proposal.current_step_s
    assert list(proposal.incident_ids) == [1]


def test_who_denies_says_why_in_one_line() -> None:
    desk = Desk()
    proposal = desk.deny(reason="not\nnow \x1b[2J" + "x" * 1000, operator="")
    assert (proposal.answer, proposal.operator) == ("denied", "unnamed (open)")
    assert proposal.note.startswith("not now  [2Jxxx")
    assert len(proposal.note) <= MAX_CHARACTERS


def test_a_number_that_nobody_knows_is_answered_with_those_that_wait() -> None:
    with pytest.raises(Refused) as caught:
        Desk().approve(9)
    code, details = caught.value.args
    assert code is grpc.StatusCode.NOT_FOUND and details.endswith("1")


@pytest.mark.parametrize("second", ["approve", "deny"])
def test_what_somebody_else_answered_first_is_said_and_stays(second: str) -> None:
    desk = Desk()
    desk.deny(reason="no")
    with pytest.raises(Refused) as caught:
        getattr(desk, second)(operator="bob")
    code, details = caught.value.args
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == "proposal 1 is denied by ada (open): no"
    assert len(desk.heard) == 1


def test_of_two_at_once_the_second_learns_who_was_first() -> None:
    desk = Desk()

    async def after_another(event: Event) -> None:
        await desk.put(ProposalAnswered(proposal_id=1, is_approved=True, operator="bob (there)"))
        await desk.put(event)

    request = operator_pb2.ApproveProposalRequest(proposal_id=1, operator="ada")
    with pytest.raises(Refused) as caught:
        desk.call("ApproveProposal", request, after_another)
    assert caught.value.args[1] == "proposal 1 is approved by bob (there)"


def test_what_is_stale_or_too_old_is_refused_with_the_reason() -> None:
    desk = Desk()
    desk.driver.now_s += STANDS_S
    with pytest.raises(Refused) as caught:
        desk.approve()
    code, details = caught.value.args
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == "proposal 1 is expired: not approved within 15 min"


def test_an_answer_that_is_lost_on_the_way_is_no_success() -> None:
    async def nowhere(event: Event) -> None:
        return None

    request = operator_pb2.ApproveProposalRequest(proposal_id=1, operator="ada")
    with pytest.raises(Refused) as caught:
        Desk().call("ApproveProposal", request, nowhere)
    assert caught.value.args[0] is grpc.StatusCode.INTERNAL


def test_an_order_stands_until_it_is_taken_back() -> None:
    desk = Desk()
    given = desk.order("ORDER_KIND_CORDON_NODE", "node-1", reason="fan\nbroken")
    assert (given.kind, given.subject, given.operator) == ("cordon_node", "node-1", "ada (open)")
    assert given.reason == "fan broken"
    again = desk.order("ORDER_KIND_CORDON_NODE", "node-1", reason="other")
    assert again == given, "the first one stands"
    back = desk.order("ORDER_KIND_CORDON_NODE", "node-1", is_on=False)
    assert back == given and not desk.driver.state.orders


@pytest.mark.parametrize(
    ("kind", "subject", "is_on", "code"),
    [
        ("ORDER_KIND_PAUSE", "nope", True, grpc.StatusCode.NOT_FOUND),
        ("ORDER_KIND_PAUSE", "moe", False, grpc.StatusCode.NOT_FOUND),
        ("ORDER_KIND_UNSPECIFIED", "", True, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_an_order_of_nothing_is_refused(
    kind: str, subject: str, is_on: bool, code: grpc.StatusCode
) -> None:
    desk = Desk()
    with pytest.raises(Refused) as caught:
        desk.order(kind, subject, is_on=is_on)
    assert caught.value.args[0] is code
    assert not desk.driver.state.orders


def test_an_order_that_is_lost_on_the_way_is_no_success() -> None:
    async def nowhere(event: Event) -> None:
        return None

    request = operator_pb2.GiveOrderRequest(kind="ORDER_KIND_PAUSE", subject="moe", is_on=True)
    with pytest.raises(Refused) as caught:
        Desk().call("GiveOrder", request, nowhere)
    assert caught.value.args[0] is grpc.StatusCode.INTERNAL
