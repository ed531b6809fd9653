"""The kernel's own account: base units, rates between two readings, None where it says nothing."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from pacekeeper.agent.host import Host
from pacekeeper.core.topology import HostSample

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


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "pressure").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_reading_is_in_base_units_and_what_is_missing_is_none(proc: Path) -> None:
    sample = Host(interval_s=1.0, proc=proc).latest(50.0)
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
    )


def test_swapping_is_a_rate_between_two_readings(proc: Path) -> None:
    host = Host(interval_s=1.0, proc=proc)
    assert host.latest(10.0).swap_in_bytes_per_s is None
    (proc / "vmstat").write_text("pswpin 120\npswpout 7\n")
    sample = host.latest(12.0)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (sample.swap_in_bytes_per_s, sample.swap_out_bytes_per_s) == (10.0 * page, 0.0)


def test_within_the_interval_the_files_are_left_alone(proc: Path) -> None:
    host = Host(interval_s=1.0, proc=proc)
    first = host.latest(10.0)
    (proc / "loadavg").write_text("1.0 1.0 1.0 1/1 1\n")
    assert host.latest(10.9) is first
    assert host.latest(11.0).load_1min == 1.0


@pytest.mark.parametrize("text", ["", "some nonsense\nfull avg10=x avg60=1\n", "\x00\xff a b"])
def test_what_is_not_there_or_not_to_be_understood_is_none(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "pressure").mkdir()
        for name in FILES:
            (tmp_path / name).write_text(text)
    sample = Host(interval_s=1.0, proc=tmp_path).latest(1.0)
    known = {"sampled_s", "num_cores"}
    told = {f.name for f in fields(HostSample) if getattr(sample, f.name) is not None}
    assert told <= known, sample


def test_this_kernel_tells_its_load() -> None:
    load = Host(interval_s=1.0).latest(1.0).load_1min
    assert load is None or load >= 0.0
