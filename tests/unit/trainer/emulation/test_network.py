"""Transfers are added up by step; emulated ones take the modelled time of their bytes."""

import time

import pytest

from pacekeeper.core.kernel_laws.noise import NO_NOISE
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.emulation.network import EmulatedLinks


def links(slowdown: float = 1.0) -> EmulatedLinks:
    made = EngineDevice.seeded(0, NO_NOISE).links
    made.bytes_per_s, made.slowdown = 1e6, slowdown
    return made


def test_transfers_of_a_step_add_up_and_the_next_step_begins_at_nothing() -> None:
    one = links()
    one.end(one.begin(), 1_000)
    one.end(one.begin(), 2_000)
    assert list(one.take()) == pytest.approx([0.003, 3_000])
    assert one.take() == (None, 0)


def test_a_slow_link_takes_and_reports_longer_for_the_same_bytes() -> None:
    one = links(slowdown=5.0)
    began_s = one.begin()
    one.end(began_s, 2_000)
    assert time.perf_counter() - began_s >= 0.01
    assert list(one.take()) == pytest.approx([0.01, 2_000])
