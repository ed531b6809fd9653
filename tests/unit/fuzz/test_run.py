"""The fuzzer knows every parser a valid input, sees what must not be, and always makes the same."""

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fuzz import run as fuzz_parsers
from fuzz.mutations import MAX_CASE_BYTES, damaged
from fuzz.run import HEAD_BYTES, Spool, fuzz, verdict
from fuzz.seeds import seeds
from fuzz.targets import Target, targets

SEEDS = seeds()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    path = tmp_path / "spool"
    path.write_bytes(bytes(HEAD_BYTES + MAX_CASE_BYTES))
    return Spool(path)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Where a case takes too long, as in the benchmark."""

    def too_slow(_number: int, _frame: object) -> None:
        raise fuzz_parsers.SlowError

    before = signal.signal(signal.SIGPROF, too_slow)
    yield
    signal.signal(signal.SIGPROF, before)


def test_every_parser_has_valid_inputs_and_takes_one_of_them(tmp_path: Path) -> None:
    found = targets(tmp_path)
    assert set(found) == set(SEEDS)
    for name, target in found.items():
        words = [verdict(target, seed)[0] for seed in SEEDS[name]]
        assert "accepted" in words, f"{name}: {words}"
        if name not in fuzz_parsers.MIXED:
            assert set(words) == {"accepted"}, f"{name}: {words}"


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_a_little_damage_brings_the_stated_error_or_a_value(
    name: str, tmp_path: Path, spool: Spool
) -> None:
    random, target = Random(name), targets(tmp_path)[name]
    for _ in range(60):
        case = damaged(SEEDS[name], random)
        words, may_be = verdict(target, case)
        assert may_be, f"{words}: {case!r:.300}"


def test_damage_is_bounded_and_the_same_for_the_same_seed() -> None:
    first, again = Random(3), Random(3)
    for _ in range(300):
        case = damaged(SEEDS["config"], first)
        assert len(case) <= MAX_CASE_BYTES
        assert case == damaged(SEEDS["config"], again)


def test_another_error_is_found_once_with_its_case(spool: Spool) -> None:
    def run(data: bytes) -> object:
        if b"\x00" in data:
            raise KeyError("planted")
        return None

    target = Target(name="planted", run=run, stated=(ValueError,))
    (found,) = fuzz(target, (b"abc",), 0.3, Random(1), spool)["found"]
    assert "KeyError" in found["what"] and b"\x00" in bytes.fromhex(found["case"])


def test_a_case_without_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_parsers, "CPU_S", 0.05)

    def run(data: bytes) -> object:
        while True:
            pass

    target = Target(name="planted", run=run, stated=(Exception,))
    assert verdict(target, b"") == ("more than 0.05 s", False)


def test_the_case_under_way_can_be_read_by_others(spool: Spool) -> None:
    spool.put(7, b"case")
    assert spool.get() == (7, b"case")
