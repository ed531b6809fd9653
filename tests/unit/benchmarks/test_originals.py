"""The bench for others' own code: it drives what stands where theirs would, and skips what is not.

What stands here is made up, in the shape of their interfaces: a report generator that scores each
rank by the least median of all, and a script that writes its result as JSON.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.originals import PACKAGE, analysed, nvrx_at, nvrx_reports, read_by_us

GENERATOR = """
from enum import Enum
from types import SimpleNamespace
import torch
from . import dist_utils
Statistic = Enum("Statistic", "MED AVG NUM")

class ReportGenerator:
    def __init__(self, scores, gather_on_rank0, node_name):
        self.best = float("inf")

    def generate_report(self, sections, kernels):
        own = sections["compute"][Statistic.MED]
        least = torch.tensor([own])
        dist_utils.all_reduce(least, op="min", group=None)
        self.best = min(self.best, own)
        rank = SimpleNamespace(rank=dist_utils.get_rank(None))
        found = {
            "straggler_sections_relative": {"compute": [rank]} if least.item() / own < 0.75 else {},
            "straggler_sections_individual": {"compute": [rank]} if self.best / own < 0.75 else {},
        }
        return SimpleNamespace(identify_stragglers=lambda: found)
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / PACKAGE / "straggler"
    folder.mkdir(parents=True)
    (folder / "reporting.py").write_text(GENERATOR)
    (folder / "dist_utils.py").write_text("def all_reduce(): ...\ndef get_rank(group): return 0\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_each_report_is_that_of_all_ranks_and_fits_our_reading(wheel: Path) -> None:
    reporting = nvrx_at(wheel)
    assert reporting is not None
    times_s = np.full((40, 4), 0.1)
    times_s[20:, 2] *= 1.5
    named = nvrx_reports(reporting, times_s, 10)
    assert named == [(set(), set()), (set(), set()), ({2}, {2}), ({2}, {2})]
    assert named == read_by_us(times_s, [0, 0, 0, 0])


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert nvrx_at(tmp_path) is None


def test_an_analysis_is_run_and_one_that_fails_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "analyzer" / "wia.py"
    script.parent.mkdir()
    script.write_text(
        "import json, sys\n"
        "folder = sys.argv[sys.argv.index('--dump-dir') + 1]\n"
        "json.dump({'argv': sys.argv[1:]}, open(f'{folder}/X.json', 'w'))\n"
    )
    found = analysed(tmp_path, None, tmp_path / "data", "X")
    assert found is not None and str(tmp_path / "data" / "trace-X.parquet") in found["argv"]
    script.write_text("raise SystemExit('no such trace')\n")
    assert analysed(tmp_path, None, tmp_path / "data", "X") is None
    assert "no such trace" in capsys.readouterr().out
