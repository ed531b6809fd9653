"""The wheel as users install it: each extra brings what its part needs, and no more."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pacekeeper
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.records import StepRecord
from support.engine_jobs import logged, small_job
from support.fleet import write_config
from support.ports import free_port
from support.rings import records_in
from support.tree import ROOT
from support.wheel_env import WheelEnvironment, build

PATIENCE_S = 60.0
# Tests that read files of the package or judge by golden files.
SLICE = (
    "tests/golden/controller",
    "tests/unit/controller/api/web",
)
# What an image is to be spared: each extra is large or has no business where it is not named.
HEAVY = (
    "grpc",
    "matplotlib",
    "numpy",
    "pyarrow",
    "pydantic",
    "scipy",
    "sklearn",
    "starlette",
    "textual",
    "torch",
)
HEAVY_OF = {
    "agent": {"grpc", "pydantic"},
    "controller": {"grpc", "pydantic", "numpy", "scipy", "sklearn"},
    "web": {"grpc", "pydantic", "numpy", "scipy", "sklearn", "starlette"},
    "cli": {"grpc", "pydantic", "numpy", "scipy", "textual"},
    "trainer": {"pydantic", "numpy", "scipy", "torch"},
}
# The folders of the package whose every module an extra must be able to import.
PARTS = {
    "agent": ("core", "protos", "agent"),
    "controller": ("core", "protos", "predictor", "controller"),
    "web": ("controller",),
    "cli": ("core", "protos", "predictor", "simulator", "cli"),
    "trainer": ("core", "trainer"),
}
# Overrides that torchtitan imports: they need it.
OVERRIDES = (
    "pacekeeper.trainer.adapters.batch_shares.torchtitan_loader",
    "pacekeeper.trainer.adapters.torchtitan_experts.overrides",
)
# Modules in these folders that belong to other extras.
ELSEWHERE = {
    "controller": ("pacekeeper.controller.api.web",),
    "trainer": OVERRIDES,
    "cli": ("pacekeeper.protos.metrics_server", "pacekeeper.predictor.cost.estimator"),
}
# Writes the generated code from a checkout.
GENERATOR = "pacekeeper.protos.generate"
EXTRA_OF_COMMAND = {
    "agent": "agent",
    "controller": "controller",
    "launch": "trainer",
    "demo": "all",
    "store": "controller",
    "healthcheck": "agent",
    "status": "cli",
    "replay": "cli",
    "certs": "cli",
    "doctor": "cli",
}
IMPORT_ALL = """
import importlib, pkgutil, sys
count = 0
for part in sys.argv[1].split(","):
    package = importlib.import_module(f"pacekeeper.{part}")
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.startswith(tuple(sys.argv[2].split(","))):
            importlib.import_module(found.name)
            count += 1
print(count)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("installed")
    yield made
    shutil.rmtree(made)


