"""What all ranks of a job share, its pace or its input: incidents of no rank. Pure.

They accuse no device, and no layout makes everybody faster: the planner does not follow them.
"""

from pacekeeper.controller.detection import incidents, lasting
from pacekeeper.controller.state_machine.events import Command
from pacekeeper.controller.state_machine.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.online.global_slowdown import PaceNews


def follow_pace(
    state: State,
    job: JobState,
    news: PaceNews,
    config: ControllerConfig,
    unix_s: float,
    *,
    kind: FindingKind = FindingKind.HOST,
    over: str = "all ranks are back at their expected time",
) -> tuple[State, JobState, list[Command]]:
    """Open, close or re-measure the incident of all ranks together.

    `kind`: of the news; `over`: why it is closed, where the news do not say.
    """
    commands = list[Command]()
    if news.found is not None:
        state, job, said = incidents.open_incident(state, job, news.found, unix_s)
        commands += said
    if news.is_over:
        long = lasting.lasted(job, None, kind, config.policy.horizon_steps)
        why = news.why or f"{over} {long}".strip()
        job, said = incidents.close(job, {None}, kind, unix_s, why)
        commands += said
    if news.changed is not None:
        job, said = incidents.remeasure(job, None, kind, news.changed)
        commands += said
    return state, job, commands
