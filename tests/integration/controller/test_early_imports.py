"""What the controller loads beside its loop is all that the first fit and thresholds need."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
LATE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pacekeeper.controller.app.controller import preload_numerics
from pacekeeper.predictor.cost.model import fit
from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.detector.thresholds import StepNoise, thresholds
from support.synthetic_job import SyntheticJob
job = SyntheticJob(num_ranks=4, seed=1)
samples = [job.next() for _ in range(30)]
if sys.argv[1] == "early":
    preload_numerics()
before = set(sys.modules)
noise = StepNoise(sigma=fit(samples).sigma, freedom=9.0)
thresholds(1.0, samples, noise=noise, excursions=Excursions())
late = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(late & {{"scipy"}}))
"""


@pytest.mark.parametrize(("when", "late"), [("early", "[]"), ("never", "['scipy']")])
def test_nothing_heavy_is_left_to_import_in_the_loop(when: str, late: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, when], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == late
