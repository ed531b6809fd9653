"""All that can be said of a recorded run: every judge, each on the tables that it can use. Pure."""

from pacekeeper.predictor.late_ranks import late_ranks
from pacekeeper.predictor.trace import Trace
from pacekeeper.predictor.verdict import Trouble, Verdict


def judge(trace: Trace) -> Verdict:
    """Findings, the worst first, and what they cost."""
    troubles: list[Trouble] = list(late_ranks(trace))
    troubles.sort(key=lambda t: (-t.slowdown, t.rank if t.rank is not None else -1))
    return Verdict(troubles=tuple(troubles), what_if=None, notes=trace.notes)
