"""Each contract on imports sees a breach that is planted; `make lint` finds that there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import FOLDERS, ROOT

# (file, what is put into it, contract that must break)
BREACHES = (
    (
        "controller/api/messages.py",
        "import pacekeeper.agent.uplink.batching",
        "layers point downwards",
    ),
    ("core/telemetry/node_report.py", "import time", "pure packages touch nothing of the world"),
    (
        "agent/metrics.py",
        "import pacekeeper.predictor.cost.forecast",
        "agent and trainer do not predict",
    ),
    ("trainer/hooks/hooks.py", "import numpy", "the seam of a foreign trainer"),
    ("core/telemetry/shm_ring.py", "import pydantic", "the seam of a foreign trainer"),
    (
        "trainer/adapters/reporter.py",
        "import pacekeeper.core.config.agent",
        "adapters of other trainers need torch only",
    ),
    ("simulator/__init__.py", "import torch", "torch in the trainer only"),
    ("trainer/adapters/huggingface.py", "import transformers", "other trainers are never imported"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the folders under the product's name, with the project's contracts."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            tmp_path / "pacekeeper" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "src" / "pacekeeper" / "__init__.py", tmp_path / "pacekeeper")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_a_planted_breach_of_each_contract_is_found(tree: Path) -> None:
    for path, line, _ in BREACHES:
        file = tree / "pacekeeper" / path
        file.write_text(f"{file.read_text()}\n{line}\n")
    # The copy must come before the editable install on the path, hence no -I here.
    code = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    broken = [row for row in done.stdout.splitlines() if " BROKEN" in row]
    for path, _, contract in BREACHES:
        assert any(row.startswith(contract) for row in broken), (path, done.stdout, done.stderr)
