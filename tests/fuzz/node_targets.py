"""What is fuzzed of what a node reads: driver, kernel, files, requests of other nodes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pacekeeper.agent.host.kernel import HostSampler
from pacekeeper.agent.nvml import fields
from pacekeeper.agent.rings.fencing_epoch import FencingEpoch
from pacekeeper.cli.planning.inputs import read_replica_ranks
from pacekeeper.core.errors import DataError, VersionError
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample
from pacekeeper.protos.convert import reports
from pacekeeper.simulator.scenario.partition_spec import read_partition
from pacekeeper.trainer.elastic.agreement.messages import decode_asking

Stated = tuple[type[Exception], ...]
PROC_FILES = ("loadavg", "meminfo", "vmstat", "pressure/cpu", "pressure/io", "net/dev", "net/snmp")
EMPTY = NodeReport(sequence=1, sent_mono_s=1.0)


def node_targets(folder: Path) -> dict[str, tuple[Callable[[bytes], object], Stated]]:
    """By name: what runs a case, and the errors it states."""
    kernel = _Kernel(folder / "kernel")
    return {
        "nvml-fields": (_nvml, ()),
        "host-proc": (kernel.read, ()),
        "join-asking": (
            lambda data: decode_asking(data.decode("utf-8", "replace")),
            (VersionError,),
        ),
    }


def node_files() -> dict[str, tuple[Callable[[Path], object], Stated]]:
    """Likewise, of files."""
    return {
        "terms": (_fencing_epoch, ()),
        "plan-replicas": (lambda path: read_replica_ranks(path, 4), (DataError,)),
        "plan-partition": (read_partition, (DataError,)),
    }


def _nvml(data: bytes) -> object:
    """From the driver's answers to what goes out: whatever it says, the agent goes on."""
    whole = len(data) - len(data) % fields.ENTRY.size
    answers, refused = fields.decode(data[:whole])
    sample = DeviceSample(
        device_index=0,
        device_uuid="GPU-0",
        sampled_s=1.0,
        health=DeviceHealth(**fields.health_fields(answers)),  # type: ignore[arg-type]
        **fields.sample_fields(answers),  # type: ignore[arg-type]
    )
    return _sent(replace(EMPTY, devices=(sample,))), refused


class _Kernel:
    """A /proc of one text: each reader finds its lines in it."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc

    def read(self, data: bytes) -> object:
        """Twice, since rates need a reading before."""
        for name in PROC_FILES:
            path = self._proc / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        device = self._proc / "sys/class/net/eth0/device"
        device.mkdir(parents=True, exist_ok=True)
        host = HostSampler(interval_s=0.0, proc=self._proc, sys=self._proc / "sys", clock=dict)
        host.latest(1.0)
        sample: HostSample = host.latest(2.0)
        return _sent(replace(EMPTY, host=sample))


def _fencing_epoch(path: Path) -> object:
    fencing = FencingEpoch(path=path)
    fencing.load()
    return fencing.highest, fencing.accept(fencing.highest + 1)


def _sent(report: NodeReport) -> bytes:
    return reports.report_to_message(report).SerializeToString()
