"""Step logs of ranks on emulated devices, of which the demo's figures are made."""

from pathlib import Path

import pytest

from support.engine_jobs import small_job
from support.fleet import Fleet
from support.sabotage import Moment, Sabotage

pytest.importorskip("transformers")

STEP_S, REDONE = 0.05, 4


def test_a_step_that_was_done_again_says_so_and_has_the_device_time_of_once(tmp_path: Path) -> None:
    config = small_job(
        tmp_path,
        replicas=2,
        rows_per_microbatch=8,
        emulate=True,
        emulated_step_s=STEP_S,
        emulated_noise=False,
    )
    body = Sabotage(moment=Moment.IN_STEP_BEFORE_VOTE, victims=(3,), step=REDONE)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0]
        for rank in range(3):
            steps = fleet.steps(rank)
            assert [line["step"] for line in steps if line["is_redone"]] == [REDONE]
            spent = [line["compute_s"] / STEP_S for line in steps]
            assert min(spent) > 0.7 and max(spent) < 1.7
            overruns = [line["overrun_s"] for line in steps]
            assert overruns == sorted(overruns) and overruns[0] >= 0.0
