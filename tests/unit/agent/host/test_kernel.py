"""The kernel's own account: base units, rates between two readings, None where it says nothing."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.agent.host import wall_clock
from pacekeeper.agent.host.kernel import HostSampler
from pacekeeper.core.telemetry.samples import HostSample

FILES = {
    "loadavg": "8.16 10.41 9.12 12/156 21577\n",
    "pressure/cpu": "some avg10=99.55 avg60=99.43 avg300=98.95 total=5887197790\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "pressure/io": "some avg10=12.50 avg60=0.00 avg300=0.00 total=0\n"
    "full avg10=2.50 avg60=0.00 avg300=0.00 total=0\n",
    "pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "meminfo": "MemTotal:        1000 kB\nMemFree:  1 kB\nMemAvailable:     250 kB\nHuge: x\n",
    "vmstat": "nr_free_pages 5\npswpin 100\npswpout 7\n",
}


NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls
    lo: 900 9 9 9 0 0 0 0 900 9 9 9 0 0 0 0
  eth0: 1000 10 1 2 0 0 0 0 3000 30 3 4 0 0 0 0
  eth1:   20 10 0 1 0 0 0 0   30 30 0 0 0 0 0 0
"""
SNMP = "Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 {} {}\n"


def untold() -> dict[str, Any]:
    """A clock that tells nothing."""
    return {}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "pressure").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(NET)
    (tmp_path / "net/snmp").write_text(SNMP.format(1000, 10))
    for name in ("eth0", "eth1"):
        (tmp_path / "sys/class/net" / name / "device").mkdir(parents=True)
    return tmp_path


def port(proc: Path, number: int, state: str, **counters: int) -> None:
    """A port of the fabric."""
    folder = proc / f"sys/class/infiniband/mlx5_{number}/ports/1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    for name, value in counters.items():
        (folder / "counters" / name).write_text(f"{value}\n")


def host_of(proc: Path, clock: Callable[[], dict[str, Any]] = untold) -> HostSampler:
    return HostSampler(interval_s=1.0, proc=proc, sys=proc / "sys", clock=clock)


def test_a_reading_is_in_base_units_and_what_is_missing_is_none(proc: Path) -> None:
    sample = host_of(proc).latest(50.0)
    assert sample == HostSample(
        sampled_s=50.0,
        num_cores=os.cpu_count(),
        load_1min=8.16,
        load_5min=10.41,
        load_15min=9.12,
        cpu_some_ratio=99.55 / 100.0,
        cpu_full_ratio=0.0,
        io_some_ratio=0.125,
        io_full_ratio=0.025,
        memory_some_ratio=0.0,
        memory_full_ratio=None,  # no such line
        memory_bytes=1000 * 1024,
        memory_available_bytes=250 * 1024,
        network_errors=1 + 3,
        network_drops=2 + 4 + 1,
    )


def test_the_network_is_its_hardware_and_rates_are_between_two_readings(proc: Path) -> None:
    host = host_of(proc)
    host.latest(10.0)
    (proc / "net/dev").write_text(NET.replace(" 1000 ", " 1500 ").replace(" 3000 ", " 4000 "))
    (proc / "net/snmp").write_text(SNMP.format(1200, 13))
    sample = host.latest(12.0)
    assert (sample.network_received_bytes_per_s, sample.network_sent_bytes_per_s) == (250.0, 500.0)
    assert sample.tcp_resent_ratio == 3 / 200


def test_a_counter_that_began_anew_is_no_rate(proc: Path) -> None:
    host = host_of(proc)
    host.latest(10.0)
    (proc / "net/dev").write_text(NET.replace(" 1000 ", " 1 "))
    (proc / "net/snmp").write_text(SNMP.format(3, 1))
    sample = host.latest(12.0)
    assert (sample.network_received_bytes_per_s, sample.tcp_resent_ratio) == (0.0, None)


