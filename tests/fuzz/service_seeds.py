"""Valid inputs of the services and of what a node reads: one of each kind at least."""

import json
import zlib
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.service_targets import ACTS, QUESTIONS
from pacekeeper.agent.nvml.fields import ENTRY, keys
from pacekeeper.cli.admin import ca
from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import PREFIX, TokenRecord, encode_tokens, secret_digest
from pacekeeper.controller.observability.timeline import (
    IncidentRow,
    IncidentTimeline,
    JobRow,
    Note,
    PlanNote,
)
from pacekeeper.controller.observability.timeline_codec import (
    encode_incident_timeline,
    encode_job_timeline,
)
from pacekeeper.core.incidents import node_health
from pacekeeper.core.incidents.findings import ConsideredLayout, MitigationLevel
from pacekeeper.core.incidents.node_health import Fitness, NodeHealth
from pacekeeper.protos import operator_pb2, status_pb2
from pacekeeper.trainer.elastic.agreement.messages import Candidate, encode_asking

PROC = b"""0.5 0.4 0.3 1/100 7
MemTotal:       16 kB
MemAvailable:    8 kB
pswpin 7
pswpout 8
some avg10=1.53 avg60=1.0 avg300=0.5 total=7
full avg10=0.53 avg60=1.0 avg300=0.5 total=7
eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
Tcp: RtoAlgorithm OutSegs RetransSegs
Tcp: 1 200 3
"""
FORM = "application/x-www-form-urlencoded"


def service_seeds() -> dict[str, tuple[bytes, ...]]:
    """By the name of the parser."""
    course, pace = encode_incident_timeline(_course()), encode_job_timeline(_pace())
    return {
        "course": (course,),
        "course-repacked": (zlib.decompress(course),),
        "pace-repacked": (zlib.decompress(pace),),
        "node-verdict": (_verdict(),),
        "token-shown": (_tokens(),),
        "identity": (
            b"spiffe://pacekeeper/node/n-1",
            b"\n\nn-1.example",
            b"spiffe://pacekeeper/operator/a",
        ),
        "service-status": _questions(),
        "service-operator": _acts(),
        "web": _pages(),
        "certificate": (_certificate(),),
        "nvml-fields": (_nvml(),),
        "host-proc": (PROC,),
        "terms": (b"7",),
        "join-asking": (encode_asking(Candidate(node=1, address="h:1", ranks=(2, 3)), 4).encode(),),
        "plan-replicas": (b'{"replicas": [[[{"device": 0}, {"device": 1}], [{"device": 2}]]]}',),
        "plan-partition": (_partition(),),
    }


def _course() -> IncidentTimeline:
    considered = ConsideredLayout(
        level=next(iter(MitigationLevel)),
        planned_step_s=0.9,
        cost_s=1.0,
        moved_bytes=64,
        why_not="dear",
    )
    plan = PlanNote(
        step=4, unix_s=4.0, level=next(iter(MitigationLevel)), reason="slow", generation=2,
        current_step_s=1.0, planned_step_s=0.9, fluid_step_s=0.8, cost_s=1.0, moved_bytes=64,
        considered=(considered,),
    )  # fmt: skip
    row = IncidentRow(
        step=3, unix_s=3.0, num_steps=1, generation=1, step_s=1.0, observed_s=1.0, expected_s=0.6,
        peers_slowdown=nan,
    )  # fmt: skip
    note = Note(step=4, unix_s=4.0, text="generation 2: slow")
    return IncidentTimeline(
        incident_id=1, job="moe", rank=1, rows=[row], plans=[plan], notes=[note]
    )


def _pace() -> list[JobRow]:
    one = JobRow(
        step=3, unix_s=3.0, num_steps=1, generation=1, step_s=1.0, tokens_per_s=8.0, slowest=1.0
    )
    return [one]


def _verdict() -> bytes:
    return node_health.encode_node_health(
        NodeHealth(
            node="n", fitness=Fitness.FIT, reason="Fit", words="all well", since_unix_s=1.0,
            written_unix_s=2.0,
        )
    )  # fmt: skip


def _tokens() -> bytes:
    secret = "s" * 43
    record = TokenRecord(
        token_id="0" * 8, secret_sha256=secret_digest(secret), role=Role.VIEWER, name="ann",
        created_unix_s=0.0, expires_unix_s=1.0,
    )  # fmt: skip
    return encode_tokens([record]) + f"\n\n{PREFIX}.{record.token_id}.{secret}".encode()


