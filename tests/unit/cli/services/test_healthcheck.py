"""`pacekeeper healthcheck` and those who call it: an exit code and one line, believed with care."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pacekeeper.cli.services.healthcheck import command
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.node_health import CONDITION, FILE_NAME, NodeHealth
from support.agents import agent_of
from support.symptoms import DEVICE


def told(
    folder: Path, *, nvml: str = "ok", is_lost: bool = False, age_s: float = 0.0
) -> NodeHealth:
    """The verdict that an agent wrote of one device."""
    devices = (replace(DEVICE, is_lost=is_lost),) if nvml == "ok" else ()
    written_s = time.time() - age_s
    verdict = node_health.assess_node(None, devices, nvml=nvml, node="n0", now_unix_s=written_s)
    (folder / FILE_NAME).write_bytes(node_health.encode_node_health(verdict))
    return verdict


def asked(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["--ring-dir", str(folder), *options])


def verdict_of(folder: Path) -> tuple[int, str, str]:
    """Exit code, the word that the line begins with, and the reason for programs."""
    document = json.loads(asked(folder, "--json").output)
    line = asked(folder)
    assert line.output.partition(":")[0] == document["fitness"]
    return line.exit_code, document["fitness"], document["reason"]


def test_the_exit_code_is_the_verdict_and_the_line_says_why(tmp_path: Path) -> None:
    told(tmp_path)
    assert verdict_of(tmp_path) == (0, "fit", "DevicesFit")
    told(tmp_path, is_lost=True)
    assert verdict_of(tmp_path) == (12, "unfit", "DeviceLost")
    told(tmp_path, nvml="no NVML: Driver Not Loaded")
    assert verdict_of(tmp_path) == (2, "unknown", "NoDeviceAnswers")


def test_without_the_word_of_an_agent_nobody_knows(tmp_path: Path) -> None:
    assert asked(tmp_path).exit_code == 2
    assert asked(tmp_path / "missing").exit_code == 2
    told(tmp_path, age_s=600.0)
    assert asked(tmp_path).exit_code == 2 and "10 min" in asked(tmp_path).output
    (tmp_path / FILE_NAME).write_bytes(b"{}")
    assert asked(tmp_path).exit_code == 2


def test_a_file_of_somebody_else_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write beside the rings."""
    told(tmp_path)
    (tmp_path / FILE_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    assert asked(tmp_path).exit_code == 2, "a link"
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    assert asked(tmp_path).exit_code == 2, "a pipe, which would be waited for"
    (tmp_path / FILE_NAME).unlink()
    told(tmp_path)
    if os.getuid() == 0:
        os.chown(tmp_path / FILE_NAME, 12345, 12345)
        assert asked(tmp_path).exit_code == 2, "of another user"


def test_programs_get_it_as_json_and_kubernetes_as_a_condition(tmp_path: Path) -> None:
    verdict = told(tmp_path, is_lost=True, age_s=5.0)
    document = json.loads(asked(tmp_path, "--json").output)
    assert (document["fitness"], document["node"]) == ("unfit", "n0")
    patch = json.loads(asked(tmp_path, "--node-condition").output)
    (condition,) = patch["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        CONDITION,
        "True",
        "DeviceLost",
    )
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(verdict.since_unix_s))
    assert condition["lastTransitionTime"] == moment
    assert condition["lastHeartbeatTime"] >= moment


def test_an_agent_writes_what_the_command_reads(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    agent.sampler._latest = ((DEVICE,), "ok")
    agent._poll()
    assert verdict_of(node.rings) == (0, "fit", "DevicesFit")
    assert agent.collector.unreadable == {}, "the file is no job's"


def test_a_directory_that_takes_no_file_stops_no_agent(tmp_path: Path) -> None:
    agent, node = agent_of(tmp_path)
    (node.rings / FILE_NAME).mkdir()
    agent._poll()
    assert asked(node.rings).exit_code == 2