def test_ports_of_the_fabric_are_added_up(proc: Path) -> None:
    port(proc, 0, "4: ACTIVE", port_xmit_data=100, port_rcv_data=10, symbol_error=2)
    port(proc, 1, "1: DOWN", port_xmit_data=0, port_rcv_data=0, link_downed=1)
    host = host_of(proc)
    sample = host.latest(10.0)
    assert (sample.fabric_ports, sample.fabric_ports_up, sample.fabric_errors) == (2, 1, 3)
    port(proc, 0, "4: ACTIVE", port_xmit_data=150)
    assert host.latest(12.0).fabric_sent_bytes_per_s == 50 * 4 / 2


def test_a_port_without_counters_is_not_said_to_be_without_errors(proc: Path) -> None:
    folder = proc / "sys/class/infiniband/mlx5_0/ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text("4: ACTIVE\n")
    sample = host_of(proc).latest(1.0)
    assert (sample.fabric_ports_up, sample.fabric_errors) == (1, None)


@pytest.mark.parametrize(
    ("status", "offset_s", "is_synchronised"),
    [(0x2001, 1.5e-6, True), (0x0001, 1.5e-3, True), (0x2041, 1.5e-6, False)],
)
def test_the_wall_clock_is_told_as_its_kernel_knows_it(
    proc: Path, status: int, offset_s: float, is_synchronised: bool
) -> None:
    def clock() -> dict[str, Any]:
        return wall_clock.parse(offset=1500, max_error_us=2000, status=status)

    sample = host_of(proc, clock).latest(1.0)
    assert (sample.clock_offset_s, sample.clock_error_s) == pytest.approx((offset_s, 0.002))
    assert sample.is_clock_synchronised is is_synchronised


def test_this_kernel_tells_its_clock_or_nothing_of_it() -> None:
    told = wall_clock.read()
    assert not told or (told["clock_error_s"] >= 0.0 and len(told) == 3)


def test_swapping_is_a_rate_between_two_readings(proc: Path) -> None:
    host = HostSampler(interval_s=1.0, proc=proc)
    assert host.latest(10.0).swap_in_bytes_per_s is None
    (proc / "vmstat").write_text("pswpin 120\npswpout 7\n")
    sample = host.latest(12.0)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (sample.swap_in_bytes_per_s, sample.swap_out_bytes_per_s) == (10.0 * page, 0.0)


def test_lines_that_no_kernel_writes_are_passed_over(proc: Path) -> None:
    """The agent must not end of a file below /proc, whoever mounted it there."""
    path = proc / "net/dev"
    path.write_text(f"{'x' * 5000}: {'1 ' * 16}\n../../etc: {'1 ' * 16}\n" + path.read_text())
    (proc / "meminfo").write_text(f"MemTotal: {'9' * 5000} kB\nMemAvailable: {'9' * 20} kB\n")
    sample = HostSampler(interval_s=1.0, proc=proc, sys=proc / "sys").latest(1.0)
    assert sample.memory_bytes is None and sample.memory_available_bytes is None
    assert sample.network_errors is not None


def test_within_the_interval_the_files_are_left_alone(proc: Path) -> None:
    host = HostSampler(interval_s=1.0, proc=proc)
    first = host.latest(10.0)
    (proc / "loadavg").write_text("1.0 1.0 1.0 1/1 1\n")
    assert host.latest(10.9) is first
    assert host.latest(11.0).load_1min == 1.0


@pytest.mark.parametrize("text", ["", "some nonsense\nfull avg10=x avg60=1\n", "\x00\xff a b"])
def test_what_is_not_there_or_not_to_be_understood_is_none(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "net").mkdir()
        (tmp_path / "pressure").mkdir()
        for name in (*FILES, "net/dev", "net/snmp"):
            (tmp_path / name).write_text(text)
    sample = host_of(tmp_path).latest(1.0)
    known = {"sampled_s", "num_cores"}
    told = {f.name for f in fields(HostSample) if getattr(sample, f.name) is not None}
    assert told <= known, sample


def test_this_kernel_tells_its_load() -> None:
    load = HostSampler(interval_s=1.0).latest(1.0).load_1min
    assert load is None or load >= 0.0
