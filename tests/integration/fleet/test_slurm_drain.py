"""`deploy/slurm-healthcheck.sh` as the HealthCheckProgram of a real Slurm."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.incidents import node_health
from support import slurm
from support.symptoms import DEVICE
from support.tree import ROOT

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "none")
SCRIPT = ROOT / "deploy" / "slurm-healthcheck.sh"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path short enough for a socket's name."""
    made = Path(tempfile.mkdtemp(prefix="pk-slurm-"))
    yield made
    shutil.rmtree(made)


def tell(rings: Path, *, is_lost: bool) -> None:
    """What the node's agent writes."""
    devices = (replace(DEVICE, is_lost=is_lost),)
    verdict = node_health.assess_node(None, devices, nvml="ok", node="n0", now_unix_s=time.time())
    (rings / node_health.FILE_NAME).write_bytes(node_health.encode_node_health(verdict))


def check_of(folder: Path, path: str) -> Path:
    """The script as installed: slurmd gives it neither PATH nor the place of this Slurm's file."""
    (folder / "rings").mkdir()
    check = folder / "check.sh"
    check.write_text(
        f"#!/bin/sh\nexport PATH={path} SLURM_CONF={folder}/slurm.conf\n"
        f"exec sh {SCRIPT} --ring-dir {folder}/rings\n"
    )
    check.chmod(0o755)
    return check


def test_a_node_that_is_unfit_is_drained_and_stays_so(folder: Path) -> None:
    check = check_of(folder, f"{Path(sys.executable).parent}:/usr/bin:/bin")
    tell(folder / "rings", is_lost=False)
    with slurm.running(folder, check=check) as cluster:
        time.sleep(3.0)  # a check or two
        assert "DRAIN" not in cluster.show()
        tell(folder / "rings", is_lost=True)
        shown = cluster.wait("State=IDLE+DRAIN")
        assert "Reason=pacekeeper: unfit: device 0 is lost" in shown
        tell(folder / "rings", is_lost=False)
        time.sleep(3.0)
        assert "DRAIN" in cluster.show(), "who mended the node says so, nobody else"


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_check_that_can_not_run_is_logged_and_drains_nothing(
    folder: Path, is_installed: bool
) -> None:
    if is_installed:  # and broken: Python ends with the code that once meant "unfit"
        broken = folder / "pacekeeper"
        broken.write_text(f"#!{sys.executable}\nimport no_such_package_of_ours\n")
        broken.chmod(0o755)
    check = check_of(folder, f"{folder}:/usr/bin:/bin")
    tell(folder / "rings", is_lost=True)
    with slurm.running(folder, check=check) as cluster:
        end_s = time.monotonic() + slurm.START_S
        while "health_check failed" not in cluster.log():
            assert time.monotonic() < end_s, cluster.log()
            time.sleep(0.2)
        assert "DRAIN" not in cluster.show()