class Environments(dict[str, WheelEnvironment]):
    """Environments by their extras, made when a test asks for one; "" is the base installation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self[""] = WheelEnvironment.base(folder / "base", build("wheel", folder / "wheel"))

    def __missing__(self, extras: str) -> WheelEnvironment:
        self[extras] = self[""].with_extras(self._folder / extras, *extras.split(","))
        return self[extras]


@pytest.fixture(scope="module")
def installed(folder: Path) -> Environments:
    return Environments(folder)


def test_the_base_installation_has_no_dependency_and_prints_its_version(
    installed: Environments,
) -> None:
    assert installed[""].dependencies == set()
    done = installed[""].pacekeeper("--version")
    assert (done.returncode, done.stdout) == (0, f"pacekeeper {pacekeeper.__version__}\n")


@pytest.mark.parametrize(("command", "extra"), EXTRA_OF_COMMAND.items())
def test_a_command_of_the_base_installation_names_its_extra(
    command: str, extra: str, installed: Environments
) -> None:
    done = installed[""].pacekeeper(command)
    assert_names_extra(done, extra)


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_the_script_of_the_base_installation_names_the_extra_of_commands(
    words: tuple[str, ...], installed: Environments
) -> None:
    assert_names_extra(installed[""].pacekeeper(*words), "cli")


def assert_names_extra(done: subprocess.CompletedProcess[str], extra: str) -> None:
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert done.returncode == ExitCode.HOST, done.stderr
    assert "Traceback" not in done.stderr
    assert f"'pacekeeper[{extra}]'" in line


def test_a_trainer_is_watched_with_the_base_installation(
    installed: Environments, tmp_path: Path
) -> None:
    example = str(ROOT / "examples" / "attach.py")
    done = installed[""].run(example, "--steps", "7", "--ring-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    records = records_in(tmp_path / "example" / "rank-00000.ring")
    assert [record.step for record in records if isinstance(record, StepRecord)] == [*range(7)]


def test_the_deployment_files_are_where_the_documentation_looks(installed: Environments) -> None:
    code = re.findall(r'python -c "([^"]+)"', (ROOT / "docs" / "operations.md").read_text())
    done = installed[""].run("-c", code[0])
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert found == installed[""].packages / "pacekeeper" / "deploy"
    unit = found / "pacekeeper-agent.service"
    assert unit.read_text() == (ROOT / "deploy" / unit.name).read_text()
    assert (found / "kubernetes" / "kustomization.yaml").is_file()
    assert os.access(found / "slurm-healthcheck.sh", os.X_OK)


def test_the_adapters_need_nothing_beside_torch(folder: Path, installed: Environments) -> None:
    environment = installed[""].with_extras(folder / "torch", beside=["torch"])
    parts, overrides = "trainer.hooks,trainer.adapters", ",".join(OVERRIDES)
    done = environment.run("-c", IMPORT_ALL, parts, overrides)
    assert done.returncode == 0, done.stderr
    assert environment.dependencies == set() and int(done.stdout) > 10


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_its_part_imports_and_nothing_large_beside(
    extra: str, installed: Environments
) -> None:
    environment = installed[extra]
    skipped = (GENERATOR, *ELSEWHERE.get(extra, ()))
    done = environment.run("-c", IMPORT_ALL, ",".join(PARTS[extra]), ",".join(skipped))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    probe = f"from importlib.util import find_spec; print([n for n in {HEAVY} if find_spec(n)])"
    found = environment.run("-c", probe)
    assert found.stdout.strip() == str(sorted(HEAVY_OF[extra])), found.stderr


@pytest.mark.parametrize(
    ("extras", "words", "extra"),
    [
        ("cli", ("agent",), "agent"),
        ("cli", ("controller", "--listen", "127.0.0.1:0"), "controller"),
        ("cli", ("launch", "--join", "127.0.0.1:1"), "trainer"),
        ("agent", ("demo",), "all"),
        ("trainer", ("certs", "init", "--dir", "none/pki"), "cli"),
        ("controller", ("controller", "--web", "127.0.0.1:0"), "web"),
        ("trainer", ("status",), "cli"),
    ],
)
def test_a_command_of_another_part_names_its_extra(
    extras: str, words: tuple[str, ...], extra: str, installed: Environments
) -> None:
    assert_names_extra(installed[extras].pacekeeper(*words), extra)


@pytest.mark.parametrize("extras", ["agent", "cli", "controller", "trainer"])
def test_doctor_runs_with_each_extra(extras: str, installed: Environments) -> None:
    done = installed[extras].pacekeeper("doctor", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = [check for check in json.loads(done.stdout) if check["name"] == "extras"]
    assert found["health"] == "ok"
    assert found["found"].split("; ")[0].split(", ")[0] == extras
    assert "plot without matplotlib" in found["found"]


def test_a_fleet_of_three_installations_works_together(
    installed: Environments, tmp_path: Path
) -> None:
    listen, api = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    controller = [str(installed["web"].bin / "pacekeeper"), "controller", "--listen", listen]
    controller += ["--api-listen", api]
    agent = [str(installed["agent"].bin / "pacekeeper"), "agent", "--controller", listen]
    controller += ["--web", "127.0.0.1:0", "--metrics-listen", "", "--store", "store.sqlite"]
    agent += ["--node", "n0", "--ring-dir", str(tmp_path / "rings"), "--metrics-listen", ""]
    with (tmp_path / "log").open("w+") as log:
        services = [
            subprocess.Popen(line, cwd=tmp_path, stderr=log) for line in (controller, agent)
        ]
        try:
            nodes = await_nodes(installed["cli"], api)
        finally:
            for service in services:
                service.terminate()
            codes = [service.wait(PATIENCE_S) for service in services]
        assert nodes == ["n0"] and codes == [0, 0], (tmp_path / "log").read_text()


def await_nodes(environment: WheelEnvironment, address: str) -> list[str]:
    """Names of the nodes that `pacekeeper status` shows, as soon as there are any."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        done = environment.pacekeeper("status", "--json", "--controller", address)
        if done.returncode == 0 and (nodes := json.loads(done.stdout)["nodes"]):
            return [node["name"] for node in nodes]
        time.sleep(0.2)
    return []


def test_our_trainer_trains_with_its_extra(installed: Environments, tmp_path: Path) -> None:
    config = write_config(tmp_path / "job.toml", small_job(tmp_path, steps=2))
    line = ["launch", "--config", str(config), "--ranks-per-node", "1"]
    line += ["--rendezvous", f"127.0.0.1:{free_port()}"]
    line += ["--ring-dir", str(tmp_path / "rings"), "--run-dir", str(tmp_path / "run")]
    done = installed["trainer"].pacekeeper(*line)
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in logged(tmp_path / "run")] == [0, 1]


def test_users_of_the_wheel_see_its_types(installed: Environments, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from pacekeeper.trainer.hooks import hooks\nreveal_type(hooks.attach)\n")
    line = [sys.executable, "-Im", "mypy", "--python-executable", str(installed[""].python)]
    done = subprocess.run(
        [*line, "--cache-dir", str(tmp_path / "cache"), "--config-file", "", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "def (" in done.stdout and "job: str" in done.stdout


def test_a_slice_of_the_tests_passes_on_the_wheel(installed: Environments) -> None:
    environment = installed["all,dev"]
    where = environment.run("-c", "import pacekeeper; print(pacekeeper.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(environment.packages)
    line = [str(environment.python), "-Im", "pytest", "-q", "-p", "no:cacheprovider"]
    line += ["--hypothesis-profile", "whole", *SLICE]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False
    )
    assert done.returncode == 0, done.stdout
