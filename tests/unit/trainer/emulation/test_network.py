"""Transfers are added up by step; emulated ones take and tell the modelled time of their bytes."""

import time

import pytest

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.emulation.faults import LINK_FAULT, Slowable
from pacekeeper.trainer.emulation.network import LINK_SHARE, EmulatedLinks
from pacekeeper.trainer.hooks.compute_timers import TransferTimer
from pacekeeper.trainer.toy.engine.clock_factory import make_transfers


def links(slowdown: float = 1.0) -> EmulatedLinks:
    return EmulatedLinks(bytes_per_s=1e6, jitter=0.0, seed=0, slowdown=slowdown)


def test_transfers_of_a_step_add_up_and_the_next_step_begins_at_nothing() -> None:
    clock = links()
    clock.add(1_000, time.perf_counter())
    clock.add(2_000, time.perf_counter())
    assert list(clock.take()) == pytest.approx([0.003, 3_000])
    assert clock.take() == (None, 0)


def test_a_slow_link_takes_and_tells_longer_for_the_same_bytes() -> None:
    clock, began_s = links(slowdown=5.0), time.perf_counter()
    clock.add(2_000, began_s)
    assert time.perf_counter() - began_s >= 0.01
    assert list(clock.take()) == pytest.approx([0.01, 2_000])


def test_a_real_clock_tells_what_passed() -> None:
    clock = TransferTimer()
    clock.add(10, time.perf_counter() - 2.0)
    seconds, moved = clock.take()
    assert seconds is not None and seconds >= 2.0
    assert moved == 10


def test_an_even_share_takes_its_part_of_a_step() -> None:
    config = TrainConfig()
    made = EmulatedLinks.calibrated(config, 4, seed=1)
    rows = config.rows_per_step * config.row_tokens * config.experts_per_token // 4
    moved = 2 * rows * config.num_layers * config.hidden_size * 4
    assert moved / made.bytes_per_s == pytest.approx(LINK_SHARE * config.emulated_step_s)


@pytest.mark.parametrize(
    ("clock", "kind"), [("emulated", EmulatedLinks), ("device", TransferTimer)]
)
def test_transfers_are_timed_by_what_the_clock_emulates_or_by_wall_time(
    clock: str, kind: type[TransferTimer]
) -> None:
    config = TrainConfig(clock=clock)
    targets: dict[str, Slowable] = {LINK_FAULT: links()} if clock == "emulated" else {}
    assert type(make_transfers(config, targets)) is kind


def test_on_shared_cores_no_transfer_is_timed() -> None:
    assert make_transfers(TrainConfig(clock="cpu"), {}) is None
