"""A controller over TLS: who is let in, who is refused and audited; certificates rotate."""

import hashlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pacekeeper.cli.admin import ca
from pacekeeper.cli.admin.ca import Kind
from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import (
    TokenRecord,
    change_tokens,
    format_token,
    secret_digest,
)
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import (
    control_pb2,
    operator_pb2,
    operator_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports
from support.authorities import Authority, as_toml
from support.commands import Started, pacekeeper
from support.controllers import ControllerProcess, ScriptedAgent, attachments, killed, until

SECRET = "s" * 43
VIEWER, EXPIRED = format_token("1" * 8, SECRET), format_token("2" * 8, SECRET)
RUN_ID = 1000


class Fleet:
    """A controller that asks for certificates of one authority, and takes two tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        self.foreign = Authority(folder / "elsewhere")
        self.server = self.authority.cert(Kind.CONTROLLER, "c", hosts=("127.0.0.1",))
        tokens = [
            TokenRecord(
                token_id=number * 8, secret_sha256=secret_digest(SECRET), role=Role.VIEWER,
                name="ann", created_unix_s=0.0, expires_unix_s=ends,
            )
            for number, ends in (("1", 4e9), ("2", 1.0))
        ]  # fmt: skip
        change_tokens(folder / "tokens", lambda _: tuple(tokens))
        config = folder / "controller.toml"
        config.write_text(
            as_toml(self.authority.tls(self.server)) + f'[access]\ntokens = "{folder / "tokens"}"\n'
        )
        self.process = ControllerProcess(folder, "--config", str(config))
        self.address, self.api = self.process.address, self.process.api

    def tls(self, kind: Kind, name: str, **how: Any) -> TlsConfig:
        return self.authority.tls(self.authority.cert(kind, name, **how))

    def ask(self, tls: TlsConfig, token: str = "") -> Any:
        """ListNodes, as a caller with these."""
        with secure.client_channel(self.api, tls) as channel:
            stub = status_pb2_grpc.StatusServiceStub(secure.with_token(channel, token))
            return stub.ListNodes(status_pb2.ListNodesRequest(), timeout=60.0)

    def refusal(self, tls: TlsConfig, token: str = "") -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            self.ask(tls, token)
        code: grpc.StatusCode = caught.value.code()
        return code

    def audited(self, **wanted: object) -> list[dict[str, Any]]:
        """The lines of the audit log that say this."""
        lines = (self.folder / "store.sqlite.audit.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [line for line in found if wanted.items() <= line.items()]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    with made.process:
        yield made


def hello(node: str) -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=reports.PROTOCOL_VERSION,
        product_version="0",
        node=node,
        agent_incarnation="first",
    )


def test_an_agent_reports_of_its_own_node(fleet: Fleet) -> None:
    agent = ScriptedAgent(fleet.address, hello("own"), tls=fleet.tls(Kind.NODE, "own"))
    agent.report_and_wait()
    names = [node.name for node in fleet.ask(fleet.tls(Kind.OPERATOR, "ann")).nodes]
    assert "own" in names
    agent.close()
    assert fleet.audited(action="attach", verdict="allowed", about="node=own")


def test_an_agent_that_names_another_node_is_refused_and_audited(fleet: Fleet) -> None:
    agent = ScriptedAgent(fleet.address, hello("victim"), tls=fleet.tls(Kind.NODE, "mallory"))
    code, why = agent.wait_for_end()
    assert code is grpc.StatusCode.PERMISSION_DENIED and "victim" in why
    assert fleet.audited(action="attach", verdict="refused", about="node=victim")
    assert "victim" not in [n.name for n in fleet.ask(fleet.tls(Kind.OPERATOR, "ann")).nodes]


def test_a_message_of_another_nodes_rank_is_refused_and_audited(fleet: Fleet) -> None:
    from dataclasses import replace

    left = ScriptedAgent(fleet.address, hello("left"), tls=fleet.tls(Kind.NODE, "left"))
    right = ScriptedAgent(fleet.address, hello("right"), tls=fleet.tls(Kind.NODE, "right"))
    ours, theirs = (
        tuple(replace(one, run_id=RUN_ID) for one in attachments("shared", ranks))
        for ranks in ((0, 1), (2, 3))
    )
    left.report_and_wait(JobReport(job="shared", run_id=RUN_ID, attached=ours))
    right.report_and_wait(JobReport(job="shared", run_id=RUN_ID, attached=theirs))
    left.report(JobReport(job="shared", run_id=RUN_ID, records=(killed(2),)))
    code, why = left.wait_for_end()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "rank 2" in why and "right" in why
    right.report_and_wait()
    assert right.deaths() == [], "nobody was declared dead"
    right.close()
    assert fleet.audited(action="report", verdict="refused", reason=why)


def test_a_foreign_or_expired_certificate_or_none_gets_no_answer(fleet: Fleet) -> None:
    foreign = fleet.foreign.cert(Kind.NODE, "own")
    mixed = TlsConfig(
        ca=str(fleet.authority.ca), cert=str(foreign), key=str(foreign.with_suffix(".key"))
    )
    over = fleet.tls(Kind.NODE, "own", made_days_ago=5, days=1)
    for tls in (mixed, over, fleet.authority.tls()):
        assert fleet.refusal(tls) is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_of_the_authority_that_tells_no_identity_is_refused(fleet: Fleet) -> None:
    tls = fleet.tls(Kind.OPERATOR, "ann", domain="another-fleet")
    assert fleet.refusal(tls) is grpc.StatusCode.UNAUTHENTICATED
    assert fleet.audited(action="read", verdict="refused", caller="anonymous")


def test_roles_hold_for_certificates_and_tokens(fleet: Fleet) -> None:
    node = fleet.tls(Kind.NODE, "own")
    assert fleet.refusal(node) is grpc.StatusCode.PERMISSION_DENIED
    fleet.ask(node, VIEWER)
    assert fleet.refusal(node, EXPIRED) is grpc.StatusCode.UNAUTHENTICATED
    assert fleet.audited(caller="viewer/ann by token, expired", verdict="refused")
    viewer = ScriptedAgent(fleet.address, hello("own"), tls=node, token=VIEWER)
    assert viewer.wait_for_end()[0] is grpc.StatusCode.PERMISSION_DENIED


def test_a_viewers_token_on_an_operators_call_is_refused_and_audited(fleet: Fleet) -> None:
    asked = operator_pb2.ApproveProposalRequest(proposal_id=7)

    def answer(tls: TlsConfig, token: str = "") -> grpc.StatusCode:
        with secure.client_channel(fleet.api, tls) as channel:
            stub: Any = operator_pb2_grpc.OperatorServiceStub(secure.with_token(channel, token))
            with pytest.raises(grpc.RpcError) as caught:
                stub.ApproveProposal(asked, timeout=60.0)
            code: grpc.StatusCode = caught.value.code()
            return code

    assert answer(fleet.tls(Kind.NODE, "own"), VIEWER) is grpc.StatusCode.PERMISSION_DENIED
    about = "ApproveProposal proposal_id: 7"
    assert fleet.audited(action="act", verdict="refused", about=about)
    assert answer(fleet.tls(Kind.OPERATOR, "ann")) is grpc.StatusCode.NOT_FOUND, "it was asked"
    assert fleet.audited(action="act", verdict="allowed", about=about)


def test_a_controllers_key_follows_and_is_told_nothing_else(fleet: Fleet) -> None:
    assert fleet.refusal(fleet.authority.tls(fleet.server)) is grpc.StatusCode.PERMISSION_DENIED


def test_a_real_agent_and_the_commands_use_the_same_settings(fleet: Fleet, tmp_path: Path) -> None:
    agent_file, own_file = tmp_path / "agent.toml", tmp_path / "own.toml"
    agent_file.write_text(as_toml(fleet.tls(Kind.NODE, "gpu-7")))
    own_file.write_text(as_toml(fleet.tls(Kind.VIEWER, "bob")))
    ask = ("status", "--controller", fleet.api, "--json", "--config")
    with Started(
        *("agent", "--config", str(agent_file), "--controller", fleet.address),
        *("--node", "gpu-7", "--ring-dir", str(tmp_path / "rings"), "--metrics-listen", ""),
    ):
        until("it is attached", lambda: "gpu-7" in pacekeeper(*ask, str(own_file)).stdout)
    clear = pacekeeper("status", "--controller", fleet.api)
    assert clear.returncode == ExitCode.UNREACHABLE
    assert "[tls] ca" in clear.stderr
    denied = pacekeeper(*ask, str(agent_file))
    assert denied.returncode == ExitCode.DENIED, denied.stderr
    assert "viewer or operator" in denied.stderr


def test_a_renewed_certificate_is_shown_to_the_next_connection_of_both_ports(fleet: Fleet) -> None:
    def shown() -> set[str]:
        found = set()
        for address in (fleet.address, fleet.api):
            host, _, port = address.rpartition(":")
            text = ssl.get_server_certificate((host, int(port)), timeout=60.0)
            found.add(hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest())
        return found

    before = shown()
    assert before == {ca.read_certificate(fleet.server).sha256}
    ca.renew_certificate(fleet.authority.directory, fleet.server, 2, fleet.authority.now)
    renewed = shown()
    assert renewed == {ca.read_certificate(fleet.server).sha256} != before
    fleet.server.write_text("nonsense")
    assert shown() == renewed, "unusable files leave the previous ones in use"
    fleet.ask(fleet.tls(Kind.VIEWER, "bob"))
