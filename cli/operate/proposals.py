"""`pacekeeper approve` and `pacekeeper deny`: answer a proposal, a plan that awaits approval."""

import getpass
import json
import os
import socket
import time
from typing import Any

import click

from pacekeeper.cli.common.client import AlreadyAnsweredError, call, open_channel
from pacekeeper.cli.common.options import (
    RECORD_ID,
    by_option,
    json_option,
    reason_option,
    with_controller_options,
)
from pacekeeper.cli.observe.operator_text import proposal_lines
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.protos.convert.plain import message_to_dict

PRICING_TIMEOUT_S = 30.0  # the largest jobs take seconds
POLL_PERIOD_S = 0.2


def current_user() -> str:
    """Return USER@HOST of this process."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the user ID has no name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def approve_proposal(client: ClientConfig, proposal_id: int, operator: str) -> Any:
    """Approve a proposal and wait until the controller has updated its forecast.

    Returns:
        The proposal with its new answer.

    Raises:
        NotFoundError: no such proposal.
        AlreadyAnsweredError: it was answered, expired, or no longer pays.
        PacekeeperError: as `open_channel`.
    """
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc, status_pb2, status_pb2_grpc

    with open_channel(client) as channel:
        stub: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        status: Any = status_pb2_grpc.StatusServiceStub(channel)
        request = operator_pb2.ApproveProposalRequest(proposal_id=proposal_id, operator=operator)
        proposal = call(stub.ApproveProposal, request).proposal
        listing = status_pb2.ListProposalsRequest(job=proposal.job)
        give_up_s = time.monotonic() + PRICING_TIMEOUT_S
        while proposal.answer == "approved" and time.monotonic() < give_up_s:
            time.sleep(POLL_PERIOD_S)
            known = call(status.ListProposals, listing).proposals
            proposal = next((p for p in known if p.proposal_id == proposal_id), proposal)
    if proposal.answer not in ("approved", "offered"):
        raise AlreadyAnsweredError(f"proposal {proposal_id} is {proposal.answer}: {proposal.note}")
    return proposal


def deny_proposal(client: ClientConfig, proposal_id: int, operator: str, reason: str) -> Any:
    """Deny a proposal and return it with its new answer. Raises as `approve_proposal`."""
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc

    with open_channel(client) as channel:
        stub: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.DenyProposalRequest(
            proposal_id=proposal_id, operator=operator, reason=reason
        )
        return call(stub.DenyProposal, request).proposal


def print_proposal(proposal: Any, *, as_json: bool) -> None:
    """Print the proposal as lines or as JSON."""
    text = json.dumps(message_to_dict(proposal)) if as_json else "\n".join(proposal_lines(proposal))
    click.echo(text)


@click.command()
@with_controller_options
@click.argument("proposal_id", type=RECORD_ID, metavar="ID")
@by_option
@json_option()
def approve_command(client: ClientConfig, proposal_id: int, by: str, as_json: bool) -> None:
    """Approve proposal ID (see `pacekeeper status`).

    The controller updates the forecast and offers the plan to the ranks if it still pays.
    """
    print_proposal(approve_proposal(client, proposal_id, by or current_user()), as_json=as_json)


@click.command()
@with_controller_options
@click.argument("proposal_id", type=RECORD_ID, metavar="ID")
@reason_option
@by_option
@json_option()
def deny_command(
    client: ClientConfig, proposal_id: int, reason: str, by: str, as_json: bool
) -> None:
    """Deny proposal ID (see `pacekeeper status`); similar plans are then held back for a while."""
    print_proposal(
        deny_proposal(client, proposal_id, by or current_user(), reason), as_json=as_json
    )
