"""Sections of benchmarks/gpu in processes of their own, and the page that shows their figures."""

import ast
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.page import meanings, page, shown
from benchmarks.gpu.runner import Outcome, Status, run_all
from benchmarks.gpu.sections import SECTIONS, Section

from support.tree import ROOT

DONE = Section(
    name="works", title="Works", method="By hand.", function="support.gpu_sections:works",
    limit_s=60.0,
)  # fmt: skip


def run(*functions: str, limit_s: float = 60.0, **own: Any) -> list[Outcome]:
    sections = [
        replace(DONE, name=name, function=f"support.gpu_sections:{name}", limit_s=limit_s)
        for name in functions
    ]
    given: dict[str, Any] = {
        "device": "cpu",
        "scale": "tiny",
        "total_s": 300.0,
        "num_devices": 0,
    } | own
    return list(run_all(sections, **given | own))


@pytest.fixture(autouse=True)
def support_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes of the sections, too."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT / 'src'}:{ROOT}")


def test_a_section_that_fails_or_crashes_costs_itself_only() -> None:
    found = run("fails", "crashes", "cannot_run", "works")
    assert [one.status for one in found] == [
        Status.FAILED,
        Status.FAILED,
        Status.NOT_RUN,
        Status.RAN,
    ]
    assert "no such kernel" in found[0].reason and "fails" in found[0].log
    assert "SIGABRT" in found[1].reason
    assert found[2].reason == "the moon is not full"
    assert found[3].figures == {"answer": 42}


def test_a_section_that_hangs_is_killed_with_what_it_started() -> None:
    (found,) = run("hangs", limit_s=6.0)
    assert found.status is Status.FAILED and "24 s" in found.reason
    assert "in hangs" in found.log  # the stack says where
    (pid,) = (line.split()[1] for line in found.log.splitlines() if line.startswith("child"))
    give_up_s = time.monotonic() + 60.0
    while is_running(int(pid)):
        assert time.monotonic() < give_up_s, "it outlived its section"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sections_without_time_or_devices_are_not_run() -> None:
    (late,) = run("works", total_s=1.0)
    assert late.status is Status.NOT_RUN
    sections = [replace(DONE, least_devices=2)]
    (lacking,) = run_all(sections, device="cuda", scale="tiny", total_s=300.0, num_devices=1)
    assert (lacking.status, lacking.reason) == (Status.NOT_RUN, "needs two GPUs")


def test_the_page_shows_figures_with_their_meaning() -> None:
    outcome = Outcome(name="works", status=Status.RAN, took_s=1.0, figures={"answer": 42})
    given = {"machine": {"kind": "cuda"}, "outcomes": [asdict(outcome)]}
    text = page(given, [DONE])
    assert "| the answer | 42 |" in text and "## Works" in text
    failed = replace(outcome, status=Status.FAILED, reason="a kernel is gone", figures=None)
    assert "a kernel is gone" in page(given | {"outcomes": [asdict(failed)]}, [DONE])


def test_figures_of_several_rows_become_a_table() -> None:
    (section,) = (one for one in SECTIONS if one.name == "grouped")
    row = {"name": "a", "grouped_ms": 1.5}
    outcome = Outcome(name="grouped", status=Status.RAN, figures={"shapes": [row]})
    text = page({"machine": {"kind": "cuda"}, "outcomes": [asdict(outcome)]}, [section])
    assert "| shape | grouped, ms |\n|---|---|\n| a | 1.50 |" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (0.01234, "0.0123"), (3.2e-7, "3.20e-07"), (0.0, "0"), (True, "yes"),
     (None, "-"), (12345, "12,345"), (float("nan"), "nan"), ("x", "x")],
)  # fmt: skip
def test_values_have_three_digits(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("section", SECTIONS, ids=lambda one: one.name)
def test_each_section_is_there_and_says_what_its_figures_mean(section: Section) -> None:
    module, _, name = section.function.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert meanings(section.function)


def test_the_page_of_the_project_is_that_of_its_last_run() -> None:
    run = ROOT / "docs" / "gpu.json"
    given = json.loads(run.read_text()) if run.exists() else None
    assert (ROOT / "docs" / "gpu.md").read_text() == page(given)
