"""What a failed rank tells its launcher: the cause, or that it follows from another's."""

import pytest
from torch.distributed import DistBackendError

from pacekeeper.core.errors import DataError, ExitCode
from pacekeeper.trainer.engine.launcher import failure_report
from pacekeeper.trainer.groups.agreement import OtherRanksError

RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "code", "is_echo", "has_trace"),
    [
        (DataError("no tokens", remedy="add some"), ExitCode.DATA, False, False),
        (OtherRanksError("rank 3"), ExitCode.CONFIG, True, False),
        (RuntimeError(RESET), ExitCode.UNREACHABLE, True, False),
        (DistBackendError("NCCL"), ExitCode.UNREACHABLE, True, False),
        (RuntimeError("CUDA out of memory"), ExitCode.INTERNAL, False, True),
        (ZeroDivisionError(), ExitCode.INTERNAL, False, True),
    ],
)
def test_causes_and_echoes(
    error: Exception, code: ExitCode, is_echo: bool, has_trace: bool
) -> None:
    try:
        raise error
    except Exception as caught:
        found, said = failure_report(caught, "2")
    assert found == code and said["what"]
    assert bool(said.get("is_echo")) is is_echo
    assert bool(said.get("trace")) is has_trace
