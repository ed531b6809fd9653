"""What the hooks publish is what the agent reads: phase, time, and the signal of dumps."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pacekeeper.agent.rings.reader import open_ring
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.sign_of_life import (
    ENDED,
    PHASE_OF_NUMBER,
    SIGN,
    Phase,
    decode_sign,
)
from pacekeeper.trainer.hooks import contexts, hooks, ring_writer


def test_a_ring_without_signs_has_no_phase() -> None:
    sign = decode_sign(bytes(SIGN.size))
    assert (sign.phase, sign.since_mono_s, sign.dump_signal) == (None, 0.0, 0)
    assert set(PHASE_OF_NUMBER.values()) == set(Phase)
    assert ENDED not in PHASE_OF_NUMBER


@pytest.fixture
def phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Phase | None]:
    ticks = iter(range(1_000_000_000, 2_000_000_000, 1_000_000_000 // 100))
    monkeypatch.setattr(ring_writer, "monotonic_ns", lambda: next(ticks))

    def now() -> Phase | None:
        reader = open_ring(tmp_path / "job" / "rank-00001.ring", "job", 0.0)
        sign = reader.sign()
        reader.close()
        return sign.phase

    return now


def test_each_block_of_the_hooks_is_a_phase_and_its_end_restores_the_one_before(
    tmp_path: Path, phases: Callable[[], Phase | None]
) -> None:
    pace = hooks.attach(job="job", rank=1, world_size=2, ring_dir=str(tmp_path))
    seen = [phases()]
    with pace.loading():
        seen.append(phases())
    with pace.step(0):
        seen.append(phases())
        with pace.micro_batch_timer(tokens=1):
            seen.append(phases())
            with pace.waiting():
                seen.append(phases())
                with pace.waiting():
                    pass
            seen.append(phases())
        seen.append(phases())
        with pace.loading():
            seen.append(phases())
        seen.append(phases())
    seen.append(phases())
    with pace.saving(), pace.waiting():
        seen.append(phases())
    with pace.evaluating():
        seen.append(phases())
    seen.append(phases())
    p = Phase
    assert seen == [
        *(None, p.LOADING, p.STEPPING, p.COMPUTING, p.WAITING, p.COMPUTING, p.STEPPING),
        *(p.LOADING, p.STEPPING, p.OUTSIDE, p.WAITING, p.EVALUATING, p.OUTSIDE),
    ]
    pace.detach()
    assert phases() is None
    assert pace.ring.num_errors == 0


def test_a_wait_of_another_thread_is_no_phase(
    tmp_path: Path, phases: Callable[[], Phase | None]
) -> None:
    pace = hooks.attach(job="job", rank=1, world_size=2, ring_dir=str(tmp_path))
    pace.begin_step(0)
    with contexts.WaitOfThread(pace.ring, thread=-1):
        assert phases() is Phase.STEPPING
    with contexts.WaitOfThread(pace.ring, thread=threading.get_ident()):
        assert phases() is Phase.WAITING
    assert phases() is Phase.STEPPING


def test_the_header_leaves_room_for_the_sign() -> None:
    assert shm_ring.SIGN_OFFSET % 64 == 0
    assert shm_ring.SIGN_OFFSET + SIGN.size <= shm_ring.COMMAND_OFFSET
