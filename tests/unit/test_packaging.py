"""The wheel is built from the real folders; the links under src/ serve editable installs only."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

from support.tree import FOLDERS, ROOT, project_files

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the back end itself, without network: no isolation, no resolver."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-Im", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = out.glob("*.whl")
    return built


def packaged() -> set[str]:
    """What a wheel must have, by the tracked files."""
    return {path for path in project_files() if path.split("/")[0] in FOLDERS}


def test_the_folders_are_the_same_everywhere() -> None:
    build = PROJECT["tool"]["hatch"]["build"]
    assert set(build["only-include"]) == set(FOLDERS)
    assert set(build["targets"]["sdist"]["only-include"]) == {*FOLDERS, "tests"}
    contracts = PROJECT["tool"]["importlinter"]["root_packages"]
    assert set(contracts) == {f"pacekeeper.{folder}" for folder in FOLDERS}
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(FOLDERS)


def test_the_links_lead_to_the_folders_and_nothing_else_is_there() -> None:
    links = ROOT / "src" / "pacekeeper"
    assert {path.name for path in links.iterdir()} - {"__pycache__"} == set(FOLDERS)
    for folder in FOLDERS:
        link = links / folder
        assert link.is_symlink(), f"{link} must be a link; is this checkout without links?"
        assert link.readlink() == Path("..", "..", folder)
        assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_a_typed_package(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()
    assert (ROOT / folder / "py.typed").is_file()


def test_the_wheel_has_every_tracked_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    content = {name for name in names if ".dist-info/" not in name}
    assert all(name.startswith("pacekeeper/") for name in content), "it would litter site-packages"
    shipped = {name.removeprefix("pacekeeper/") for name in content}
    assert packaged() - shipped == set()
    assert shipped <= set(project_files(with_new=True))
    assert {name.split("/")[-1] for name in names - content} >= {"METADATA", "LICENSE"}


def test_the_seam_runs_from_the_wheel_with_the_standard_library_alone(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import pacekeeper.core.config.loader, pacekeeper.core.layout.shrink\n"
        "import pacekeeper.trainer.hooks.hooks\n"
        "import pacekeeper.core.telemetry.shm_ring as ring; print(ring.__file__)"
    )
    # -S: without site-packages, so that anything but the standard library fails to import.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        Path(done.stdout.strip()) == tmp_path / "pacekeeper" / "core" / "telemetry" / "shm_ring.py"
    )


def test_the_installed_version_is_the_projects() -> None:
    assert version("pacekeeper") == PROJECT["project"]["version"]


def floor_of(distribution: str) -> tuple[int, ...]:
    """The lowest version that pyproject.toml lets in."""
    for line in PROJECT["project"]["dependencies"]:
        found = re.match(rf"{re.escape(distribution)}>=([\d.]+)", line)
        if found is not None:
            return as_numbers(found[1])
    raise AssertionError(f"{distribution}: no dependency with a floor")


def as_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize(
    ("distribution", "files", "said"),
    [
        ("grpcio", "*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", "*_pb2.py", r"Protobuf Python Version: ([\d.]+)"),
    ],
)
def test_no_version_is_let_in_that_is_older_than_the_generated_code_asks_for(
    distribution: str, files: str, said: str
) -> None:
    generated = sorted((ROOT / "protos").glob(files))
    assert generated
    for path in generated:
        needed = re.search(said, path.read_text())
        assert needed is not None, f"{path.name} does not say its version"
        floor = floor_of(distribution)
        padded = floor + (0,) * (3 - len(floor))
        assert padded >= as_numbers(needed[1]), f"{path.name} needs {distribution} {needed[1]}"


def test_the_companions_of_grpcio_have_its_floor() -> None:
    companions = ["grpcio-health-checking", "grpcio-reflection"]
    assert {floor_of(name) for name in companions} == {floor_of("grpcio")}


# What a dependency is imported as, where that is not its own name.
IMPORTED_AS = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
}


def test_every_dependency_is_imported_somewhere() -> None:
    """What nobody imports only narrows the versions that can be had."""
    source = "\n".join((ROOT / path).read_text() for path in packaged() if path.endswith(".py"))
    for line in PROJECT["project"]["dependencies"]:
        name = re.split(r"[<>=]", line)[0]
        module = IMPORTED_AS.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.M), f"nobody imports {name}"


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="pacekeeper")
    assert callable(script.load())


@pytest.mark.parametrize("module", ["cli.main", "agent.daemon", "controller.app"])
def test_what_runs_on_every_node_starts_without_torch(module: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['scipy'] = None\n"
        f"import pacekeeper.{module}"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
