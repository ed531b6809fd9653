"""Decision records: status, ISO date, an existing successor, four parts, an index entry."""

import re
from datetime import date
from pathlib import Path

import pytest

from support.tree import ROOT

FOLDER = ROOT / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
NUMBERS = {int(path.name[:4]) for path in RECORDS}
PARTS = ("## Context", "## Decision", "## Consequences", "## What would change it")


def front_matter(path: Path) -> dict[str, str]:
    _, head, _ = path.read_text().split("---\n", 2)
    return dict(line.split(": ", 1) for line in head.splitlines())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_front_matter_and_parts(path: Path) -> None:
    head = front_matter(path)
    assert set(head) <= {"status", "date", "superseded-by"}
    assert head["status"] in {"accepted", "superseded"}
    date.fromisoformat(head["date"])
    assert ("superseded-by" in head) == (head["status"] == "superseded")
    if successor := head.get("superseded-by"):
        assert int(successor) in NUMBERS - {int(path.name[:4])}
    lines = path.read_text().splitlines()
    title = next(line for line in lines if line.startswith("# "))
    assert title.startswith(f"# {int(path.name[:4])}. ")
    assert tuple(line for line in lines if line.startswith("## ")) == PARTS


def test_the_index_names_each_record_once() -> None:
    linked = re.findall(r"\]\(([0-9]{4}-[^)]+)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == [path.name for path in RECORDS]
