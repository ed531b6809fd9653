"""Valid inputs of every parser that is fuzzed: small, and with every kind of value in them."""

import gzip
import hashlib
import json
from dataclasses import replace

from fuzz.service_seeds import service_seeds
from fuzz.store_targets import store_seeds
from fuzz.targets import Seeds
from fuzz.trainer_targets import regroup_seeds
from fuzz.wire_targets import wire_seeds
from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import TokenRecord, encode_tokens
from pacekeeper.core.checkpoint import manifest_codec, safetensors_header
from pacekeeper.core.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    Manifest,
    Piece,
    PieceEntry,
    RankManifest,
    TokenLedgerState,
)
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import record_codec, shm_ring
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.node_report import AgentHealth, JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PairRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports as wire
from support.foreign_traces import FILES, TABLES, csv_text
from support.tree import ROOT

LAYOUT = even_layout(ranks=[0, 1], num_layers=2, num_experts=2, replicas=2)
MODEL = ModelShape(
    num_layers=2, num_experts=2, experts_per_token=1, rows_per_step=8, slots_per_rank=2,
    expert_bytes=64, dense_bytes=64,
)  # fmt: skip
RECORDS: tuple[Record, ...] = (
    MicroBatchRecord(
        rank=0, step=1, micro_batch=0, generation=1, compute_s=0.5, tokens=8, sum_len_squared=64,
        expert_rows=8, cpu_s=0.1, stall_s=0.0, wait_s=0.2, ended_mono_s=1.0,
    ),
    StepRecord(rank=0, step=1, generation=1, duration_s=0.7, tokens=8, loss=1.5, transfer_s=0.1),
    StepRecord(rank=1, step=1, generation=1, duration_s=0.7, tokens=8),
    ExpertLoadRecord(rank=0, step=1, generation=1, layer=0, first_expert=0, counts=(3, 5)),
    PlanAppliedRecord(
        rank=0, step=1, generation=1, previous_generation=0, duration_s=0.1, moved_bytes=9,
        is_regroup=False, layout_crc=7,
    ),
    PlanRefusedRecord(rank=0, generation=1, plan_generation=2, layout_crc=7, reason="too large"),
    ProbeRecord(
        rank=0, step=1, generation=1, number=1, gemm_s=0.1, copy_s=0.1, exchange_s=0.1,
        duration_s=0.3, ended_mono_s=1.0,
    ),
    PairRecord(
        rank=0, step=1, generation=1, peer=1, number=3, num_bytes=65536, exchange_s=0.1,
    ),
    RankExitRecord(rank=1, pid=2, exit_code=-1, signal=9, detected_mono_s=1.0),
)  # fmt: skip


def seeds() -> dict[str, Seeds]:
    """Of each target (`targets.targets`) its valid inputs."""
    offer = wire.offer_to_message("moe", LAYOUT, 0, 7)
    manifest = manifest_codec.encode_manifest(_manifest(LAYOUT))
    header = shm_ring.encode_header(_attachment(0))
    slots = tuple(_slot(index, record) for index, record in enumerate(RECORDS))
    command = shm_ring.CommandSlot(
        plan_generation=2, dead_ranks=frozenset({1, 9}), run_id=7, probe=3
    )
    spot = (
        b"0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n",
        b"0,2\n10,1\n20,3\n",
        b"2021-12-11, 11:00:00, 2\n2021-12-11, 11:01:00, 1\n",
        b'[0, "add", {"nodes": ["a"], "duration": 9}]\n',
    )
    files = {name: make() for name, make in FILES.items()}
    tables = {name: csv_text(rows()).encode() for name, rows in TABLES.items()}
    traces = (*files.values(), *tables.values())
    found: dict[str, Seeds] = {
        "protocol-report": _reports(),
        "protocol-machine": _reports(),
        "protocol-command": (control_pb2.AttachResponse(offer_plan=offer).SerializeToString(),),
        "ring-header": (header,),
        "ring-slot": slots,
        "ring-payload": tuple(record_codec.pack(record) for record in RECORDS),
        "ring-command": (shm_ring.encode_command(5, command),),
        "ring-file": (_ring_file(header, slots),),
        "config": (_text("deploy/pacekeeper.example.toml"),),
        "layout": (encode_layout(LAYOUT),),
        "manifest": (manifest,),
        "manifest-resealed": (manifest,),
        "manifest-part": (manifest_codec.encode_rank_manifest(_part(_manifest(LAYOUT))),),
        "tensor-header": (_tensor_file(),),
        "tokens": (_tokens(),),
        "trace-any": (*traces, *(gzip.compress(data) for data in traces)),
        "history-spot": spot,
        "history-faults": (_faults(),),
        "scenario": tuple(
            _text(f"examples/simulate_{name}.toml") for name in ("faults", "servers")
        ),
        "partition": (_text("examples/partition.toml"),),
        "loads": (b"[[1, 2], [3, 4.5]]",),
        **service_seeds(),
        **regroup_seeds(LAYOUT),
        **store_seeds(),
        **wire_seeds(_reports(), _ring_file(header, slots), shm_ring.encode_command(5, command)),
    }
    of_format = {"steps": (tables["steps"], files["archive"]), **_singly(files), **_singly(tables)}
    of_format["steps"] = (tables["steps"], files["archive"])
    del of_format["archive"]
    return found | {f"trace-{name}": data for name, data in of_format.items()}


