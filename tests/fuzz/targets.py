"""What is fuzzed: every parser of bytes that others made, and the errors it states."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from fuzz.node_targets import node_files, node_targets
from fuzz.service_targets import certificate, plain_targets
from fuzz.store_targets import store_targets
from fuzz.trainer_targets import regroup_targets
from fuzz.wire_targets import read_ring, wire_files, wire_targets
from pacekeeper.cli.planning.inputs import read_loads
from pacekeeper.controller.api.auth.tokens import decode_tokens
from pacekeeper.controller.ingest.agent_service import report_in
from pacekeeper.controller.ingest.worker import sequence_of
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import NodeAttached, NodeReported
from pacekeeper.controller.state.state import State
from pacekeeper.core.checkpoint import manifest_codec, safetensors_header
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import read_config
from pacekeeper.core.errors import ConfigError, DataError, PacekeeperError, VersionError
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.core.telemetry import record_codec, shm_ring
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports
from pacekeeper.simulator.cluster.fault_log import read_faults
from pacekeeper.simulator.cluster.spot_trace import read_spot
from pacekeeper.simulator.readers.formats import Format
from pacekeeper.simulator.readers.registry import open_runs
from pacekeeper.simulator.scenario.loader import read_scenario
from pacekeeper.simulator.scenario.partition_spec import read_problem

Seeds = tuple[bytes, ...]
# What comes over the network, then what other users of the host write: fuzzed first.
EXPOSED = (
    "protocol-machine", "first-message", "ingest-frames", "protocol-report", "service-status",
    "service-operator", "web", "token-shown", "identity", "protocol-command",
    "ring-file", "ring-resealed", "ring-command",
    "ring-command-resealed", "ring-payload", "ring-slot", "ring-header", "regroup-job",
    "regroup-admission", "regroup-verdict", "regroup-report", "regroup-notices", "join-asking",
    "config", "layout", "tokens", "certificate", "manifest-resealed", "manifest", "scenario",
    "trace-any", "store-rows", "store-pages",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser. `run` raises one of `stated` for what it refuses, and nothing else ever."""

    name: str
    run: Callable[[bytes], object]
    stated: tuple[type[Exception], ...]


def targets(folder: Path) -> dict[str, Target]:
    """All parsers by name; those of files write their case into `folder`."""
    plain: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
        "protocol-report": (_report, (DecodeError, ValueError)),
        "protocol-machine": (_machine, (DecodeError, ValueError)),
        "protocol-command": (_command, (DecodeError, ValueError)),
        "ring-header": (shm_ring.decode_header, (ValueError, VersionError)),
        "ring-slot": (_slot, (ValueError, LookupError)),
        "ring-payload": (record_codec.unpack, (ValueError,)),
        "ring-command": (shm_ring.decode_command, (ValueError,)),
        "config": (_config, (ConfigError,)),
        "layout": (decode_layout, (ValueError,)),
        "manifest": (manifest_codec.decode_manifest, (ValueError,)),
        "manifest-resealed": (_resealed_manifest, (ValueError,)),
        "manifest-part": (manifest_codec.decode_rank_manifest, (ValueError,)),
        "tensor-header": (_tensors, (ValueError,)),
        "tokens": (decode_tokens, (ValueError,)),
        **plain_targets(folder),
        **node_targets(folder),
        **regroup_targets(),
        **wire_targets(),
        **store_targets(folder),
    }
    of_files: dict[str, tuple[Callable[[Path], object], tuple[type[Exception], ...]]] = {
        "ring-file": (_ring_file, (ValueError, VersionError)),
        "trace-any": (open_runs, (DataError,)),
        **{f"trace-{form}": (_trace_of(form), (DataError,)) for form in Format},
        "history-spot": (read_spot, (DataError,)),
        "history-faults": (lambda path: read_faults(path, num_nodes=3), (DataError,)),
        "scenario": (read_scenario, (PacekeeperError,)),
        "partition": (lambda path: read_problem(path, {}, None), (PacekeeperError,)),
        "loads": (read_loads, (PacekeeperError,)),
        "certificate": (certificate, (ConfigError,)),
        **node_files(),
        **wire_files(),
    }
    found = {n: Target(name=n, run=run, stated=stated) for n, (run, stated) in plain.items()}
    for name, (read, stated) in of_files.items():
        run = _of_file(read, folder / f"{name}.{'json' if name == 'loads' else 'case'}")
        found[name] = Target(name=name, run=run, stated=stated)
    return found


def _of_file(read: Callable[[Path], object], path: Path) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return run


def _trace_of(form: Format) -> Callable[[Path], object]:
    return lambda path: open_runs(path, form)


def _report(data: bytes) -> object:
    sequence_of(data)
    return report_in(data)


def _machine(data: bytes) -> object:
    """What gets through the parser must not bring the machine down either."""
    report = _report(data)
    config = ControllerConfig()
    state = State()
    for event in (
        NodeAttached(node="n", product_version="0", agent_incarnation="x"),
        NodeReported(node="n", agent_incarnation="x", report=report),  # type: ignore[arg-type]
    ):
        try:
            state, _ = advance(state, event, config=config, now_s=1.0)
        except ValueError as error:
            raise RuntimeError(f"the machine raises {error!r}") from error
    return state


def _command(data: bytes) -> object:
    """A plan, as an agent hears it and a rank reads it."""
    message = control_pb2.AttachResponse.FromString(data)
    if message.WhichOneof("message") != "offer_plan":
        raise ValueError("no plan")
    return decode_layout(reports.offer_from_message(message.offer_plan).data)


def _slot(data: bytes) -> object:
    before = int.from_bytes(data[: shm_ring.SEQUENCE.size], "little")
    return shm_ring.decode_slot(max(0, before - 1), before, data, before)


def _config(data: bytes) -> object:
    text = data.decode("utf-8", errors="replace")
    for kind in (AgentConfig, ClientConfig, ControllerConfig, EngineConfig):
        read_config(kind, text, file="f")
    return text


def _resealed_manifest(data: bytes) -> object:
    """Damage behind the checksum: what somebody would do who can write it anew."""
    try:
        body = json.loads(data)["body"]
        sealed = manifest_codec.encode_with_digest(body)
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ValueError("no body") from None
    return manifest_codec.decode_manifest(sealed)


def _tensors(data: bytes) -> object:
    return safetensors_header.decode_header(data, len(data))


def _ring_file(path: Path) -> object:
    """A file of a ring's size."""
    with path.open("r+b") as file:
        file.truncate(shm_ring.FILE_BYTES)
    return read_ring(path)
