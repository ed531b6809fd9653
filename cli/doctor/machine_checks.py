"""Checks of this machine: Python, cores, rings, packages, ports, NVML, limits.

Called by `pacekeeper doctor` without --config. No check changes anything permanently.
"""

import contextlib
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pacekeeper.cli.common.extras import missing_by_extra
from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.core.addresses import AGENT_PORT, API_PORT, METRICS_PORT
from pacekeeper.core.errors import ExitCode, VersionError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.text import format_s

SLOW_LOOKUP_S = 1.0
MIN_OPEN_FILES = 65536
MAX_NAMED_RINGS = 4
REREAD_S = 0.01


def run_checks(ring_dir: Path) -> tuple[Check, ...]:
    """Run all checks of this machine in display order."""
    probes: tuple[Callable[[], Check], ...] = (
        check_python,
        check_cores,
        lambda: check_ring_dir(ring_dir),
        lambda: check_rings(ring_dir),
        check_run_queue,
        check_extras,
        check_torch,
        check_nvml,
        check_grpc,
        lambda: check_port(AGENT_PORT, "controller, for agents"),
        lambda: check_port(API_PORT, "controller, for commands"),
        lambda: check_port(METRICS_PORT, "metrics endpoint of the agent"),
        check_resolver,
        check_open_files,
    )
    return tuple(probe() for probe in probes)


def check_python() -> Check:
    """Check for Python 3.11 or newer."""
    good = sys.version_info >= (3, 11)
    return Check(
        name="python",
        health=Health.OK if good else Health.BROKEN,
        found=platform.python_version(),
        remedy="" if good else "install Python 3.11 or newer",
    )


def check_cores() -> Check:
    """Check for two cores: on one, the demo's emulated clock overruns."""
    cores = len(os.sched_getaffinity(0))
    enough = cores >= 2
    return Check(
        name="cores",
        health=Health.OK if enough else Health.LIMITED,
        found=f"{cores} usable",
        remedy=""
        if enough
        else "use a machine with two cores: the demo's emulated clock overruns on one",
    )


def check_ring_dir(ring_dir: Path) -> Check:
    """Check that the ring directory is writable and on tmpfs: on a disk each record costs I/O."""
    try:
        parent = next(p for p in (ring_dir, *ring_dir.parents) if p.exists())
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        return Check(
            name="ring directory",
            health=Health.BROKEN,
            found=f"{ring_dir}: {error.strerror}",
            remedy="make it writable for agent and ranks, or choose another with --ring-dir",
        )
    kind = _filesystem_of(parent)
    return Check(
        name="ring directory",
        health=Health.OK if kind == "tmpfs" else Health.LIMITED,
        found=f"{ring_dir} on {kind}",
        remedy="" if kind == "tmpfs" else "choose a directory on tmpfs, such as /dev/shm",
    )


def check_rings(ring_dir: Path) -> Check:
    """Check version and records of all rings.

    Agent and training continue with damaged rings; here they are an error.
    """
    num_rings, num_records, damaged = 0, 0, []
    try:
        paths = sorted(ring_dir.glob("*/*.ring"))
    except OSError:  # reported by the check of the directory
        paths = []
    for path in paths:
        try:
            num_records += _num_records(path)
        except (OSError, VersionError, ValueError) as error:
            if not os.path.lexists(path):
                continue  # removed by a launch meanwhile
            code = ExitCode.VERSION if isinstance(error, VersionError) else ExitCode.HOST
            why = error.strerror if isinstance(error, OSError) else error
            damaged.append((code, f"{path}: {why}"))
        num_rings += 1
    if damaged:
        return Check(
            name="rings",
            health=Health.BROKEN,
            found="; ".join(what for _, what in damaged[:MAX_NAMED_RINGS])
            + (f"; and {len(damaged) - MAX_NAMED_RINGS} more" * (len(damaged) > MAX_NAMED_RINGS)),
            remedy="remove the rings of ended jobs; restart the ranks of running jobs",
            exit_code=max(code for code, _ in damaged),
        )
    return Check(
        name="rings", health=Health.OK, found=f"{num_rings} rings with {num_records} valid records"
    )


def check_run_queue() -> Check:
    """Check for run-queue times, by which --clock cpu distinguishes a busy core from a slow one."""
    good = Path("/proc/thread-self/schedstat").exists()
    return Check(
        name="run-queue times",
        health=Health.OK if good else Health.LIMITED,
        found="readable" if good else "not readable",
        remedy=""
        if good
        else "enable schedstat: else --clock cpu reports a busy core as a slow one",
    )


def check_extras() -> Check:
    """Check which extras are installed; a missing package disables its part only."""
    try:
        missing = missing_by_extra()
    except PackageNotFoundError:
        return Check(
            name="extras",
            health=Health.LIMITED,
            found="pacekeeper is not installed as a package",
            remedy="install its wheel",
        )
    complete = [extra for extra, names in missing.items() if not names]
    partial = [f"{extra} without {', '.join(names)}" for extra, names in missing.items() if names]
    return Check(
        name="extras",
        health=Health.OK if complete else Health.LIMITED,
        found="; ".join([", ".join(complete) or "none is complete", *partial]),
        remedy="run `pip install 'pacekeeper[EXTRA]'` for the parts that run here"
        if partial
        else "",
    )


