"""What the agents of a large fleet tell, as bytes that cost little to make.

Each second the kernel's readings; every five seconds those of eight devices; with each step of its
job the records of eight ranks: micro-batches, expert loads, the step's end. One rank may be slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from signal import SIGKILL
from typing import Protocol

from benchmarks.agent_swarm import Body, varint
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import RankExitRecord
from pacekeeper.protos import telemetry_pb2 as t
from pacekeeper.protos.convert.records import fill_columns

DEVICES = 8
DEVICE_PERIOD = 5  # reports
NUM_EXPERTS = 16
CHUNK_LAYERS = 1


@dataclass(slots=True, kw_only=True)
class Job:
    """One job on a run of nodes. Steps are counted by its nodes' reports: all begin with one."""

    name: str
    nodes: Sequence[int]
    step_every: int  # reports
    micro_batches: int = 2
    slow_rank: int | None = None
    slowdown: float = 1.0
    slow_from_step: int = 1 << 30
    layout: Layout | None = None
    random: Random = field(default_factory=lambda: Random(7))

    @property
    def num_ranks(self) -> int:
        """Of all its nodes."""
        return len(self.nodes) * DEVICES

    def greeting(self, place: int) -> bytes:
        """Who is here, of the node at `place` in the job."""
        told = t.JobReport(job=self.name, run_id=1)
        for rank in self._ranks(place):
            attached = told.attached.add(
                job=self.name,
                rank=rank,
                world_size=self.num_ranks,
                pid=1000 + rank,
                role="train",
                clock="cuda",
                device_uuid=uuid_of(self.nodes[place], rank % DEVICES),
                run_id=1,
            )
            if self.layout is not None:
                for name, value in _SHAPE.items():
                    setattr(attached.model, name, value)
        if self.layout is not None:
            crc = layout_crc(self.layout)
            for rank in self._ranks(place):
                for name, value in {"rank": rank, "generation": 1, "layout_crc": crc}.items():
                    getattr(told.plans_applied, name).append(value)
                for name in ("step", "previous_generation", "moved_bytes", "duration_s"):
                    getattr(told.plans_applied, name).append(0)
                told.plans_applied.is_regroup.append(False)
            if place == 0:
                told.layouts.add(generation=1, layout_json=encode_layout(self.layout))
        return t.NodeReport(jobs=[told]).SerializeToString()

    def step(self, place: int, number: int) -> bytes:
        """The records of one step of a node's ranks."""
        ranks, uniform = self._ranks(place), self.random.uniform
        per = self.micro_batches
        tokens = [int(uniform(1000, 1500)) for _ in range(DEVICES * per)]
        compute_s = [0.1 + 1e-5 * n + uniform(0.0, 1e-3) for n in tokens]
        slow = self.slow_rank
        if number >= self.slow_from_step and slow is not None and slow in ranks:
            at = ranks.index(slow) * per
            compute_s[at : at + per] = [s * self.slowdown for s in compute_s[at : at + per]]
        generation = 1 if self.layout is not None else 0
        told = t.JobReport(
            job=self.name,
            run_id=1,
            micro_batches=t.MicroBatchColumns(
                rank=[rank for rank in ranks for _ in range(per)],
                step=[number] * (DEVICES * per),
                micro_batch=list(range(per)) * DEVICES,
                generation=[generation] * (DEVICES * per),
                tokens=tokens,
                sum_len_squared=[60 * n for n in tokens],
                expert_rows=[2 * n for n in tokens],
                num_active_experts=[2] * (DEVICES * per),
                compute_s=compute_s,
            ),
            steps=t.StepColumns(
                rank=ranks,
                step=[number] * DEVICES,
                generation=[generation] * DEVICES,
                tokens=[1 << 20] * DEVICES,
                duration_s=[0.5] * DEVICES,
                loss=[2.0] * DEVICES,
            ),
        )
        if self.layout is not None:
            # Agents add up what their ranks tell (`agent/uplink/batching.py`).
            loads = told.expert_loads
            one = {"rank": ranks[0], "step": number, "generation": generation, "layer": 0}
            one |= {"first_expert": 0, "num_counts": NUM_EXPERTS, "num_ranks": DEVICES}
            for name, value in one.items():
                getattr(loads, name).append(value)
            loads.counts.extend([80 * DEVICES] * NUM_EXPERTS)
        return t.NodeReport(jobs=[told]).SerializeToString()

    def _ranks(self, place: int) -> range:
        return range(place * DEVICES, (place + 1) * DEVICES)


def lost_rank(job: str) -> bytes:
    """A job of two ranks attaches, and one of them was killed."""
    told = t.JobReport(job=job, run_id=1)
    fill_columns(told.rank_exits, [RankExitRecord(rank=1, pid=1001, exit_code=0, signal=SIGKILL)])
    for rank in range(2):
        told.attached.add(
            job=job, rank=rank, world_size=2, pid=1000 + rank, role="train", clock="cuda", run_id=1
        )
    return t.NodeReport(jobs=[told]).SerializeToString()


