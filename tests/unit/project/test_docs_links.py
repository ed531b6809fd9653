"""Anchors of links, and paths of source files, that documents name exist."""

import re
from pathlib import Path

from support.tree import ROOT, project_files

LINK = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
SOURCE = re.compile(
    r"(?<![\w./-])(?:agent|benchmarks|cli|controller|core|deploy|examples|predictor|protos"
    r"|simulator|tests|trainer)/[\w./-]*\w\.(?:py|toml|yml|yaml|sh|json|proto|c)\b"
)
PAGES = [path for path in project_files() if path.endswith(".md")]


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_anchors_exist() -> None:
    missing = []
    for page in PAGES:
        for target, anchor in LINK.findall((ROOT / page).read_text()):
            path = (ROOT / page).parent / target if target else ROOT / page
            if anchor not in anchors(path):
                missing.append(f"{page}: {target}#{anchor}")
    assert missing == []


def test_named_source_files_exist() -> None:
    missing = [
        f"{page}: {name}"
        for page in PAGES
        for name in SOURCE.findall((ROOT / page).read_text())
        if not (ROOT / name).exists()
    ]
    assert PAGES and missing == []
