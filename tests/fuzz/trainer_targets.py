"""What is fuzzed of a trainer's meetings: what launchers and ranks write into each other's stores.

Whoever reaches a store may write there; garble must end in words, never in a traceback or a hang.
"""

import json
from collections.abc import Callable
from dataclasses import replace

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, DeniedError, LostStateError, VersionError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.elastic import rendezvous
from pacekeeper.trainer.elastic.agreement import kv_store, messages
from pacekeeper.trainer.elastic.agreement.job_key import JobKey
from pacekeeper.trainer.elastic.agreement.messages import (
    Candidate,
    JobFacts,
    Report,
    read_verdict,
    write_verdict,
)
from pacekeeper.trainer.elastic.agreement.quorum import Group, decide_quorum
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from pacekeeper.trainer.elastic.joining.node_join import numbers_taken
from pacekeeper.trainer.elastic.rendezvous import Place, Session
from pacekeeper.trainer.elastic.restart_policy import parse_ends, parse_next

Stated = tuple[type[Exception], ...]
FIRST = Group.first(1, (0, 1, 2))
KEY = JobKey(b"the secret of a job")
TERMS = {"job": "moe", "steps": 7, "settings": {"seed": 0, "experts": [1, 2]}}


def regroup_targets() -> dict[str, tuple[Callable[[bytes], object], Stated]]:
    """By name: what runs a case, and the errors it states."""
    return {
        "regroup-job": (_job, (VersionError,)),
        "regroup-admission": (_admission, (VersionError, LostStateError)),
        "regroup-verdict": (_verdict, (VersionError, LostStateError)),
        "regroup-report": (lambda data: Report.decode(_text(data)), (VersionError,)),
        "regroup-notices": (_notices, ()),
        "regroup-terms": (_terms, (ConfigError, VersionError)),
        "regroup-ends": (lambda data: parse_ends(_text(data)), ()),
        "regroup-next": (lambda data: parse_next(_text(data)), (VersionError,)),
        "regroup-session": (lambda data: Session.decode(_text(data)).addresses, (VersionError,)),
        "regroup-signed": (lambda data: KEY.verify("deaths", data), (DeniedError,)),
        "regroup-numbers": (lambda data: numbers_taken(_text(data)), (VersionError,)),
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _job(data: bytes) -> object:
    """The facts of a job, and what a launcher that joins asks of them."""
    facts = JobFacts.decode(_text(data))
    return facts.leader_node, max(facts.node_of), facts.config.job, facts.encode()


def _admission(data: bytes) -> object:
    group, said, facts = messages.decode_admission(_text(data))
    return read_verdict(group, said), facts.leader_node


def _verdict(data: bytes) -> object:
    verdict = read_verdict(FIRST, _text(data))
    return verdict.members, verdict.group.standing(), sorted(verdict.commits)


def _notices(data: bytes) -> object:
    """What is told of the dead, and whether the others may go on then."""
    deaths = kv_store.parse_notices(_text(data))
    return decide_quorum(FIRST, {0, 1}, deaths)


def _terms(data: bytes) -> object:
    rendezvous.check_terms("h:1", _text(data), json.dumps(TERMS))
    return TERMS


def regroup_seeds(layout: Layout) -> dict[str, tuple[bytes, ...]]:
    """Valid inputs."""
    facts = JobFacts(
        run_id=7, first_run_id=7, generation=1, config=EngineConfig(job="moe"), world_size=2,
        addresses=("h:1", ""), node_of={0: 0, 1: 1}, members=(0, 1), data_crc=9,
    )  # fmt: skip
    progress = Progress(ticket=3, phase=Phase.VOTE)
    report = Report(progress=progress, newest_generation=2, last_loss=1.5, step=3)
    chosen = RecoveryPlan(layout=replace(layout, generation=2))
    plain = write_verdict(chosen, commits=(0,), furthest=report, newcomers=(), base=None)
    one = Candidate(node=2, address="h:3", ranks=(2,))
    joined = write_verdict(chosen, commits=(), furthest=report, newcomers=(one,), base=layout)
    admission = messages.encode_admission(FIRST, joined, facts)
    session = Session(run_id=7, device="cpu", places=(Place(address="h:1", nonce=3),))
    told = {
        "regroup-job": (facts.encode(),),
        "regroup-admission": (admission,),
        "regroup-verdict": (plain, joined),
        "regroup-report": (report.encode(), replace(report, was_silence=True).encode()),
        "regroup-notices": (kv_store.notice(2, "first") + kv_store.notice(1, "2-0badcafe"), ""),
        "regroup-terms": (json.dumps(TERMS),),
        "regroup-ends": ("0@1,2@137,", ""),
        "regroup-next": ("0,2,3", "0"),
        "regroup-session": (session.encode(),),
        "regroup-numbers": ("4 17 1772000000",),
    }
    signed = tuple(KEY.sign("deaths", text.encode()) for text in ("2@first,", "1@first,"))
    return {
        "regroup-signed": (*signed, b"".join(signed)),
        **{name: tuple(text.encode() for text in texts) for name, texts in told.items()},
    }
