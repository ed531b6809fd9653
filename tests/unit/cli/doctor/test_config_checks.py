"""`doctor --config` says all that would keep who reads it from working, and starts nothing."""

import json
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pacekeeper.cli.admin import ca
from pacekeeper.cli.admin.ca import Kind
from pacekeeper.cli.doctor.command import command
from pacekeeper.controller.api.staleness import STANDS_BY
from pacekeeper.controller.ha.lease import Record
from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.storage.schema import APPLICATION_ID
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import SCHEMA_VERSION
from support.authorities import Authority, as_toml
from support.ports import free_port


@dataclass(frozen=True)
class Told:
    """What it said: by name of the check, and how it ended."""

    code: int
    checks: dict[str, Any]
    wrong: list[str]

    def found(self, name: str) -> tuple[str, str]:
        return self.checks[name]["health"], self.checks[name]["found"]


def doctor(folder: Path, text: str, *more: str) -> Told:
    """In a folder that is all a controller has."""
    file = folder / "pacekeeper.toml"
    file.write_text(text.replace("FOLDER", str(folder)))
    done = CliRunner().invoke(command, ["--config", str(file), "--json", *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    checks = json.loads(done.stdout)
    return Told(
        code=done.exit_code,
        checks={check["name"]: check for check in checks},
        wrong=[check["found"] for check in checks if check["health"] == "broken"],
    )


CONTROLLER = """
[controller]
listen = "127.0.0.1:0"
api_listen = "127.0.0.1:0"
store = "FOLDER/store"
"""


@pytest.fixture
def certs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def controller_tls(certs: Authority) -> str:
    made = certs.cert(Kind.CONTROLLER, "c", hosts=("localhost",), days=7)
    return as_toml(certs.tls(made))


def test_what_would_work_is_well_and_nothing_is_made(tmp_path: Path, certs: Authority) -> None:
    text = CONTROLLER + controller_tls(certs)
    before = set(tmp_path.rglob("*")) | {tmp_path / "pacekeeper.toml"}
    told = doctor(tmp_path, text)
    assert (told.code, told.wrong) == (0, [])
    assert {check["health"] for check in told.checks.values()} == {"ok"}
    assert set(tmp_path.rglob("*")) == before
    assert told.found("file")[0] == told.found("controller: [tls] cert")[0] == "ok"


def test_everything_wrong_in_the_file_is_said_at_once(tmp_path: Path) -> None:
    text = """
    [controller]
    listn = "127.0.0.1:0"
    tick_interval_s = 0
    [webhook]
    format = "telegram"
    [spare]
    """
    told = doctor(tmp_path, text)
    assert told.code == 3
    listn, tick, telegram, spare = (one.split("pacekeeper.toml: ")[1] for one in told.wrong)
    assert listn.startswith("[controller] listn")
    assert tick.startswith("[controller] tick_interval_s")
    assert telegram.startswith("[webhook] format")
    assert "[spare]" in spare


@pytest.mark.parametrize("text", ["[controller", "controller = 5", '[tls]\ncert = "only.crt"\n'])
def test_what_no_single_key_is_to_blame_for_is_said_too(text: str, tmp_path: Path) -> None:
    told = doctor(tmp_path, text)
    assert (told.code, len(told.wrong)) == (3, 1)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--config", str(tmp_path / "none"), "--json"])
    (check,) = json.loads(done.stdout)
    assert (done.exit_code, check["health"]) == (3, "broken")
    assert str(tmp_path / "none") in check["found"]


def test_who_reads_it_is_known_by_its_tables_or_said(tmp_path: Path) -> None:
    def readers(text: str, *more: str) -> list[str]:
        checks = doctor(tmp_path, text, *more).checks
        return sorted({name.partition(":")[0] for name in checks} - {"file"})

    near = f'controller = "127.0.0.1:{free_port()}"\n'
    assert readers("") == readers("[tls]") == readers("[webhook]\nattempts = 2\n") == ["controller"]
    assert readers("[agent]\nmetrics_listen = ''\n" + near) == ["agent"]
    assert readers("[client]\n" + near) == ["client"]
    assert readers("[agent]\n" + near, "--as", "client") == ["client"]
    both = "[agent]\n" + near + "[limits]\n"
    assert readers(both) == ["agent", "controller"]


def test_who_reads_no_file_is_not_asked_for(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--as", "agent"])
    assert done.exit_code == 2 and "--config" in done.stderr


def test_a_certificate_of_another_key_is_the_files_fault(tmp_path: Path, certs: Authority) -> None:
    one = certs.cert(Kind.CONTROLLER, "c", hosts=("localhost",))
    other = certs.cert(Kind.CONTROLLER, "d", hosts=("localhost",))
    tls = f'[tls]\ncert = "{one}"\nkey = "{other.with_suffix(".key")}"\n'
    told = doctor(tmp_path, CONTROLLER + tls)
    assert (told.code, told.found("controller: [tls]")[0]) == (3, "broken")


@pytest.mark.parametrize(
    ("days_ago", "health", "words", "code"),
    [(0, "ok", "7 days", 0), (6, "limited", "24 h", 0), (9, "broken", "2 days", 3)],
)
def test_a_certificate_that_ends_soon_is_said_and_one_that_is_over_is_wrong(
    days_ago: int, health: str, words: str, code: int, tmp_path: Path
) -> None:
    now = ca.utc_now() - timedelta(days=days_ago) + timedelta(minutes=1)
    told = doctor(tmp_path, CONTROLLER + controller_tls(Authority(tmp_path / "pki", now)))
    assert told.code == code
    found = told.found("controller: [tls] cert")
    assert found[0] == health and words in found[1]


def test_a_file_that_is_not_there_yet_is_this_machines(tmp_path: Path) -> None:
    tls = '[tls]\ncert = "FOLDER/no.crt"\nkey = "FOLDER/no.key"\n'
    told = doctor(tmp_path, CONTROLLER + tls)
    assert told.code == 4 and len(told.wrong) == 2
    told = doctor(tmp_path, CONTROLLER + tls + '[access]\ntokens = "FOLDER/none"\n')
    assert told.code == 4 and len(told.wrong) == 3, "the highest code of 3 and 4"


def test_what_is_open_to_all_is_wrong_unless_it_was_told_to(tmp_path: Path) -> None:
    text = CONTROLLER.replace("127.0.0.1:0", "0.0.0.0:0")
    name = "controller: access control"
    told = doctor(tmp_path, text)
    assert (told.code, told.found(name)[0]) == (3, "broken")
    told = doctor(tmp_path, text + "insecure = true\n")
    assert told.code == 0 and told.found(name)[0] == "limited"


def test_a_taken_port_may_be_itself_and_a_foreign_address_can_not_be(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        told = doctor(tmp_path, CONTROLLER.replace("127.0.0.1:0", address, 1))
    assert told.code == 0 and told.found("controller: listen")[0] == "limited"
    metrics = 'metrics_listen = "192.0.2.1:9"\ninsecure = true\n'
    told = doctor(tmp_path, CONTROLLER + metrics)
    assert told.code == 4
    assert "192.0.2.1:9" in told.found("controller: metrics_listen")[1]


def test_one_port_for_two_is_the_files_fault(tmp_path: Path) -> None:
    text = CONTROLLER.replace("127.0.0.1:0", f"127.0.0.1:{(port := free_port())}")
    free = 'metrics_listen = "127.0.0.1:0"\n'
    assert doctor(tmp_path, CONTROLLER + free).code == 0, "each any free one"
    told = doctor(tmp_path, text + f'web = "127.0.0.1:{port}"\n')
    assert (told.code, told.found("controller: addresses")[0]) == (3, "broken")


def test_a_store_is_looked_at_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def stamped(statement: str) -> Told:
        connection = sqlite3.connect(path)
        connection.executescript(statement)
        connection.close()
        return doctor(tmp_path, CONTROLLER)

    Store.open(path).close()
    assert "MB" in doctor(tmp_path, CONTROLLER).found("controller: store")[1]
    told = stamped(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    assert told.code == 0 and str(SCHEMA_VERSION - 1) in told.found("controller: store")[1]
    assert not list(tmp_path.glob("store.schema-*")), "at the start, and not by us"
    assert stamped(f"PRAGMA user_version = {SCHEMA_VERSION + 1}").code == 5
    assert stamped(f"PRAGMA application_id = {APPLICATION_ID + 1}").code == 4
    path.unlink()
    assert stamped(f"PRAGMA application_id = {APPLICATION_ID + 1}").code == 4, "of no version"
    path.write_text("no database at all")
    assert doctor(tmp_path, CONTROLLER).code == 4


def test_a_folder_that_this_user_may_not_write_is_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **more: not mode & os.W_OK)
    told = doctor(tmp_path, CONTROLLER)
    assert told.code == 4 and len(told.wrong) == 2, "store and audit log"


def test_tokens_and_secrets_are_looked_at(tmp_path: Path) -> None:
    tokens = '[access]\ntokens = "FOLDER/tokens"\n'
    assert doctor(tmp_path, CONTROLLER + tokens).code == 3
    (tmp_path / "secret").write_text("s")
    (tmp_path / "secret").chmod(0o644)
    hook = '[webhook]\nurl = "http://127.0.0.1:1/x"\nsecret_file = "FOLDER/secret"\n'
    told = doctor(tmp_path, CONTROLLER + hook)
    assert (told.code, told.found("controller: [webhook]")[0]) == (3, "broken")
    assert "chmod" in told.checks["controller: [webhook]"]["remedy"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://hooks.example/x", 0),
        ("hooks.example/x", 3),
        ("http://hooks.example/x", 3),
        ("https://hooks.example:port/", 3),
    ],
)
def test_a_webhook_is_well_formed_or_wrong_and_is_told_nothing(
    url: str, code: int, tmp_path: Path
) -> None:
    assert doctor(tmp_path, CONTROLLER + f'[webhook]\nurl = "{url}"\n').code == code


def test_a_database_that_is_away_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"postgresql://u:secret@127.0.0.1:{free_port()}/pk"
    shared = re.sub(r'store = ".*"', f'store = "{url}"', CONTROLLER)
    told = doctor(tmp_path, shared)
    assert (told.code, told.found("controller: store")[0]) == (6, "broken")
    assert told.found("controller: [access] audit")[0] == "broken", "no default place"
    told = doctor(tmp_path, shared + '[access]\naudit = "FOLDER/audit.jsonl"\n')
    assert told.found("controller: [access] audit")[0] == "ok"
    assert "secret" not in str(told.checks)
    led = Record(term=4, holder="a", run_id="l", address="a:7443", duration_s=4.0)
    monkeypatch.setattr(LeaseRow, "read", lambda self: led)
    health, found = doctor(tmp_path, shared).found("controller: store")
    assert health == "ok" and "a:7443" in found and "4" in found


def test_a_page_that_nobody_could_enter_is_wrong(tmp_path: Path, certs: Authority) -> None:
    text = CONTROLLER + 'web = "127.0.0.1:0"\n' + controller_tls(certs)
    told = doctor(tmp_path, text)
    assert (told.code, told.found("controller: web page")[0]) == (3, "broken")


@pytest.fixture
def answering() -> Iterator[str]:
    """Who answers for a controller's health."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


class FailingCalls(grpc.GenericRpcHandler):
    """Ends each call with `code` and `details`."""

    code, details = grpc.StatusCode.NOT_FOUND, "no layout on offer has this digest"

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(self.code, self.details)
        )


@pytest.fixture
def front() -> Iterator[tuple[str, FailingCalls]]:
    """A port for agents, and how it answers."""
    handler = FailingCalls()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", handler
    server.stop(None)


def agent(controller: str) -> str:
    return f'[agent]\ncontroller = "{controller}"\nring_dir = "FOLDER/rings"\nmetrics_listen = ""\n'


def test_a_command_reaches_its_controller(tmp_path: Path, answering: str) -> None:
    told = doctor(tmp_path, f'[client]\ncontroller = "{answering}"\n')
    assert (told.code, told.found("client: controller")) == (0, ("ok", f"{answering} leads"))


def test_an_agent_that_names_the_port_of_commands_is_told(
    tmp_path: Path, front: tuple[str, FailingCalls]
) -> None:
    address, handler = front
    handler.code, handler.details = grpc.StatusCode.INVALID_ARGUMENT, "agents attach to h:1"
    told = doctor(tmp_path, agent(address))
    assert told.code == 3 and "agents attach to h:1" in told.found("agent: controller")[1]


def test_an_agent_reaches_its_controller_or_is_told(
    tmp_path: Path, front: tuple[str, FailingCalls]
) -> None:
    address, handler = front
    told = doctor(tmp_path, agent(address))
    assert (told.code, told.found("agent: controller")) == (0, ("ok", f"{address} takes agents in"))
    handler.code, handler.details = grpc.StatusCode.UNAVAILABLE, f"{STANDS_BY}; none leads"
    told = doctor(tmp_path, agent(address))
    assert told.found("agent: controller") == ("ok", f"{address} answers as standby")
    away = f"127.0.0.1:{free_port()}"
    told = doctor(tmp_path, agent(f"{address},{away}"))
    assert (told.code, told.found("agent: controller")[0]) == (0, "limited")
    told = doctor(tmp_path, agent(away))
    assert told.code == 6 and away in told.found("agent: controller")[1]
    assert doctor(tmp_path, agent(f"{away},{away}")).code == 6


def test_a_controller_of_the_same_file_may_not_be_started_yet(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    text = CONTROLLER.replace("127.0.0.1:0", address, 1) + agent(address)
    told = doctor(tmp_path, text)
    assert (told.code, told.found("agent: controller")[0]) == (0, "limited")


def test_an_agent_is_told_of_sockets_folders_and_what_everybody_could_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    more = 'sentinel_socket = "FOLDER/none"\ninsecure = true\nrecord_dir = "FOLDER/traces"\n'
    told = doctor(tmp_path, agent("192.0.2.1:7443") + more, "--as", "agent")
    assert told.found("agent: sentinel_socket")[0] == "limited"
    assert told.found("agent: record_dir")[0] == "ok"
    assert told.found("agent: encryption")[0] == "limited"
    assert told.code == 6
