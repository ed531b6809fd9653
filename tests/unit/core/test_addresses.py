"""HOST:PORT: one rule for all who listen or connect."""

import pytest

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.controller import ControllerConfig, LeaseConfig


@pytest.mark.parametrize(
    "address",
    ["29400", ":29400", "host:", "host:port", "host:70000", "host:0", "host:-1", "host:\u00b2", "",
     "[]:1", "host:000080"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT with a port from 1 to 65535, got"):
        split_address(address)


def test_an_address_is_host_and_port_with_brackets_or_without() -> None:
    assert split_address("node-0:29400") == ("node-0", 29400)
    assert split_address("[::1]:7443") == ("::1", 7443)
    assert split_address("127.0.0.1:0", first_port=0) == ("127.0.0.1", 0)


def test_port_0_is_for_those_who_listen() -> None:
    assert AgentConfig(metrics_listen="h:0").metrics_listen == "h:0"
    assert ControllerConfig(listen="h:0", metrics_listen="h:0").listen == "h:0"
    with pytest.raises(ValueError, match="controller"):
        AgentConfig(controller="h:0")
    with pytest.raises(ValueError, match="advertise"):
        LeaseConfig(advertise="h:0")
    with pytest.raises(ValueError, match="advertise"):
        LeaseConfig(advertise="h:1,h:2")


def test_a_file_or_directory_must_have_a_name() -> None:
    with pytest.raises(ValueError, match="ring_dir"):
        AgentConfig(ring_dir="")
    with pytest.raises(ValueError, match="store"):
        ControllerConfig(store="")
