"""What `approve` and `deny` share: who says so, and what came of it."""

import getpass
import json
import socket
import time
from typing import Any

import click

from pacekeeper.cli.common.client import OverError, ask, connected
from pacekeeper.cli.common.options import asks_controller
from pacekeeper.cli.observe.proposal_text import proposal_lines
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.protos.convert.json import message_to_dict

PRICED_WITHIN_S = 30.0  # what is approved is priced again: seconds, for the largest jobs
LOOK_PERIOD_S = 0.2


def who() -> str:
    """The person at this terminal, as the system knows them."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        name = "somebody"
    return f"{name}@{socket.gethostname()}"


def approve(client: ClientConfig, proposal_id: int, said_by: str) -> Any:
    """Approve a proposal, and wait until it is priced again; the proposal as it is then.

    Raises NotFoundError and OverError as the controller says, also where it pays no more.
    """
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc, status_pb2, status_pb2_grpc

    with connected(client) as channel:
        operator: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        status: Any = status_pb2_grpc.StatusServiceStub(channel)
        request = operator_pb2.ApproveProposalRequest(proposal_id=proposal_id, said_by=said_by)
        proposal = ask(operator.ApproveProposal, request).proposal
        listing = status_pb2.ListProposalsRequest(job=proposal.job)
        give_up_s = time.monotonic() + PRICED_WITHIN_S
        while proposal.answer == "approved" and time.monotonic() < give_up_s:
            time.sleep(LOOK_PERIOD_S)
            known = ask(status.ListProposals, listing).proposals
            proposal = next((p for p in known if p.proposal_id == proposal_id), proposal)
    if proposal.answer not in ("approved", "offered"):
        raise OverError(f"proposal {proposal_id} is {proposal.answer}: {proposal.note}")
    return proposal


def deny(client: ClientConfig, proposal_id: int, said_by: str, reason: str) -> Any:
    """Deny a proposal; the proposal as it is then. Raises as `approve` does."""
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc

    with connected(client) as channel:
        operator: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.DenyProposalRequest(
            proposal_id=proposal_id, said_by=said_by, reason=reason
        )
        return ask(operator.DenyProposal, request).proposal


def show(proposal: Any, *, as_json: bool) -> None:
    """For people or for programs."""
    text = json.dumps(message_to_dict(proposal)) if as_json else "\n".join(proposal_lines(proposal))
    click.echo(text)


@click.command()
@asks_controller
@click.argument("proposal_id", type=click.IntRange(min=1), metavar="ID")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def approve_command(client: ClientConfig, proposal_id: int, by: str, as_json: bool) -> None:
    """Approve the plan with this number (see `pacekeeper status`).

    It is priced again, and offered to the ranks if it still does what it was made for.
    """
    show(approve(client, proposal_id, by or who()), as_json=as_json)


@click.command()
@asks_controller
@click.argument("proposal_id", type=click.IntRange(min=1), metavar="ID")
@click.option("--reason", default="", help="Why; it is shown wherever the plan is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def deny_command(
    client: ClientConfig, proposal_id: int, reason: str, by: str, as_json: bool
) -> None:
    """Deny the plan with this number (see `pacekeeper status`); its kind waits."""
    show(deny(client, proposal_id, by or who(), reason), as_json=as_json)
