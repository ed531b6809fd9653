"""`pacekeeper controller`: one line when it is ready, one line and a code when it can not be."""

import re
import socket
from pathlib import Path

import grpc
import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.protos import status_pb2
from support.commands import pacekeeper
from support.controllers import ControllerProcess
from support.ports import free_port

ANY_PORTS = ("--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0")


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and the one line that is said."""
    done = pacekeeper("controller", *arguments)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return done.returncode, line


def test_it_says_where_it_listens_and_answers_there(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", controller.address)
        controller.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0)
        assert controller.stop() == ExitCode.OK


def test_port_and_store_are_free_again_after_a_stop_and_after_a_kill(tmp_path: Path) -> None:
    # Ports that no client gets meanwhile.
    listen, api = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with ControllerProcess(tmp_path, listen=listen, api_listen=api, is_fresh=True) as first:
        first.stop()
    with ControllerProcess(tmp_path, listen=listen, api_listen=api) as second:
        assert (second.address, second.api) == (listen, api)
        second.kill()
    with ControllerProcess(tmp_path, listen=listen, api_listen=api) as third:
        third.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0)


@pytest.mark.parametrize("option", ["--listen", "--api-listen"])
def test_a_port_in_use_is_refused_also_by_another_controller(tmp_path: Path, option: str) -> None:
    with ControllerProcess(tmp_path) as first:
        used = first.address if option == "--listen" else first.api
        free = {"--listen": "127.0.0.1:0", "--api-listen": "127.0.0.1:0"} | {option: used}
        words = [word for pair in free.items() for word in pair]
        code, line = refused(*words, "--store", str(tmp_path / "other.sqlite"))
        assert code == ExitCode.HOST
        assert used in line and f" {option}" in line


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path):
        store = str(tmp_path / "store.sqlite")
        code, line = refused(*ANY_PORTS, "--store", store)
        assert (code, store in line) == (ExitCode.HOST, True)


def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    done = pacekeeper("controller", "--insecure", "--listen", "192.0.2.1:0", "--store", store)
    assert done.returncode == ExitCode.HOST
    assert "192.0.2.1:0" in done.stderr.splitlines()[-1]


def test_beyond_loopback_nothing_is_listened_to_unprotected(tmp_path: Path) -> None:
    code, line = refused("--listen", "0.0.0.0:0", "--store", str(tmp_path / "store"))
    assert code == ExitCode.CONFIG
    assert "0.0.0.0:0" in line and "--insecure" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["listen", "metrics-listen"])
@pytest.mark.parametrize("address", ["7443", "127.0.0.1", "127.0.0.1:", ":80", "h:-1", "h:99999"])
def test_what_is_no_address_is_said_before_anything_is_touched(
    tmp_path: Path, key: str, address: str
) -> None:
    code, line = refused(f"--{key}", address, "--store", str(tmp_path / "store"))
    assert code == ExitCode.CONFIG
    assert "HOST:PORT" in line and repr(address) in line
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_a_newer_schema_has_a_code_of_its_own(tmp_path: Path) -> None:
    import sqlite3

    with ControllerProcess(tmp_path) as controller:
        controller.stop()
    connection = sqlite3.connect(tmp_path / "store.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    code, line = refused(*ANY_PORTS, "--store", str(tmp_path / "store.sqlite"))
    assert (code, "99" in line) == (ExitCode.VERSION, True)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    store = tmp_path / "named-in-the-file"
    config.write_text(f'[controller]\nlisten = "192.0.2.1:1"\nstore = "{store}"\n')
    with ControllerProcess(tmp_path, "--config", str(config)) as controller:
        assert controller.address.startswith("127.0.0.1:")
    assert not store.exists()


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_bytes(b"\xff\xfe\x00")
    code, line = refused("--config", str(config))
    assert (code, "my.toml" in line) == (ExitCode.CONFIG, True)


def test_both_address_families_can_be_served(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with ControllerProcess(tmp_path, listen="[::1]:0") as controller:
        assert controller.address.startswith("[::1]:")
        with grpc.insecure_channel(controller.api) as channel:
            grpc.channel_ready_future(channel).result(60.0)
