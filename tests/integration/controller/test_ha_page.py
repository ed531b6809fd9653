"""docs/high-availability.md, carried out by its own text: two controllers and one PostgreSQL.

The commands of the page run as they stand, with addresses and paths of this machine, and with the
options that keep an agent of a test to itself.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from support.commands import Started, pacekeeper
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    killed,
    until,
)
from support.failover import is_serving
from support.ports import free_port
from support.postgres import Cluster, cluster, server_folder
from support.tree import ROOT

pytestmark = pytest.mark.timeout(600)
PAGE = (ROOT / "docs" / "high-availability.md").read_text()
BACK = "pacekeeper store migrate postgresql"


class Reader:
    """Does what the page says."""

    def __init__(self, folder: Path, server: Cluster) -> None:
        self._folder, self._server = folder, server
        self.apis = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self._here = {
            "10.0.0.1:7443": f"127.0.0.1:{free_port()}",
            "10.0.0.2:7443": f"127.0.0.1:{free_port()}",
            "10.0.0.1:7444": self.apis[0],
            "10.0.0.2:7444": self.apis[1],
            "10.0.0.7/": f"127.0.0.1:{server.port}/",
            "/var/lib/pacekeeper/": f"{folder}/",
            "ha.toml": str(folder / "ha.toml"),
        }
        (toml,) = re.findall(r"```toml\n(# ha.toml.*?)```", PAGE, re.DOTALL)
        (folder / "ha.toml").write_text(self._localised(toml))

    def _localised(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    def commands(self, beginning: str) -> list[list[str]]:
        """The words of the commands of the page that begin so."""
        blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        found = [shlex.split(self._localised(one), comments=True) for one in lines
                 if one.startswith(beginning)]  # fmt: skip
        assert found, f"the page has no {beginning}"
        return found

    def run(self, beginning: str) -> subprocess.CompletedProcess[str]:
        """Run the one command that begins so to its end, which is a good one."""
        (words,) = self.commands(beginning)
        done = pacekeeper(*words[1:], cwd=self._folder)
        assert done.returncode == ExitCode.OK, done.stderr
        return done

    def administer(self, beginning: str) -> None:
        """As PostgreSQL's administrator."""
        (words,) = self.commands(beginning)
        programs = server_folder()
        assert programs is not None
        access = {"PGHOST": "127.0.0.1", "PGPORT": str(self._server.port), "PGUSER": "postgres"}
        command = [str(programs / words[0]), *words[1:]]
        subprocess.run(command, check=True, env={**os.environ, **access})


def test_the_page_sets_up_two_controllers_and_leads_back_to_one(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, "--store", str(tmp_path / "pacekeeper.sqlite")) as alone:
        agent = ScriptedAgent(alone.address)
        agent.report_and_wait(attached("train", first_layout()))
        agent.report_and_wait(JobReport(job="train", records=(killed(1),)))
        agent.close()
        assert alone.stop() == ExitCode.OK  # `systemctl stop`

    with cluster() as server:
        reader = Reader(tmp_path, server)
        reader.administer("createuser")
        reader.administer("createdb")
        assert "makes its tables" in flat(reader.run("pacekeeper doctor").stdout)
        reader.run("pacekeeper store migrate /var")
        reader.run("pacekeeper store check")
        assert "no leader" in flat(reader.run("pacekeeper doctor").stdout)
        own = ["--ring-dir", str(tmp_path / "rings"), "--metrics-listen", "", "--node", "n0"]
        lines = reader.commands("pacekeeper controller --listen")
        lines += [[*words, *own] for words in reader.commands("pacekeeper agent")]
        with (tmp_path / "log").open("w") as log:
            started = [Started(*words[1:], errors=log.fileno()) for words in lines]
        try:
            until("one of the two leads", lambda: sum(map(is_serving, reader.apis)) == 1)
            until("the agent is with it", lambda: "n0" in fleet(reader))
            assert "train" in reader.run("pacekeeper status").stdout
        finally:
            for one in started:
                one.terminate()
            codes = [one.wait() for one in started]
            for one in started:
                one.close()
        assert codes == [0] * len(started), "leader and standby stop in order"
        reader.run(BACK)
        (words,) = reader.commands("pacekeeper controller --store")
        with ControllerProcess(tmp_path, *words[2:]) as alone:
            shown = pacekeeper("incidents", "--controller", alone.api)
            assert "train" in shown.stdout, shown.stderr


def flat(table: str) -> str:
    """A table's text in one line."""
    return " ".join(table.split())


def fleet(reader: Reader) -> str:
    return pacekeeper("fleet", "--all", "--controller", ",".join(reader.apis)).stdout
