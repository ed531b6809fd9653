"""The scripts that drain nodes: only an answer of `pacekeeper healthcheck` does, never a failure.

Each script runs in real shells, with a `pacekeeper` in its PATH that answers, crashes or hangs.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.cli.services.healthcheck import EXIT_CODES
from pacekeeper.core.errors import ExitCode, PacekeeperError
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.node_health import CONDITION, FILE_NAME, MAX_LINE, Fitness
from support.symptoms import DEVICE
from support.tree import ROOT

DEPLOY = ROOT / "deploy"
OK, NON_OK, UNKNOWN = 0, 1, 2  # of node-problem-detector
REASON = "device 3 is lost"
DRAIN = f"update NodeName=n7 State=DRAIN Reason=pacekeeper: unfit: {REASON}\n"
SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
FOUND = [name for name in SHELLS if shutil.which(name)]
Install = Callable[[Path], object]  # puts a `pacekeeper` into the folder


def in_shells(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each case in each shell that is here; the slow ones, of the real command, in one."""
    pairs = [(shell, name) for shell in FOUND for name in names]
    chosen = [(shell, name) for shell, name in pairs if shell == FOUND[0] or name not in REAL]
    return pytest.mark.parametrize(("shell", "name"), chosen)


def program(folder: Path, name: str, text: str, mode: int = 0o755) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(mode)


def answers(code: int, text: str) -> Install:
    """A command that prints `text` and ends with `code`."""
    body = f"#!/bin/sh\n[ \"$1\" = healthcheck ] && printf '%s' '{text}'\nexit {code}\n"
    return lambda folder: program(folder, "pacekeeper", body)


def does(body: str, interpreter: str = "/bin/sh", mode: int = 0o755) -> Install:
    return lambda folder: program(folder, "pacekeeper", f"#!{interpreter}\n{body}\n", mode)


def real(*options: str, is_lost: bool = False, broken_module: str = "") -> Install:
    """The real command with a verdict of now; `broken_module` raises ImportError in it."""

    def install(folder: Path) -> None:
        devices = (replace(DEVICE, is_lost=is_lost),)
        verdict = node_health.assess_node(
            None, devices, nvml="ok", node="n7", now_unix_s=time.time()
        )
        (folder / FILE_NAME).write_bytes(node_health.encode_node_health(verdict))
        lines = [
            "import sys, types",
            f"broken = {broken_module!r}",
            "sys.modules.update({broken: None} if broken else {})",
            "from pacekeeper.cli.main import main",
            f"main([*sys.argv[1:], '--ring-dir', {str(folder)!r}, *{options!r}])",
        ]
        program(folder, "pacekeeper", "\n".join([f"#!{sys.executable}", *lines, ""]))

    return install


UNFIT: dict[str, Install] = {
    "answer": answers(12, f"unfit: {REASON}\n"),
    "real command": real(is_lost=True),
}
NOT_UNFIT: dict[str, tuple[Install, int]] = {
    # name: (what is installed, status of the plug-in of node-problem-detector)
    "fit": (answers(0, "fit: 1 devices answer\n"), OK),
    "fit by the real command": (real(), OK),
    "unknown": (answers(2, "unknown: no verdict of an agent\n"), UNKNOWN),
}
FAILURES: dict[str, Install] = {
    "unfit with the code of a crash": answers(1, f"unfit: {REASON}\n"),
    "unfit with the code of a signal": answers(137, f"unfit: {REASON}\n"),
    "unfit with the code of fit": answers(0, f"unfit: {REASON}\n"),
    "unfit with the code of unknown": answers(2, f"unfit: {REASON}\n"),
    "the code without the word": answers(12, f"{REASON}\n"),
    "the code with another word": answers(12, "fit: 1 devices answer\n"),
    "the code and nothing else": answers(12, ""),
    "no reason": answers(12, "unfit:\n"),
    "an empty reason": answers(12, "unfit: \n"),
    "JSON": real("--json", is_lost=True),
    "fit without the word": answers(0, ""),
    "an error of another program": answers(1, ""),
    "ImportError of a dependency": real(is_lost=True, broken_module="click"),
    "ImportError of the command": real(
        is_lost=True, broken_module="pacekeeper.core.incidents.node_health"
    ),
    "package not installed": does("import no_such_package_of_ours", sys.executable),
    "wrong option": real("--no-such-option", is_lost=True),
    "wrong configuration": real("--config", "/no/such/file.toml", is_lost=True),
    "killed": does(f"echo 'unfit: {REASON}'; kill -9 $$"),
    "hangs": does(f"echo 'unfit: {REASON}'; exec sleep 60"),
    "does not hear SIGTERM": does(f"trap '' TERM; echo 'unfit: {REASON}'; sleep 60"),
    "no interpreter": does("", "/no/such/python"),
    "not executable": does("exit 12", mode=0o644),
    "not there": lambda folder: None,
}
REAL = frozenset(
    {"real command", "fit by the real command", "JSON", "wrong option", "wrong configuration"}
    | {"ImportError of a dependency", "ImportError of the command"}
)