def _questions() -> tuple[bytes, ...]:
    known: dict[str, Any] = {
        "GetJob": {"job": "ablation-7"}, "GetPace": {"job": "ablation-7"},
        "GetLayout": {"job": "ablation-7"}, "GetExplanation": {"incident_id": 1},
        "ListIncidents": {"job": "pretrain-moe", "open_only": True},
    }  # fmt: skip
    return tuple(
        bytes([at])
        + getattr(status_pb2, f"{name}Request")(**known.get(name, {})).SerializeToString()
        for at, name in enumerate(QUESTIONS)
    )


def _acts() -> tuple[bytes, ...]:
    known: dict[str, Any] = {
        "ApproveProposal": {"proposal_id": 1, "operator": "ann"},
        "DenyProposal": {"proposal_id": 1, "operator": "ann", "reason": "no"},
        "GiveOrder": {"kind": 1, "subject": "gpu-001", "is_on": True, "operator": "ann"},
    }
    found = [
        bytes([at]) + getattr(operator_pb2, f"{name}Request")(**known[name]).SerializeToString()
        for at, name in enumerate(ACTS)
    ]
    order: Any = {"is_on": True, "operator": "ann", "reason": "r"}
    kinds: Any = ((2, "ablation-7/1"), (3, "ablation-7"), (4, ""))
    for kind, subject in kinds:
        request = operator_pb2.GiveOrderRequest(kind=kind, subject=subject, **order)
        found.append(bytes([ACTS.index("GiveOrder")]) + request.SerializeToString())
    return tuple(found)


def _pages() -> tuple[bytes, ...]:
    head = "Host: 127.0.0.1\r\nAccept: text/html\r\nCookie: pacekeeper=x"
    pages = (
        "/", "/jobs/ablation-7", "/jobs/ablation-7/layout", "/incidents", "/incidents/1", "/nodes",
        "/part/fleet", "/part/jobs/ablation-7/head", "/data/fleet", "/data/jobs/ablation-7",
        "/data/jobs/ablation-7/layout?generation=1", "/data/incidents/1", "/static/page.js",
        "/login",
    )  # fmt: skip
    found = [f"GET {page} HTTP/1.1\r\n{head}\r\n\r\n" for page in pages]
    acts = {
        "/act/order": "kind=pause&subject=ablation-7&is_on=1&operator=ann&reason=r",
        "/act/answer": "proposal=1&is_approved=1&operator=ann",
        "/login": "token=pk1.00000000." + "s" * 43,
        "/logout": "",
    }
    for path, body in acts.items():
        posted = f"Origin: http://127.0.0.1\r\nContent-Type: {FORM}\r\nX-CSRF-Token: y"
        found.append(f"POST {path} HTTP/1.1\r\n{head}\r\n{posted}\r\n\r\n{body}")
    return tuple(text.encode() for text in found)


def _certificate() -> bytes:
    with TemporaryDirectory() as name:
        folder, now = Path(name), datetime(2026, 1, 1, tzinfo=UTC)
        ca.create_authority(folder, "a", 10, now)
        made = ca.issue_certificate(
            folder,
            ca.CertificateSubject(
                kind=ca.Kind.CONTROLLER, name="c", hosts=("h.example", "10.0.0.1")
            ),
            days=1,
            now=now,
            out=folder / "c",
        )
        return made.read_bytes()


def _nvml() -> bytes:
    """Every field that is asked for, each answered with a type of its own."""
    entries = [
        ENTRY.pack(field, scope, 0, 0, at % 7, 0, (at * 1000).to_bytes(8, "little"))
        for at, (field, scope) in enumerate(keys(2))
    ]
    return b"".join(entries)


def _partition() -> bytes:
    cell = {
        "first_layer": 0, "end_layer": 2,
        "attention": [{"rank": 0, "first": 0, "end": 1}],
        "mlp": [{"rank": 0, "first": 0, "end": 1}],
    }  # fmt: skip
    pipeline = {"cells": [cell], "micro_batches": [4], "expert_group": 0}
    return json.dumps({"pipelines": [pipeline]}).encode()
