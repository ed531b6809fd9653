"""The units: systemd understands every line, and they leave little open."""

import shutil
import subprocess

import pytest

from support.tree import ROOT

UNITS = ("pacekeeper-agent.service", "pacekeeper-controller.service")
# Of 10, as `systemd-analyze security` counts: below 5 it says "OK".
MOST_EXPOSED = {"pacekeeper-agent.service": 3.5, "pacekeeper-controller.service": 2.0}
pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: systemd)"
)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_every_line(unit: str) -> None:
    done = analyze("verify", "--man=no", str(ROOT / "deploy" / unit))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_leaves_little_open(unit: str) -> None:
    threshold = f"--threshold={round(MOST_EXPOSED[unit] * 10)}"
    done = analyze("security", "--offline=yes", threshold, str(ROOT / "deploy" / unit))
    assert done.returncode == 0, done.stdout[-200:]
