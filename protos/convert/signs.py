"""Converts signs of life and dumps of stacks from messages to values; bad ones are refused.

`reports.py` calls it for each job of a report. Messages are made by `plain.message_of`.
"""

import math
from collections.abc import Iterable, Iterator

from pacekeeper.core.telemetry.records import MAX_S
from pacekeeper.core.telemetry.sign_of_life import MAX_STACK_BYTES, Phase, RankPhase, RankStack
from pacekeeper.core.text import one_line
from pacekeeper.protos import telemetry_pb2

MAX_STACKS = 64  # of one job in one report; further ones are dropped
_MAX_LINES = 1000
_KNOWN = frozenset(phase.value for phase in Phase)


def phases_from_messages(
    messages: Iterable[telemetry_pb2.RankPhase], job: str
) -> Iterator[RankPhase]:
    """Return the phases that this version knows. Raises ValueError for impossible times."""
    for message in messages:
        if message.phase not in _KNOWN:
            continue
        usual_s = message.usual_s if message.HasField("usual_s") else None
        cpu_ratio = message.cpu_ratio if message.HasField("cpu_ratio") else None
        for name, value in (
            ("held_s", message.held_s),
            ("usual_s", usual_s),
            ("cpu_ratio", cpu_ratio),
        ):
            if value is not None and not (math.isfinite(value) and 0.0 <= value <= MAX_S):
                raise ValueError(f"{job} phases: impossible {name} {value}")
        yield RankPhase(
            rank=message.rank,
            phase=Phase(message.phase),
            held_s=message.held_s,
            usual_s=usual_s,
            is_standing=message.is_standing,
            process_state=one_line(message.process_state, 1),
            kernel_wait=one_line(message.kernel_wait, 64),
            cpu_ratio=cpu_ratio,
        )


def stack_from_message(message: telemetry_pb2.RankStack) -> RankStack:
    """Return a dump, cut to its size, with printable lines only."""
    lines = message.text[:MAX_STACK_BYTES].splitlines()[:_MAX_LINES]
    return RankStack(
        rank=message.rank,
        source=one_line(message.source, 32),
        text="\n".join(
            line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines
        ),
    )
