"""The wheel is built from the real folders; the links under src/ serve editable installs only."""

import re
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import pacekeeper
from support.tree import FOLDERS, ROOT, project_files
from support.wheel_env import build

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


OWN = ("src/pacekeeper/__init__.py", "src/pacekeeper/py.typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def packaged() -> dict[str, str]:
    """Each tracked file that a wheel must hold, by its place in the package."""
    return {
        path.removeprefix("src/pacekeeper/"): path
        for path in project_files()
        if path in OWN or path.split("/")[0] in FOLDERS or is_deployed(path)
    }


def is_deployed(path: str) -> bool:
    """Is it a file of `deploy/` that is of use without a checkout?"""
    if path.split("/")[0] != "deploy":
        return False
    return path != "deploy/Containerfile" and not path.endswith(".py")


def test_the_folders_are_the_same_everywhere() -> None:
    build = PROJECT["tool"]["hatch"]["build"]
    assert set(build["only-include"]) == {*OWN, *FOLDERS, "deploy"}
    assert build["targets"]["wheel"]["sources"] == {
        "src/pacekeeper": "pacekeeper",
        **{folder: f"pacekeeper/{folder}" for folder in (*FOLDERS, "deploy")},
    }
    assert set(build["targets"]["sdist"]["only-include"]) == {*OWN, *FOLDERS, "deploy", "tests"}
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    renamed = {name for name, ban in banned.items() if ban["msg"].startswith("import pacekeeper.")}
    assert renamed == set(FOLDERS)


def test_beside_the_packages_own_files_are_links_to_the_folders_only() -> None:
    links = ROOT / "src" / "pacekeeper"
    own = {Path(path).name for path in OWN}
    assert {path.name for path in links.iterdir()} - {"__pycache__"} == {*own, *FOLDERS}
    for folder in FOLDERS:
        link = links / folder
        assert link.is_symlink(), f"{link} must be a link; is this checkout without links?"
        assert link.readlink() == Path("..", "..", folder)
        assert link.resolve() == ROOT / folder


def test_one_marker_says_that_the_package_is_typed() -> None:
    markers = [path for path in project_files() if path.endswith("py.typed")]
    assert markers == ["src/pacekeeper/py.typed"]
    assert all((ROOT / folder / "__init__.py").is_file() for folder in FOLDERS)


def test_the_wheel_has_every_tracked_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    content = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert all(name.startswith("pacekeeper/") for name in content), "it would litter site-packages"
    shipped = {name.removeprefix("pacekeeper/") for name in content}
    assert packaged().keys() - shipped == set()
    tracked_or_new = {path.removeprefix("src/pacekeeper/") for path in project_files(with_new=True)}
    assert shipped <= tracked_or_new


def test_a_wheel_made_from_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    packed = build("sdist", tmp_path / "sdist")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / packed.name.removesuffix(".tar.gz")
    again = build("wheel", tmp_path / "again", source=unpacked)
    assert again.read_bytes() == wheel.read_bytes()


def test_the_metadata_names_version_licences_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"pacekeeper-{pacekeeper.__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    assert metadata["Version"] == pacekeeper.__version__
    assert metadata["License-Expression"] == "Apache-2.0 AND 0BSD AND MIT"
    licences = {path for path in project_files() if path.endswith("LICENSE")}
    assert set(metadata.get_all("License-File", ())) == licences and len(licences) == 3
    assert {f"{info}/licenses/{path}" for path in licences} <= names_in(wheel)
    assert metadata["Author"] == "The pacekeeper maintainers"
    assert set(metadata.get_all("Classifier", ())) == set(PROJECT["project"]["classifiers"])
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert set(metadata.get_all("Provides-Extra", ())) == extras
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", ())]
    assert required and all(needed.marker is not None for needed in required)
    assert "pacekeeper" not in {needed.name for needed in required}, "the build expands them"


def requirements() -> dict[str, Requirement]:
    """What the extras for users require, by name; a name has one requirement in all of them."""
    found: dict[str, Requirement] = {}
    for extra, lines in PROJECT["project"]["optional-dependencies"].items():
        for needed in map(Requirement, lines):
            if not extra.startswith("dev") and needed.name != "pacekeeper":
                assert found.setdefault(needed.name, needed) == needed, extra
    return found


def floor_of(distribution: str) -> tuple[int, ...]:
    """The lowest version that pyproject.toml lets in."""
    (floor,) = [s.version for s in requirements()[distribution].specifier if s.operator == ">="]
    return as_numbers(floor)


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
    "scikit-learn": "sklearn",
}
# Found by fsspec, by its name in a URL.
IMPORTED_BY_OTHERS = {"s3fs"}


def test_every_dependency_is_imported_somewhere() -> None:
    """A requirement that is not imported only narrows the versions that can be installed."""
    paths = [ROOT / path for path in packaged().values() if path.endswith(".py")]
    source = "\n".join(path.read_text() for path in paths)
    for name in requirements().keys() - IMPORTED_BY_OTHERS:
        module = IMPORTED_AS.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.M), f"{name}: not imported"


def test_the_base_installation_requires_nothing_and_all_has_every_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert PROJECT["project"]["dependencies"] == []
    (everything,) = map(Requirement, extras["all"])
    users = {extra for extra in extras if not extra.startswith("dev")}
    assert everything.extras == users - {"all", "objects"}


def test_the_tools_are_pinned() -> None:
    for needed in map(Requirement, PROJECT["project"]["optional-dependencies"]["dev"]):
        assert [s.operator for s in needed.specifier] == ["=="], needed


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="pacekeeper")
    assert callable(script.load())