def check_torch() -> Check:
    """Check for torch, needed by ranks only, without importing it."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check(
            name="torch",
            health=Health.LIMITED,
            found="not installed",
            remedy="to train, install torch or pacekeeper[trainer]; agent and controller need none",
        )
    return Check(name="torch", health=Health.OK, found=found)


def check_nvml() -> Check:
    """Check NVML: without it slow GPUs are detected, but their causes are not."""
    from pacekeeper.agent.nvml.client import NvmlUnavailable, open_nvml
    from pacekeeper.agent.nvml.device import DriverGoneError

    nvml = open_nvml()
    if isinstance(nvml, NvmlUnavailable):
        return Check(
            name="nvml",
            health=Health.LIMITED,
            found=nvml.reason,
            remedy="on a GPU node, install the NVIDIA driver; all else works without GPU",
        )
    try:
        found = f"{sum(not device.is_lost for device in nvml.sample(time.monotonic()))} devices"
    except DriverGoneError as error:
        return Check(
            name="nvml",
            health=Health.LIMITED,
            found=f"the driver was unloaded: {error}",
            remedy="load the NVIDIA driver again; the agent reconnects by itself",
        )
    finally:
        nvml.close()
    return Check(
        name="nvml",
        health=Health.LIMITED if nvml.lost else Health.OK,
        found="; ".join((found, *nvml.lost)),
        remedy="reset or replace it; `pacekeeper healthcheck` reports it to the scheduler"
        if nvml.lost
        else "",
    )


def check_grpc() -> Check:
    """Check for the native protobuf runtime; the pure-Python one is about 200 times slower."""
    try:
        from google.protobuf.internal import api_implementation
    except ModuleNotFoundError:
        return Check(
            name="grpc",
            health=Health.LIMITED,
            found="not installed",
            remedy="install the extra of what runs here: agent, controller or cli",
        )
    kind = api_implementation.Type()
    return Check(
        name="grpc",
        health=Health.OK if kind == "upb" else Health.LIMITED,
        found=f"grpcio {version('grpcio')}, protobuf {version('protobuf')} ({kind})",
        remedy="" if kind == "upb" else "install a protobuf wheel with its native runtime",
    )


def check_port(port: int, service: str) -> Check:
    """Check that a default port is free; a used one may belong to the service itself."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                name=f"port {port}",
                health=Health.LIMITED,
                found=error.strerror or str(error),
                remedy=f"the {service} may already run here; otherwise choose another port",
            )
    return Check(name=f"port {port}", health=Health.OK, found=f"free ({service})")


def check_resolver() -> Check:
    """Check the time of a reverse look-up: a slow resolver delays the start of training."""
    began_s = time.monotonic()
    with contextlib.suppress(OSError):  # "unknown" is a quick answer
        socket.gethostbyaddr("127.0.0.1")
    took_s = time.monotonic() - began_s
    slow = took_s > SLOW_LOOKUP_S
    return Check(
        name="resolver",
        health=Health.LIMITED if slow else Health.OK,
        found=f"reverse look-up took {format_s(took_s)}",
        remedy='set RES_OPTIONS="timeout:1 attempts:1" (launch does)' if slow else "",
    )


def check_open_files() -> Check:
    """Check the limit of open files; a controller holds one connection per node."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    good = limit >= MIN_OPEN_FILES or limit == resource.RLIM_INFINITY
    return Check(
        name="open files",
        health=Health.OK if good else Health.LIMITED,
        found=f"limit {limit}",
        remedy="" if good else f"for a controller of many nodes set ulimit -n {MIN_OPEN_FILES}",
    )


def _num_records(path: Path) -> int:
    """Count the valid records of a ring.

    Raises:
        OSError, VersionError, ValueError: the ring is unreadable, of another version, or damaged.
    """
    if not path.is_file():  # reading a pipe would block
        raise ValueError("not a regular file")
    valid, damaged = _slots(path.read_bytes())
    if damaged:  # or being written: then valid at the next read
        time.sleep(REREAD_S)
        valid, again = _slots(path.read_bytes())
        damaged &= again
    if damaged:
        raise ValueError(f"{len(damaged)} damaged records and {len(valid)} valid ones")
    return len(valid)


def _slots(data: bytes) -> tuple[set[int], set[int]]:
    """Return the sequence numbers of valid and of damaged records."""
    if len(data) != shm_ring.FILE_BYTES:
        raise ValueError(f"{len(data)} bytes instead of {shm_ring.FILE_BYTES}")
    shm_ring.decode_header(data[: shm_ring.COMMAND_OFFSET])
    valid, damaged = set(), set()
    for slot in range(shm_ring.SLOT_COUNT):
        at = shm_ring.slot_offset(slot)
        (sequence,) = shm_ring.SEQUENCE.unpack_from(data, at)
        if sequence == 0:
            continue  # empty, or being written
        try:
            shm_ring.decode_slot(
                sequence - 1, sequence, data[at : at + shm_ring.SLOT_BYTES], sequence
            )
            valid.add(sequence)
        except shm_ring.CorruptError:
            damaged.add(sequence)
    return valid, damaged


def _filesystem_of(path: Path) -> str:
    """Return the type of the file system that holds a path."""
    best, kind = "", "an unknown file system"
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    resolved = str(path.resolve())
    for line in mounts:
        _, point, type_, *_ = line.split()
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) > len(best):
            best, kind = point, type_
    return kind
