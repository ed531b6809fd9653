"""Small values of the vocabulary: errors with a remedy, reasons, names that become files."""

from dataclasses import FrozenInstanceError, replace

import pytest

from pacekeeper.core import errors
from pacekeeper.core.errors import ExitCode, PacekeeperError
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape, is_job_name
from pacekeeper.core.telemetry.record_codec import pack, unpack
from pacekeeper.core.telemetry.records import LOADS_PER_RECORD, ExpertLoadRecord

SHAPE = ModelShape(
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    rows_per_step=8,
    slots_per_rank=4,
    expert_bytes=100,
    dense_bytes=1000,
)
FINDING = Finding(
    kind=FindingKind.DEVICE,
    tier=Tier.PROBABLE,
    rank=3,
    slowdown=1.6,
    onset_step=40,
    step=42,
    reason="slower than its peers",
)


def test_a_failure_says_what_happened_and_what_to_do() -> None:
    assert str(PacekeeperError("the port is taken")) == "the port is taken"
    error = PacekeeperError("the port is taken", remedy="use --listen")
    assert (str(error), error.what) == ("the port is taken; use --listen", "the port is taken")


def test_every_failure_has_an_exit_code_of_its_own() -> None:
    children = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, PacekeeperError)
    ]
    codes = [child.exit_code for child in children]
    assert len(set(codes)) == len(codes) > 1
    assert ExitCode.OK not in codes and ExitCode.USAGE not in codes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"rows_per_step": 0}, "rows_per_step must be at least 1, got 0"),
        ({"num_experts": -1}, "num_experts must not be negative"),
        ({"expert_bytes": -1}, "expert_bytes must not be negative"),
    ],
)
def test_an_impossible_model_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SHAPE, **change)  # type: ignore[arg-type]  # counts only


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_its_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not in a world of 4"):
        Attachment(job="j", rank=rank, world_size=4, pid=1)


@pytest.mark.parametrize("name", ["a", "run-7_b.2", "x" * 64, "7"])
def test_names_that_may_be_a_directory(name: str) -> None:
    assert is_job_name(name)
    assert Attachment(job=name, rank=0, world_size=1, pid=1).job == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 65, "a\n", "\u00fc", "a\0"]
)
def test_names_that_may_not(name: str) -> None:
    assert not is_job_name(name)
    with pytest.raises(ValueError, match="job name"):
        Attachment(job=name, rank=0, world_size=1, pid=1)


def test_a_record_holds_some_loads_and_one_of_a_ring_no_more_than_there_is_room() -> None:
    def loads(number: int) -> ExpertLoadRecord:
        counts = (1,) * number
        return ExpertLoadRecord(
            rank=0, step=0, generation=1, layer=0, first_expert=0, counts=counts
        )

    with pytest.raises(ValueError, match="at least one load"):
        loads(0)
    assert unpack(pack(loads(LOADS_PER_RECORD))) == loads(LOADS_PER_RECORD)
    with pytest.raises(ValueError, match="1 to 16 loads"):
        pack(loads(LOADS_PER_RECORD + 1))


def test_an_incident_is_open_until_it_is_closed() -> None:
    incident = Incident(incident_id=1, job="j", finding=FINDING, opened_unix_s=5.0)
    assert incident.is_open
    assert not replace(incident, closed_unix_s=9.0).is_open


def test_facts_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FINDING.slowdown = 1.0  # type: ignore[misc]


def test_file_names_sort_as_their_numbers_do() -> None:
    for name in (shm_ring.ring_file_name, shm_ring.plan_file_name, shm_ring.layout_file_name):
        names = [name(number) for number in (0, 2, 10, 99, 4096)]
        assert names == sorted(names)
        assert len(set(names)) == len(names)
