"""The systemd units restart what heals by itself, and only that."""

from configparser import ConfigParser

import pytest

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ExitCode
from support.tree import ROOT


def service(name: str) -> dict[str, str]:
    """The [Service] section of a unit, keys as they stand."""
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((ROOT / "deploy" / f"pacekeeper-{name}.service").read_text())
    return dict(parser["Service"])


def final_codes(name: str) -> set[ExitCode]:
    return {ExitCode(int(code)) for code in service(name)["RestartPreventExitStatus"].split()}


def test_an_agent_outlives_a_rolling_upgrade() -> None:
    """Agent and controller are of two versions for a while: that heals, a wrong file does not."""
    assert final_codes("agent") == {ExitCode.USAGE, ExitCode.CONFIG}
    assert service("agent")["Restart"] == "always"


def test_a_controller_does_not_come_back_to_a_store_of_another_version() -> None:
    assert final_codes("controller") == {ExitCode.USAGE, ExitCode.CONFIG, ExitCode.VERSION}


def test_an_agent_comes_back_before_its_jobs_count_as_blind_but_not_at_once() -> None:
    pause_s = float(service("agent")["RestartSec"])
    assert 10.0 <= pause_s <= ControllerConfig().blind_after_s / 2


@pytest.mark.parametrize("name", ["agent", "controller"])
def test_no_number_of_restarts_is_too_many(name: str) -> None:
    text = (ROOT / "deploy" / f"pacekeeper-{name}.service").read_text()
    assert "\nStartLimitIntervalSec=0\n" in text
