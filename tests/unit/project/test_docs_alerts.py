"""What docs/alerts.md shows can be used as it stands, and names what there is."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import read_config
from support.alert_rules import FILE
from support.series import labels_of_series
from support.tree import ROOT

TEXT = (ROOT / "docs" / "alerts.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


def written(folder: Path, name: str) -> Path:
    """The block that begins with this name, as a file."""
    (text,) = [block for block in blocks("yaml") if block.startswith(f"# {name}\n")]
    path = folder / name
    path.write_text(text)
    return path


def checked(*command: str) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"needs {command[0]} (Debian: prometheus, prometheus-alertmanager)")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path)
    path = written(tmp_path, "prometheus.yml")
    checked("promtool", "check", "config", "--syntax-only", str(path))


def test_alertmanager_takes_its_configuration(tmp_path: Path) -> None:
    path = written(tmp_path, "alertmanager.yml")
    checked("amtool", "check-config", str(path))


def test_our_settings_are_settings() -> None:
    for text in blocks("toml"):
        assert tomllib.loads(text)
        read_config(ControllerConfig, text, file="docs/alerts.md")


def test_every_series_of_the_controller_is_named_and_no_other() -> None:
    told = {name.removeprefix("pacekeeper_") for name in labels_of_series(agents=False)}
    told = {re.sub(r"_(count|sum)$", "", n) for n in told if not n.endswith("_created")}
    names = {re.sub(r"\{.*", "", name) for name in re.findall(r"`([a-z_]+(?:\{.*?\})?)`", TABLE)}
    assert told <= names, told - names
    agents = {name.removeprefix("pacekeeper_") for name in labels_of_series(agents=True)}
    assert {n for n in names if "..." not in n} <= told | agents


TABLE = TEXT[TEXT.index("| of | series") : TEXT.index("A scrape reads")]
