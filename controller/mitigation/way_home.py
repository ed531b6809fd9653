"""The layout from before the first open finding: when all is over the job goes back to it. Pure."""

from dataclasses import replace

from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.layout.layout import Layout


def all_is_over(job: JobState) -> JobState:
    """The last finding closed: without a way home, the layout made for it is a makeshift."""
    home, layout = job.home, job.layout
    if home is None:
        return replace(job, is_makeshift=True)
    is_there = layout is not None and is_same_work(home, layout)
    return replace(job, home=None if is_there else home)


def is_same_work(one: Layout, other: Layout) -> bool:
    """Do both give every rank the same blocks and shares, whatever their generations?"""
    return (one.stages, one.experts, one.batch_shares) == (
        other.stages,
        other.experts,
        other.batch_shares,
    )


def is_of_others(home: Layout | None, layout: Layout) -> bool:
    """Would going home leave ranks out that joined since?"""
    return home is not None and home.ranks != layout.ranks