_SHAPE = {
    "num_layers": CHUNK_LAYERS,
    "num_experts": NUM_EXPERTS,
    "experts_per_token": 2,
    "rows_per_step": 8192,
    "slots_per_rank": 2,
    "expert_bytes": 1 << 20,
    "dense_bytes": 1 << 20,
}


def uuid_of(node: int, device: int) -> str:
    """A device's name as drivers give them."""
    return f"GPU-{node:08x}-0000-0000-0000-{device:012x}"


class Tells(Protocol):
    """A job as its nodes' agents tell of it; steps are told each `step_every` reports."""

    step_every: int

    def greeting(self, place: int) -> bytes:
        """Who is here, of the node at `place` in the job."""

    def step(self, place: int, number: int) -> bytes:
        """The records of one step of that node's ranks."""


def body_of(node: int, job: Tells | None, place: int) -> Body:
    """What the agent of this node tells; `place`: of the node in its job."""
    names = _names(node)
    greeting = b"" if job is None else job.greeting(place)

    def body(number: int, now_s: float) -> bytes:
        parts = [kernel(now_s)]
        if number % DEVICE_PERIOD == 0:
            parts.append(_devices(names, now_s))
        if number == 0:
            parts.append(greeting)
        elif job is not None and number % job.step_every == 0:
            parts.append(job.step(place, number // job.step_every - 1))
        return b"".join(parts)

    return body


def devices(node: int, now_s: float) -> bytes:
    """One reading of each device of a node."""
    return _devices(_names(node), now_s)


def _names(node: int) -> list[bytes]:
    return [
        t.DeviceSample(device_index=i, device_uuid=uuid_of(node, i)).SerializeToString()
        for i in range(DEVICES)
    ]


def _devices(names: Sequence[bytes], now_s: float) -> bytes:
    tail = _device(now_s)
    return b"".join(b"\x22" + varint(len(name) + len(tail)) + name + tail for name in names)


def kernel(now_s: float) -> bytes:
    """The node's own account: what `agent/host/kernel.py` reads, and the agent's health."""
    host = t.HostSample(
        sampled_mono_s=now_s,
        num_cores=192,
        load_1min=12.5,
        load_5min=12.1,
        load_15min=11.9,
        cpu_some_ratio=0.01,
        cpu_full_ratio=0.0,
        io_some_ratio=0.02,
        io_full_ratio=0.01,
        memory_some_ratio=0.0,
        memory_full_ratio=0.0,
        memory_bytes=2 << 40,
        memory_available_bytes=1 << 40,
        swap_in_bytes_per_s=0.0,
        swap_out_bytes_per_s=0.0,
        network_sent_bytes_per_s=1e6,
        network_received_bytes_per_s=1e6,
        network_errors=0,
        network_drops=0,
        tcp_resent_ratio=0.0,
        fabric_ports=8,
        fabric_ports_up=8,
        fabric_errors=0,
        fabric_sent_bytes_per_s=1e10,
        fabric_received_bytes_per_s=1e10,
        clock_offset_s=1e-6,
        clock_error_s=1e-4,
        is_clock_synchronised=True,
    )
    health = t.AgentHealth(nvml="ok", num_devices=DEVICES, records_read=123456)
    return t.NodeReport(host=host, health=health).SerializeToString()


def _device(now_s: float) -> bytes:
    """One reading of one device but its name: what an H200 tells."""
    return t.DeviceSample(
        sampled_mono_s=now_s,
        name="NVIDIA H200",
        sm_clock_mhz=1980.0,
        sm_clock_max_mhz=1980.0,
        memory_clock_mhz=3201.0,
        temperature_celsius=56.0,
        power_watts=640.0,
        power_limit_watts=700.0,
        utilisation_ratio=0.99,
        memory_used_bytes=120 << 30,
        clock_event_reasons=0,
        pcie_generation=5,
        pcie_width=16,
        pcie_replays=0,
        ecc_uncorrected=0,
        processes=t.ProcessList(pids=[1234]),
        answer_s=0.002,
        power_now_watts=655.0,
        energy_joules=1e9,
        memory_temperature_celsius=60.0,
        margin_celsius=30.0,
        power_cap_held_s=1.0,
        sw_thermal_held_s=0.0,
        hw_thermal_held_s=0.0,
        nvlink_sent_bytes=1 << 50,
        nvlink_received_bytes=1 << 50,
        sm_active_ratio=0.9,
        tensor_active_ratio=0.5,
        memory_active_ratio=0.4,
    ).SerializeToString()
