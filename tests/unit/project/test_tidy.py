"""Rules of docs/style.md that ruff, mypy and import-linter do not check, over all files in git."""

import ast
import re
from collections.abc import Iterator

import pytest

from support.tree import ROOT, is_pure, modules, project_files, pure_packages

MAX_LINES = 600
WORLD = {
    *("asyncio", "builtins", "concurrent", "datetime", "glob", "grpc", "io", "logging"),
    *("multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil", "signal"),
    *("socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "torch"),
    *("urllib", "uuid"),
}
WORLDLY_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
ABSOLUTE = re.compile(r"(?<![\w.~$-])/(?:work|opt|root|home|Users|mnt)/")
LATER = re.compile("TO" + "DO|FIX" + "ME|NotImplemented" + "Error")  # split: not found here
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def text_files() -> Iterator[tuple[str, str]]:
    for path in project_files():
        try:
            yield path, (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # a picture


def impure_parts(tree: ast.Module) -> set[str]:
    """Return what a pure module must not contain: world-touching imports and calls."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Name(id=name) if name in WORLDLY_CALLS:
                found.add(name)
            case ast.Attribute(attr="random"):
                found.add("numpy.random")
        found |= {name for name in names if name.split(".")[0] in WORLD}
        found |= {name for name in names if name.startswith(("pacekeeper.protos", "numpy.r"))}
    return found


def test_modules_have_a_readable_size() -> None:
    sizes = {path: len((ROOT / path).read_text().splitlines()) for path in modules()}
    assert {path: size for path, size in sizes.items() if size > MAX_LINES} == {}


def test_code_is_ascii_and_finished() -> None:
    texts = {path: (ROOT / path).read_text() for path in modules()}
    assert [path for path, text in texts.items() if not text.isascii()] == []
    assert [path for path, text in texts.items() if LATER.search(text)] == []


def test_pure_packages_touch_nothing_of_the_world() -> None:
    pure = [path for path in modules() if is_pure(path)]
    assert len(pure) > 150
    found = {
        path: parts
        for path in pure
        if (parts := impure_parts(ast.parse((ROOT / path).read_text())))
    }
    assert found == {}


def test_decision_packages_are_under_the_purity_contract() -> None:
    wanted = {"core", "predictor", "controller/planning", "controller/policy"}
    assert wanted <= set(pure_packages())


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "from os import environ",
        "def f():\n    import random",
        "import numpy as np\nx = np.random.normal()",
        "from numpy.random import default_rng",
        "from pacekeeper.protos import wire",
        "print('x')",
        "y = open('f')",
    ],
)
def test_impure_code_is_detected(code: str) -> None:
    assert impure_parts(ast.parse(code))


def test_no_committed_file_knows_where_it_was_written() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if ABSOLUTE.search(line)
    ]
    assert found == []


def test_every_benchmark_accepts_the_data_folder() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        if path.stem != "torchrun_job" and "ArgumentParser(" in text:  # that is a trainer
            assert '"--data"' in text, path.name


def test_links_in_documents_exist_and_no_merge_conflict_is_left() -> None:
    found = []
    for path, text in text_files():
        if path.endswith(".md"):
            targets = [
                t for t in LINK.findall(text) if not (ROOT / path).parent.joinpath(t).exists()
            ]
            found += [f"{path}: {target}" for target in targets]
        if not path.endswith(".py") and re.search(r"^(<<<<<<<|>>>>>>>)", text, flags=re.M):
            found.append(f"{path}: merge conflict")
    assert found == []