def _singly(files: dict[str, bytes]) -> dict[str, Seeds]:
    return {name: (data, gzip.compress(data)) for name, data in files.items()}


def _attachment(rank: int) -> Attachment:
    return Attachment(job="moe", rank=rank, world_size=2, pid=rank + 1, run_id=7, model=MODEL)


def _reports() -> Seeds:
    job = JobReport(
        job="moe",
        run_id=7,
        attached=(_attachment(0), _attachment(1)),
        records=RECORDS,
        layouts=((1, encode_layout(LAYOUT)),),
    )
    report = NodeReport(
        sequence=1,
        sent_mono_s=1.0,
        jobs=(job,),
        devices=(
            DeviceSample(device_index=0, device_uuid="GPU-0", sampled_s=1.0, processes=(1, 2)),
        ),
        host=HostSample(sampled_s=1.0, num_cores=8, load_1min=2.0),
        health=AgentHealth(
            nvml="ok", records_read=8, records_lost=0, records_corrupt=0, batches_dropped=0
        ),
    )
    steps = replace(report, jobs=(replace(job, attached=(), layouts=(), records=RECORDS[:4]),))
    hello = control_pb2.Hello(
        protocol_version=1, product_version="0", node="n", agent_incarnation="x"
    )
    return (
        *(
            control_pb2.AttachRequest(report=wire.report_to_message(one)).SerializeToString()
            for one in (report, steps)
        ),
        control_pb2.AttachRequest(hello=hello).SerializeToString(),
    )


def _slot(index: int, record: Record) -> bytes:
    sequence = shm_ring.SEQUENCE.pack(index + 1)
    payload = record_codec.pack(record)
    return sequence + shm_ring.SLOT_REST.pack(shm_ring.slot_checksum(sequence, payload), payload)


def _ring_file(header: bytes, slots: Seeds) -> bytes:
    return header.ljust(shm_ring.COMMAND_OFFSET, b"\0").ljust(
        shm_ring.SLOTS_OFFSET, b"\0"
    ) + b"".join(slots)


def _manifest(layout: Layout) -> Manifest:
    """All pieces of a layout's blocks, one byte each, in one file."""
    own = CheckpointId(run_id=7, generation=layout.generation, step=3)
    name = f"{own.name}/rank-0"
    digest = hashlib.sha256(b"x").hexdigest()
    entries = tuple(
        PieceEntry(piece=Piece(block), file=name, first_byte=at + 1, size_bytes=1, sha256=digest)
        for at, block in enumerate(layout.blocks())
    )
    return Manifest(
        job="moe",
        id=own,
        ticket=3,
        num_updates=3,
        last_loss=1.5,
        identity={"seed": 0, "dtype": "float32", "learning_rate": 0.1},
        layout=layout,
        files=(FileEntry(name=name, size_bytes=len(entries) + 1, header_sha256=digest),),
        pieces=entries,
        account=TokenLedgerState(routed=((1, 2), (3, 4)), lost=(0, 1), num_faults=1),
    )


def _part(manifest: Manifest) -> RankManifest:
    return RankManifest(files=manifest.files, pieces=manifest.pieces, account=manifest.account)


def _tensor_file() -> bytes:
    specs = [
        safetensors_header.TensorSpec(name="w1", dtype="F32", shape=(2, 3)),
        safetensors_header.TensorSpec(name="step", dtype="I64", shape=()),
    ]
    header = safetensors_header.encode_header(specs, {"job": "moe"})
    return header + bytes(sum(spec.size_bytes for spec in specs))


def _tokens() -> bytes:
    record = TokenRecord(
        token_id="0" * 8, secret_sha256="0" * 64, role=Role.VIEWER, name="ann",
        created_unix_s=0.0, expires_unix_s=1.0,
    )  # fmt: skip
    return encode_tokens([record])


def _faults() -> bytes:
    events = [
        {"node_id": "x", "event_time": 1.5, "event_type": what, "fault_type": {"Desc": "GPU lost"}}
        for what in ("fault_start", "fault_end")
    ]
    return json.dumps(events).encode()


def _text(path: str) -> bytes:
    return (ROOT / path).read_bytes()
