"""Jobs of benchmarks/gpu in small on a CPU: one that resumes, and ranks that are struck."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import jobs
from benchmarks.gpu.common import TINY

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(900)


def test_a_job_of_one_rank_goes_on_from_its_checkpoint() -> None:
    found = jobs.launch_one_rank(CPU, TINY)
    assert found.resumed_at == found.steps == TINY.steps
    assert found.last_loss < found.first_loss


@pytest.mark.stress  # as tests of the engine's survival do, with three more starts
def test_struck_ranks_leave_the_losses_as_they_are() -> None:
    found = jobs.survive(CPU, TINY)
    assert found.ranks == 2 and found.loss_apart < 1e-2
