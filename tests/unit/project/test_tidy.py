"""The habits of docs/style.md that a program can see, over all that git tracks."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from support.tree import ROOT, is_pure, modules, project_files, pure_packages

MAX_LINES = 600
MAX_FUNCTION_LINES = 70
WORLD = {
    *("asyncio", "builtins", "concurrent", "datetime", "glob", "grpc", "io", "logging"),
    *("multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil", "signal"),
    *("socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "torch"),
    *("urllib", "uuid"),
}
WORLDLY_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
# docs/glossary.md: each has one word that is used instead.
BANNED_WORDS = {
    "epoch": "generation",
    "gpu": "device",
    "machine": "node",
    "hostname": "node",
    "callback": "event or command",
    "speedup": "slowdown or speed",
    "dim": "size, or an axis by its name",
    "seconds": "the ending _s",
    "secs": "the ending _s",
    "sec": "the ending _s",
    "millis": "the ending _ms",
    "msec": "the ending _ms",
    "usec": "the ending _us",
}
# Names that others chose: a function that takes the place of one of theirs.
FOREIGN_NAMES = {
    ("controller/planning/eplb.py", "num_gpus"),
    ("trainer/adapters/lightning.py", "on_train_epoch_start"),
    *(
        ("trainer/adapters/nvrx_report.py", name)
        for name in (
            "gpu_relative_perf_scores",
            "gpu_individual_perf_scores",
            "gpu_rel_threshold",
            "gpu_indiv_threshold",
        )
    ),
}
ABSOLUTE = re.compile(r"(?<![\w.~$-])/(?:work|opt|root|home|Users|mnt)/")
Nodes = tuple[ast.AST, ...]
LATER = re.compile("TO" + "DO|FIX" + "ME|NotImplemented" + "Error")  # put together: not said here


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules ask of a module: it is read once for all of them."""

    text: str
    docstring: str
    lengths: tuple[tuple[str, int], ...]
    imports: frozenset[str]
    impure_parts: frozenset[str]
    public_names: tuple[str, ...]


@cache
def facts(path: str) -> Facts:
    text = (ROOT / path).read_text()
    tree = ast.parse(text, filename=path)
    nodes = tuple(ast.walk(tree))
    return Facts(
        text=text,
        docstring=ast.get_docstring(tree) or "",
        lengths=tuple(
            (node.name, node.end_lineno - node.lineno + 1)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ),
        imports=frozenset(imports(nodes)),
        impure_parts=frozenset(impure_parts(nodes)),
        public_names=tuple(public_names(nodes)),
    )


def nodes_of(code: str) -> Nodes:
    return tuple(ast.walk(ast.parse(code)))


def text_files() -> Iterator[tuple[str, str]]:
    for path in project_files():
        try:
            yield path, (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # a picture


def imports(nodes: Nodes) -> set[str]:
    """Top-level names of all modules that are imported anywhere in the file."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def impure_parts(nodes: Nodes) -> set[str]:
    """What a pure module may not have: imports of the world, and calls that reach it without."""
    found = {name for name in imports(nodes) if name.split(".")[0] in WORLD}
    found |= {name for name in imports(nodes) if name.startswith(("pacekeeper.protos", "numpy.r"))}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in WORLDLY_CALLS:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr == "random":
            found.add("numpy.random")
    return found


def public_names(nodes: Nodes) -> Iterator[str]:
    """Names of functions, classes, their arguments and fields that do not begin with '_'."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.AnnAssign(target=ast.Name(id=target)):
                name = target
            case _:
                continue
        if not name.startswith("_"):
            yield name


def documents() -> list[Path]:
    """All text that is no Python, as paths below the root."""
    found = [
        path.relative_to(ROOT)
        for folder in (ROOT, *(ROOT / name for name in ("docs", "docs/adr", "deploy", "examples")))
        for path in sorted(folder.glob("*"))
        if path.suffix in (".md", ".toml", ".yml", ".yaml", ".service", ".sh", ".json")
    ]
    assert len(found) > 50, "they are where they were"
    return found


def words(name: str) -> list[str]:
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


@pytest.mark.parametrize("path", documents())
def test_no_side_of_a_merge_is_left_in_a_document(path: Path) -> None:
    lines = (ROOT / path).read_text().splitlines()
    assert not [line for line in lines if line.startswith(("<<<<<<<", ">>>>>>>"))]


@pytest.mark.parametrize("path", modules())
def test_a_file_has_one_rule_and_fits_its_size(path: str) -> None:
    found = facts(path)
    assert found.docstring, "the module's docstring states the file's one rule"
    num_lines = len(found.text.splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines: split it"
    for name, length in found.lengths:
        assert length <= MAX_FUNCTION_LINES, f"{name}: {length} lines"


@pytest.mark.parametrize("path", modules())
def test_code_is_ascii_and_says_nothing_about_later(path: str) -> None:
    text = facts(path).text
    assert text.isascii(), [line for line in text.splitlines() if not line.isascii()]
    assert not LATER.findall(text)


@pytest.mark.parametrize("path", modules())
def test_imports_are_absolute_and_of_this_python(path: str) -> None:
    assert not {name for name in facts(path).imports if name.startswith("__future__")}


@pytest.mark.parametrize("path", [p for p in modules() if is_pure(p)])
def test_pure_modules_touch_nothing_of_the_world(path: str) -> None:
    assert facts(path).impure_parts == set()


def test_the_packages_of_decisions_are_under_the_contract() -> None:
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
        "from pacekeeper.protos.convert import reports as wire",
        "print('x')",
        "y = open('f')",
    ],
)
def test_what_is_impure_is_seen(code: str) -> None:
    assert impure_parts(nodes_of(code))


@pytest.mark.parametrize("path", [p for p in modules() if not p.startswith("tests/")])
def test_names_use_the_words_of_the_glossary(path: str) -> None:
    for name in facts(path).public_names:
        if (path, name) in FOREIGN_NAMES:
            continue
        for word in words(name):
            assert word not in BANNED_WORDS, f"{name}: say {BANNED_WORDS[word]}"


def test_banned_words_are_seen_inside_names() -> None:
    nodes = nodes_of("class GpuWatch:\n    num_secs: int = 0\n\ndef f(epochCount): ...")
    seen = {word for name in public_names(nodes) for word in words(name)}
    assert seen & set(BANNED_WORDS) == {"gpu", "secs", "epoch"}


def test_nothing_committed_knows_where_it_was_written() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if ABSOLUTE.search(line)
    ]
    assert found == []


def test_every_benchmark_can_be_told_where_the_data_is() -> None:
    """One command line for all of them, whether they need data or not."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        if path.stem != "torchrun_job" and "ArgumentParser(" in text:  # that is a trainer
            assert '"--data"' in text, path.name


def test_links_in_documents_lead_somewhere() -> None:
    link = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    broken = [
        f"{path}: {target}"
        for path, text in text_files()
        if path.endswith(".md")
        for target in link.findall(text)
        if not (ROOT / path).parent.joinpath(target).exists()
    ]
    assert broken == []