def run(
    script: str,
    shell: str,
    folder: Path,
    install: Install,
    *,
    shown: str = "State=IDLE",
    has_path: bool = True,
) -> tuple[subprocess.CompletedProcess[str], str]:
    """The script's end, and what Slurm was asked to change."""
    install(folder)
    said = folder / "said"
    body = f'[ "$1" = show ] && echo "{shown}" || echo "$@" >> {said}'
    program(folder, "scontrol", f"#!/bin/sh\n{body}\n")
    env = {
        "SLURMD_NODENAME": "n7",
        "PACEKEEPER_DEFAULTS": str(folder / "defaults"),
        "PACEKEEPER_HEALTHCHECK_S": "30",
    }
    if install in (FAILURES["hangs"], FAILURES["does not hear SIGTERM"]):
        env["PACEKEEPER_HEALTHCHECK_S"] = "0.3"
    if has_path:
        env["PATH"] = f"{folder}:/usr/bin:/bin"
    done = subprocess.run(
        [*SHELLS[shell], str(DEPLOY / script)], env=env, capture_output=True, text=True, timeout=50
    )
    return done, said.read_text() if said.exists() else ""


class TestSlurm:
    SCRIPT = "slurm-healthcheck.sh"

    @pytest.mark.parametrize("shell", FOUND)
    @pytest.mark.parametrize("shown", ["State=IDLE", "State=DOWN Reason=Not responding"])
    def test_an_unfit_node_is_drained(self, tmp_path: Path, shell: str, shown: str) -> None:
        done, said = run(self.SCRIPT, shell, tmp_path, UNFIT["answer"], shown=shown)
        assert (done.returncode, said) == (0, DRAIN)

    def test_the_real_command_drains_a_node(self, tmp_path: Path) -> None:
        done, said = run(self.SCRIPT, FOUND[0], tmp_path, UNFIT["real command"])
        assert (done.returncode, said) == (0, DRAIN.replace("device 3", "device 0"))

    @pytest.mark.parametrize("shell", FOUND)
    def test_a_node_is_drained_once(self, tmp_path: Path, shell: str) -> None:
        shown = f"State=IDLE+DRAIN Reason=pacekeeper: unfit: {REASON}"
        done, said = run(self.SCRIPT, shell, tmp_path, UNFIT["answer"], shown=shown)
        assert (done.returncode, said) == (0, "")

    @in_shells(NOT_UNFIT)
    def test_another_answer_changes_nothing(self, tmp_path: Path, shell: str, name: str) -> None:
        done, said = run(self.SCRIPT, shell, tmp_path, NOT_UNFIT[name][0])
        assert (done.returncode, said, done.stderr) == (0, "", "")

    @in_shells(FAILURES)
    def test_a_failure_is_logged_and_drains_nothing(
        self, tmp_path: Path, shell: str, name: str
    ) -> None:
        done, said = run(self.SCRIPT, shell, tmp_path, FAILURES[name])
        assert said == ""
        assert done.returncode == 1 and "pacekeeper healthcheck ended with code" in done.stderr


