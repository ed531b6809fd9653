"""`pacekeeper doctor`: what works on this machine, what does not, and what to do about it."""

import contextlib
import json
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from pacekeeper.cli.common.extras import missing_by_extra
from pacekeeper.cli.doctor.checks import Check, Health, table, worst
from pacekeeper.core.addresses import GRPC_PORT, METRICS_PORT
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.errors import ExitCode, VersionError
from pacekeeper.core.telemetry import shm_ring

SLOW_LOOKUP_S = 1.0
FEW_FILES = 65536
MAX_NAMED_RINGS = 4
REREAD_S = 0.01


@click.command()
@click.option("--ring-dir", default=AgentConfig().ring_dir, show_default=True)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False),
    help="TOML: check what a controller, an agent or a command would run with, not this machine.",
)
@click.option(
    "--as",
    "whose",
    type=click.Choice(["controller", "agent", "client"]),
    multiple=True,
    help="Who reads --config; repeatable [default: those whose tables it has].",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def command(
    ctx: click.Context,
    ring_dir: str,
    config_file: str | None,
    whose: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what works on this machine and what does not, and what to do.

    Ends with code 4 where a part of pacekeeper can not run here or a ring holds damaged records,
    with code 5 where a ring is of another version. With --config it checks the file as who reads it
    would, on this machine and as this user, and starts nothing: code 3 where the file, or one that
    it names, is wrong, 4 where this machine refuses, 5 for a store of another version, 6 where a
    controller or the lease's store does not answer, 11 where it refuses us. The highest counts.
    """
    if config_file is None:
        if whose:
            raise click.UsageError("--as says who reads --config FILE")
        checks = run_checks(Path(ring_dir))
    else:
        from pacekeeper.cli.doctor.config_checks import check_config

        checks = check_config(config_file, whose)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks]))
    else:
        from rich.console import Console

        Console().print(table(checks))
    ctx.exit(int(worst(checks)))


def run_checks(ring_dir: Path) -> tuple[Check, ...]:
    """All checks, in the order people read them. None of them changes anything for good."""
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
        lambda: check_port(GRPC_PORT, "controller"),
        lambda: check_port(METRICS_PORT, "agent's metrics"),
        check_resolver,
        check_open_files,
    )
    return tuple(probe() for probe in probes)


def check_python() -> Check:
    """pacekeeper needs Python 3.11."""
    good = sys.version_info >= (3, 11)
    return Check(
        name="python",
        health=Health.OK if good else Health.BROKEN,
        found=platform.python_version(),
        remedy="" if good else "install Python 3.11 or newer",
    )


def check_cores() -> Check:
    """Ranks on CPU want a core each; the emulated clock makes do with less."""
    cores = len(os.sched_getaffinity(0))
    enough = cores >= 2
    return Check(
        name="cores",
        health=Health.OK if enough else Health.LIMITED,
        found=f"{cores} usable",
        remedy="" if enough else "the demo's emulated clock will overrun on one core",
    )


def check_ring_dir(ring_dir: Path) -> Check:
    """Ranks and agent share files there; on a disk every record would cost an I/O."""
    try:
        parent = next(p for p in (ring_dir, *ring_dir.parents) if p.exists())
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        return Check(
            name="ring directory",
            health=Health.BROKEN,
            found=f"{ring_dir}: {error.strerror}",
            remedy="make it writable for agent and ranks, or name another with --ring-dir",
        )
    kind = _filesystem_of(parent)
    return Check(
        name="ring directory",
        health=Health.OK if kind == "tmpfs" else Health.LIMITED,
        found=f"{ring_dir} on {kind}",
        remedy="" if kind == "tmpfs" else "choose a directory on tmpfs, such as /dev/shm",
    )


def check_rings(ring_dir: Path) -> Check:
    """Rings of another version or damaged ones: the agent reports them and goes on, as training
    does; here they are an error.
    """
    num_rings, num_records, damaged = 0, 0, []
    try:
        paths = sorted(ring_dir.glob("*/*.ring"))
    except OSError:  # the check of the directory says why
        paths = []
    for path in paths:
        try:
            num_records += _num_records(path)
        except (OSError, VersionError, ValueError) as error:
            if not os.path.lexists(path):
                continue  # a launch has cleared it away meanwhile
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
            remedy="remove rings of jobs that are over; restart the ranks of those that run",
            exit_code=max(code for code, _ in damaged),
        )
    return Check(
        name="rings", health=Health.OK, found=f"{num_rings} with {num_records} whole records"
    )


def check_run_queue() -> Check:
    """With the CPU clock the kernel tells a busy core from a slow one."""
    good = Path("/proc/thread-self/schedstat").exists()
    return Check(
        name="run-queue times",
        health=Health.OK if good else Health.LIMITED,
        found="readable" if good else "not readable",
        remedy="" if good else "--clock cpu can not tell a competitor from a slow core",
    )


def check_extras() -> Check:
    """Which extras are installed; a package that is missing from one disables that part only."""
    try:
        missing = missing_by_extra()
    except PackageNotFoundError:
        return Check(
            name="extras",
            health=Health.LIMITED,
            found="pacekeeper runs without being installed",
            remedy="install its wheel",
        )
    whole = [extra for extra, names in missing.items() if not names]
    partial = [f"{extra} without {', '.join(names)}" for extra, names in missing.items() if names]
    return Check(
        name="extras",
        health=Health.OK if whole else Health.LIMITED,
        found="; ".join([", ".join(whole) or "none is complete", *partial]),
        remedy="run `pip install 'pacekeeper[EXTRA]'` for what is to run here" if partial else "",
    )


def check_torch() -> Check:
    """Needed by ranks only; found without importing it, which takes seconds."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check(
            name="torch",
            health=Health.LIMITED,
            found="not installed",
            remedy="agent and controller run; to train, install your torch or pacekeeper[trainer]",
        )
    return Check(name="torch", health=Health.OK, found=found)


def check_nvml() -> Check:
    """Without NVML a slow GPU is still found, but its cause stays unknown."""
    from pacekeeper.agent.nvml.client import NvmlUnavailable, open_nvml
    from pacekeeper.agent.nvml.device import DriverGoneError

    nvml = open_nvml()
    if isinstance(nvml, NvmlUnavailable):
        return Check(
            name="nvml",
            health=Health.LIMITED,
            found=nvml.reason,
            remedy="on a GPU node: install the NVIDIA driver; without GPU all else works",
        )
    try:
        found = f"{sum(not device.is_lost for device in nvml.sample(time.monotonic()))} devices"
    except DriverGoneError as error:
        return Check(
            name="nvml",
            health=Health.LIMITED,
            found=f"the driver is gone: {error}",
            remedy="load the NVIDIA driver again; the agent comes back by itself",
        )
    finally:
        nvml.close()
    return Check(
        name="nvml",
        health=Health.LIMITED if nvml.lost else Health.OK,
        found="; ".join((found, *nvml.lost)),
        remedy="reset or replace it: `pacekeeper healthcheck` tells who drains nodes"
        if nvml.lost
        else "",
    )


def check_grpc() -> Check:
    """The pure-Python protobuf runtime is some 200 times slower."""
    try:
        from google.protobuf.internal import api_implementation
    except ModuleNotFoundError:
        return Check(
            name="grpc",
            health=Health.LIMITED,
            found="not installed",
            remedy="agent, controller and their clients need it: `pip install 'pacekeeper[EXTRA]'`",
        )
    kind = api_implementation.Type()
    return Check(
        name="grpc",
        health=Health.OK if kind == "upb" else Health.LIMITED,
        found=f"grpcio {version('grpcio')}, protobuf {version('protobuf')} ({kind})",
        remedy="" if kind == "upb" else "install a protobuf wheel with its native runtime",
    )


def check_port(port: int, whose: str) -> Check:
    """Is the default port free? A taken one may well be our own service."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                name=f"port {port}",
                health=Health.LIMITED,
                found=error.strerror or str(error),
                remedy=f"the {whose} may already run here; else name another port",
            )
    return Check(name=f"port {port}", health=Health.OK, found=f"free ({whose})")


def check_resolver() -> Check:
    """The training store looks its peers up by address; a stalling resolver delays each start."""
    began_s = time.monotonic()
    with contextlib.suppress(OSError):  # "not known" is an answer, too
        socket.gethostbyaddr("127.0.0.1")
    took_s = time.monotonic() - began_s
    slow = took_s > SLOW_LOOKUP_S
    return Check(
        name="resolver",
        health=Health.LIMITED if slow else Health.OK,
        found=f"reverse look-up took {took_s:.2f} s",
        remedy='set RES_OPTIONS="timeout:1 attempts:1" (launch does)' if slow else "",
    )


def check_open_files() -> Check:
    """A controller holds one connection per node."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    good = limit >= FEW_FILES or limit == resource.RLIM_INFINITY
    return Check(
        name="open files",
        health=Health.OK if good else Health.LIMITED,
        found=f"limit {limit}",
        remedy="" if good else f"a controller of many nodes wants ulimit -n {FEW_FILES}",
    )


def _num_records(path: Path) -> int:
    """Whole records in a ring. Raises OSError, VersionError or ValueError for what is wrong."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("not a regular file")
    whole, damaged = _slots(path.read_bytes())
    if damaged:  # or just being written: that is over by now
        time.sleep(REREAD_S)
        whole, again = _slots(path.read_bytes())
        damaged &= again
    if damaged:
        raise ValueError(f"{len(damaged)} damaged records beside {len(whole)} whole ones")
    return len(whole)


def _slots(data: bytes) -> tuple[set[int], set[int]]:
    """Sequence numbers of whole and of damaged records. Raises VersionError or ValueError."""
    if len(data) != shm_ring.FILE_BYTES:
        raise ValueError(f"{len(data)} bytes, a ring has {shm_ring.FILE_BYTES}")
    shm_ring.decode_header(data[: shm_ring.COMMAND_OFFSET])
    whole, damaged = set(), set()
    for slot in range(shm_ring.SLOT_COUNT):
        at = shm_ring.slot_offset(slot)
        (sequence,) = shm_ring.SEQUENCE.unpack_from(data, at)
        if sequence == 0:
            continue  # empty, or being written
        try:
            shm_ring.decode_slot(
                sequence - 1, sequence, data[at : at + shm_ring.SLOT_BYTES], sequence
            )
            whole.add(sequence)
        except shm_ring.CorruptError:
            damaged.add(sequence)
    return whole, damaged


def _filesystem_of(path: Path) -> str:
    """Type of the file system a path lies on, from the longest mount point above it."""
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
