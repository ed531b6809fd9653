"""Files of others are as they were published, with their licences; ours ask no other origin."""

import hashlib
import re

import pytest

from support.tree import ROOT

STATIC = ROOT / "controller" / "api" / "web" / "web_static"
PUBLISHED = {
    "htmx.min.js": "e209dda5c8235479f3166defc7750e1dbcd5a5c1808b7792fc2e6733768fb447",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
OURS = ("common.js", "fleet.js", "incident.js", "job.js", "layout.js", "pacekeeper.css", "icon.svg")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_of_others_is_as_it_was_published(name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == PUBLISHED[name]


def test_every_file_is_ours_or_has_its_licence_beside_it() -> None:
    found = {path.name for path in STATIC.iterdir()}
    assert found == {*PUBLISHED, *OURS, "VENDORED.md", "htmx.LICENSE", "uPlot.LICENSE"}
    told = (STATIC / "VENDORED.md").read_text()
    assert all(name in told for name in (*PUBLISHED, "htmx.LICENSE", "uPlot.LICENSE"))


@pytest.mark.parametrize("name", OURS)
def test_ours_name_no_other_origin(name: str) -> None:
    text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.", text), "the browser would be sent elsewhere"
