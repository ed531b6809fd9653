"""Signs of life: what each rank does now and since when, and the stack of one that stands still.

A rank stores eight bytes in its ring whenever it enters another phase; its node's agent reads them
at every poll, whether or not records arrive. `RankPhase` and `RankStack` are what the agent reports
of ranks that stand still.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Phases as numbers, which hooks store at the cost of an integer. Never reused.
UNKNOWN: Final = 0  # the rank's hooks do not say
COMPUTING: Final = 1  # in a micro-batch
WAITING: Final = 2  # for other ranks, in a collective or a message
LOADING: Final = 3  # input
SAVING: Final = 4  # a checkpoint
EVALUATING: Final = 5
STEPPING: Final = 6  # in a step, outside of micro-batches: gradients, optimizer
OUTSIDE: Final = 7  # of steps, and of all of the above
ENDED: Final = 8  # detached
MOVING: Final = 9  # state between ranks, or from a checkpoint

# The kernel's letters for the state of a process, proc(5).
STOPPED: Final = frozenset("Tt")  # by a signal, or by a tracer
UNINTERRUPTIBLE: Final = "D"
RUNNABLE: Final = "R"  # on a core, or waiting for one

PHASE_BITS: Final = 4
SIGN = struct.Struct("<QI")  # (monotonic nanoseconds << PHASE_BITS | phase), signal of a stack dump


class Phase(StrEnum):
    """The activity of a rank; the value is its name in reports."""

    COMPUTING = "computing"
    WAITING = "waiting"
    LOADING = "loading"
    SAVING = "saving"
    EVALUATING = "evaluating"
    STEPPING = "stepping"
    OUTSIDE = "outside"
    MOVING = "moving"


PHASE_OF_NUMBER = {
    COMPUTING: Phase.COMPUTING,
    WAITING: Phase.WAITING,
    LOADING: Phase.LOADING,
    SAVING: Phase.SAVING,
    EVALUATING: Phase.EVALUATING,
    STEPPING: Phase.STEPPING,
    OUTSIDE: Phase.OUTSIDE,
    MOVING: Phase.MOVING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOfLife:
    """The phase of a rank, since when, and the signal on which its process dumps its stacks.

    Attributes:
        phase: None: the rank does not say, or has detached.
        since_mono_s: Monotonic clock of its node.
        dump_signal: 0: none.
    """

    phase: Phase | None
    since_mono_s: float
    dump_signal: int


def decode_sign(area: bytes) -> SignOfLife:
    """Return the sign of life in a ring's header; `area` has the size of SIGN."""
    word, dump_signal = SIGN.unpack(area)
    number = word & ((1 << PHASE_BITS) - 1)
    return SignOfLife(
        phase=PHASE_OF_NUMBER.get(number),
        since_mono_s=(word >> PHASE_BITS) * 1e-9,
        dump_signal=dump_signal,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhase:
    """A rank that stands still in its phase, or that has moved on after it did.

    Attributes:
        held_s: For how long it is in this phase, at the time of the report.
        usual_s: How long it usually is; None: not known yet, as in its first steps.
        is_standing: False: it was reported as standing still and moves again.
        process_state: The kernel's letter for its process (T: stopped, D: uninterruptible sleep);
            empty: the agent cannot see the process.
        kernel_wait: The kernel function in which it sleeps; empty: not readable.
        cpu_ratio: CPU time of the process over wall time while it stands still; None: not measured.
    """

    rank: int
    phase: Phase
    held_s: float
    usual_s: float | None = None
    is_standing: bool = True
    process_state: str = ""
    kernel_wait: str = ""
    cpu_ratio: float | None = None


MAX_STACK_BYTES = 16 * 1024  # of one rank's dump


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """A dump of the stacks of one rank's process.

    Attributes:
        source: What made the dump: "faulthandler", "py-spy", or "kernel" (its own stack only);
            empty: there is none.
        text: The dump, at most MAX_STACK_BYTES; without a dump, why there is none.
    """

    rank: int
    source: str
    text: str
