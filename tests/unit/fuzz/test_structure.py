"""Damage to what bytes mean arrives where it is meant to; new ways and sums are kept."""

import json
from pathlib import Path
from random import Random

import pytest
from google.protobuf.message import DecodeError

from fuzz import coverage, structure, tally
from fuzz.coverage import HOME, Ways
from fuzz.mutations import MAX_CASE_BYTES, damaged
from fuzz.run import HEAD_BYTES, Spool, fuzz
from fuzz.seeds import seeds
from fuzz.targets import Target
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.protos import control_pb2

SEEDS = seeds()
REPORTS = SEEDS["protocol-report"]


def test_a_damaged_message_is_a_message_still() -> None:
    random, changed, whole = Random(1), set[bytes](), 0
    for _ in range(300):
        case = structure.message(REPORTS[0], REPORTS, random)
        changed.add(case)
        try:
            control_pb2.AttachRequest.FromString(case)
        except DecodeError:
            continue
        whole += 1
    assert len(changed) > 150
    assert whole > 200


def test_damage_reaches_the_depth_of_a_message() -> None:
    """A process of a device of a report: three lengths lie around it."""
    random = Random(2)
    before = control_pb2.AttachRequest.FromString(REPORTS[0]).report.devices[0].processes
    for _ in range(4000):
        case = structure.message(REPORTS[0], REPORTS, random)
        try:
            devices = control_pb2.AttachRequest.FromString(case).report.devices
        except DecodeError:
            continue
        is_whole = len(devices) == 1 and devices[0].device_uuid == "GPU-0"
        if is_whole and devices[0].processes != before:
            return
    raise AssertionError("never")


def test_a_first_byte_that_says_which_method_stays() -> None:
    seed = SEEDS["service-operator"][0]
    random = Random(3)
    cases = [structure.message(seed, SEEDS["service-operator"], random) for _ in range(50)]
    assert {case[:1] for case in cases} == {seed[:1]}


@pytest.mark.parametrize("name", ["layout", "plan-replicas", "history-faults"])
def test_a_damaged_document_is_a_document_still(name: str) -> None:
    random, seed = Random(4), SEEDS[name][0]
    cases = {structure.document(seed, (), random) for _ in range(200)}
    assert len(cases) > 100
    for case in cases:
        json.loads(case)


def test_the_length_before_a_document_fits_again() -> None:
    random = Random(5)
    for _ in range(100):
        case = structure.document(SEEDS["tensor-header"][0], (), random)
        size = int.from_bytes(case[:8], "little")
        json.loads(case[8 : 8 + size])


def test_what_is_packed_is_damaged_inside() -> None:
    packed = structure.deflated(b"time,value\n1,2\n")
    random = Random(6)
    inner = [structure.inflated(damaged((packed,), random)) for _ in range(60)]
    assert sum(1 for one in inner if one not in (b"", b"time,value\n1,2\n")) > 20


def test_lines_and_cells_change_and_nothing_else() -> None:
    table = b"a,b\n1,2\n3,4"
    random = Random(7)
    for change in (structure.lines, structure.cells):
        found = {change(table, (table,), random) for _ in range(200)}
        assert len(found) > 8
        parts = {cell for one in found for row in one.split(b"\n") for cell in row.split(b",")}
        assert parts <= {b"", b"a", b"b", b"1", b"2", b"3", b"4"}


def test_a_new_way_through_our_code_is_told_once() -> None:
    ways, good = Ways(), SEEDS["layout"][0]
    assert ways.run(lambda: decode_layout(good))[1]
    assert not ways.run(lambda: decode_layout(good))[1]

    def refused() -> str:
        with pytest.raises(ValueError, match="format"):
            decode_layout(good.replace(b'"format":2', b'"format":7'))
        return "refused"

    assert ways.run(refused) == ("refused", True)
    assert f"{HOME}/core/layout/codec.py" in ways.files


def test_a_bug_behind_three_doors_is_found_by_what_opened_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blind damage would have to open all at once, one time in millions; no word tells of one."""
    monkeypatch.setattr(coverage, "HOME", __file__)

    def run(data: bytes) -> object:
        if data[:1] == b"p":
            if data[1:2] == b"k":
                if data[2:3] == b"q":
                    raise KeyError("planted")
                return None
            return None
        return None

    path = tmp_path / "spool"
    path.write_bytes(bytes(HEAD_BYTES + MAX_CASE_BYTES))
    target = Target(name="planted", run=run, stated=(ValueError,))
    result = fuzz(target, (b"abcd",), 60.0, Random(1), Spool(path), most_found=1)
    assert [one["what"] for one in result["found"]] == ["KeyError: 'planted'"]
    assert result["cases"] < 1_000_000


def _result(minutes: float, *found: str) -> dict[str, object]:
    return {
        "cpu_minutes": minutes, "minutes": 2 * minutes, "cases": 100, "ways": 7,
        "files": ["core/telemetry/shm_ring.py"], "found": [{"what": what} for what in found],
    }  # fmt: skip


def test_runs_are_summed_up_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "tally.json"
    tally.Tally(path).add("ring-slot", _result(1.5))
    tally.Tally(path).add("ring-slot", _result(2.0, "a hang"))
    row = tally.Tally(path).of("ring-slot")
    assert (row["cpu_minutes"], row["cases"], row["runs"]) == (3.5, 200, 2)
    assert row["found"] == ["a hang"]
    assert "3.5" in tally.Tally(path).table(["ring-slot"])


def test_time_on_other_code_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tally.json"
    tally.Tally(path).add("ring-slot", _result(1.5, "a hang"))
    monkeypatch.setattr(tally, "digest", lambda files: "other")
    earlier = {"earlier_cpu_minutes": 1.5, "earlier_cases": 100}
    assert tally.Tally(path).of("ring-slot") == tally.EMPTY | earlier
    row = tally.Tally(path).add("ring-slot", _result(2.0))
    assert (row["cpu_minutes"], row["earlier_cpu_minutes"]) == (2.0, 1.5)