class TestNodeProblemDetector:
    SCRIPT = "node-problem-detector.sh"

    @in_shells(UNFIT)
    def test_an_unfit_node_is_not_ok(self, tmp_path: Path, shell: str, name: str) -> None:
        done, said = run(self.SCRIPT, shell, tmp_path, UNFIT[name])
        assert (done.returncode, said) == (NON_OK, "")
        assert done.stdout.startswith("unfit: device ")

    @in_shells(NOT_UNFIT)
    def test_another_answer_has_its_status(self, tmp_path: Path, shell: str, name: str) -> None:
        install, status = NOT_UNFIT[name]
        done, _ = run(self.SCRIPT, shell, tmp_path, install)
        assert done.returncode == status
        assert done.stdout.startswith(name.partition(" ")[0])

    @in_shells(FAILURES)
    def test_a_failure_is_unknown(self, tmp_path: Path, shell: str, name: str) -> None:
        done, _ = run(self.SCRIPT, shell, tmp_path, FAILURES[name])
        assert done.returncode == UNKNOWN
        assert done.stdout.startswith("unknown: ") and len(done.stdout.strip()) <= MAX_LINE
        assert "pacekeeper healthcheck printed" in done.stderr

    @pytest.mark.parametrize("shell", FOUND)
    @pytest.mark.parametrize("defaults", ["exit 1", "set -e\nfalse", "unset X; set -u; : $X", "("])
    def test_a_broken_file_of_defaults_is_unknown(
        self, tmp_path: Path, shell: str, defaults: str
    ) -> None:
        (tmp_path / "defaults").write_text(f"{defaults}\n")
        done, _ = run(self.SCRIPT, shell, tmp_path, UNFIT["answer"])
        assert done.returncode == UNKNOWN

    def test_its_file_names_the_script_and_the_condition(self) -> None:
        config = json.loads((DEPLOY / "node-problem-detector.json").read_text())
        (rule,), (condition,) = config["rules"], config["conditions"]
        assert rule["path"] == f"/etc/pacekeeper/{self.SCRIPT}" and rule["type"] == "permanent"
        assert rule["condition"] == condition["type"] == CONDITION
        assert config["pluginConfig"]["max_output_length"] == MAX_LINE


@pytest.mark.parametrize("shell", FOUND)
@pytest.mark.parametrize(
    ("script", "code"), [(TestSlurm.SCRIPT, 0), (TestNodeProblemDetector.SCRIPT, NON_OK)]
)
def test_the_file_of_defaults_sets_the_path(
    tmp_path: Path, shell: str, script: str, code: int
) -> None:
    """slurmd sets no PATH, and `pacekeeper` is installed in an environment of its own."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    UNFIT["answer"](elsewhere)
    (tmp_path / "defaults").write_text(f"PATH={elsewhere}:{tmp_path}:/usr/bin:/bin\n")
    done, said = run(script, shell, tmp_path, FAILURES["not there"], has_path=False)
    assert done.returncode == code
    assert said == (DRAIN if script == TestSlurm.SCRIPT else "")


@pytest.mark.parametrize("script", [TestSlurm.SCRIPT, TestNodeProblemDetector.SCRIPT])
def test_the_scripts_can_be_executed(script: str) -> None:
    assert os.access(DEPLOY / script, os.X_OK)


def test_no_failure_ends_with_the_code_of_unfit() -> None:
    code = EXIT_CODES[Fitness.UNFIT]
    assert code is ExitCode.UNFIT and int(code) == 12  # as the scripts and the documents have it
    assert code not in {kind.exit_code for kind in PacekeeperError.__subclasses__()}
    others = {0, 1, 2, 120, *range(64, 79)}  # Python, click, a lost stdout, sysexits.h
    assert code not in others and code < 124  # `timeout`, shells, signals
