"""The agents of a fleet as one C program in this process: load that costs little beside its server.

Python's swarm (`agent_swarm.py`, for what needs its freedom) takes 50 us a report, this one the
system calls. What they tell is made here, once: numbers of steps and times are written into it.
"""

import ctypes
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import fleet_reports
from benchmarks.agent_swarm import METHOD, varint
from benchmarks.fleet_reports import DEVICE_PERIOD, Job
from benchmarks.http2_stream import opening
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert.reports import PROTOCOL_VERSION

SOURCE = Path(__file__).with_suffix(".c")
_TLS = ("-DWITH_TLS", "-lssl", "-lcrypto")
NUM_PROBES, STEP_VARIANTS, MAX_WAITS = 16, 4, 65536  # as the program has them
LOOK_S = 0.05
# Stand for a time and a step until the program writes the real ones: found by their bytes.
_SOME_TIME_S, _SOME_STEP = 1234567.890123, 0x6BCDEF5
_TIME, _STEP = struct.pack("<d", _SOME_TIME_S), varint(_SOME_STEP)
_KERNEL, _HELLO, _GREETING, _DEVICES, _STEPS = -1, 0, 1, 2, 3
_LOSS = _STEPS + STEP_VARIANTS


class Counts(ctypes.Structure):
    """What was seen so far, as `agent_swarm.Counts` has it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("made", "acknowledged", "broken", "refused")),
        *((name, ctypes.c_int64) for name in ("commands", "num_welcome")),
        *((name, ctypes.c_int64) for name in ("num_waits", "num_probes")),
        ("late_s", ctypes.c_double),
        ("waits", ctypes.c_double * MAX_WAITS),
        ("probes", ctypes.c_double * MAX_WAITS),
    ]


def library(folder: Path, *, has_tls: bool = False) -> ctypes.CDLL:
    """The program, built into a folder by the machine's C compiler; TLS needs OpenSSL's headers."""
    built = folder / "fleet_swarm.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(built), str(SOURCE)]
    subprocess.run([*command, *(_TLS if has_tls else ())], check=True)
    found = ctypes.CDLL(str(built))
    found.swarm_new.restype = ctypes.c_void_p
    found.swarm_new.argtypes = (
        *[ctypes.c_int] * 2,
        *[ctypes.c_double] * 2,
        *[ctypes.c_int] * 2,
    )
    found.swarm_counts.restype = ctypes.POINTER(Counts)
    found.swarm_num_waiting.restype = ctypes.c_int64
    for name in ("counts", "drop_all", "num_waiting", "mark", "num_behind", "close"):
        getattr(found, f"swarm_{name}").argtypes = (ctypes.c_void_p,)
    for name in ("attach_within", "run"):
        getattr(found, f"swarm_{name}").argtypes = (ctypes.c_void_p, ctypes.c_double)
    if has_tls:
        found.swarm_tls.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    found.swarm_open_with.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
    found.swarm_lose.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    found.swarm_part.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
        *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int) * 2,
    )
    return found


class FleetSwarm:
    """Agents `node-00000` and on, of jobs of so many nodes each. Not for more than one thread."""

    def __init__(
        self,
        built: ctypes.CDLL,
        port: int,
        num_agents: int,
        *,
        nodes_per_job: int,
        step_every: int,
        interval_s: float = 1.0,
        spread_s: float = 0.0,
    ) -> None:
        """Make the agents; none is connected yet.

        Args:
            built: The program, see `library`.
            port: The controller's, on loopback.
            num_agents: Number of agents.
            nodes_per_job: Agents of one job.
            step_every: Reports between two steps.
            interval_s: Seconds between two reports of one agent.
            spread_s: Seconds over which agents come back after a lost stream.
        """
        self._c, self.num_agents = built, num_agents
        device_every = max(1, round(DEVICE_PERIOD / interval_s))
        self._swarm = built.swarm_new(
            port, num_agents, interval_s, spread_s, device_every, step_every
        )
        self.counts: Counts = built.swarm_counts(self._swarm).contents
        first = opening(METHOD, f"127.0.0.1:{port}")
        built.swarm_open_with(self._swarm, first, len(first))
        self._put(-1, _KERNEL, fleet_reports.kernel(_SOME_TIME_S))
        for at in range(0, num_agents, nodes_per_job):
            nodes = range(at, min(at + nodes_per_job, num_agents))
            job = Job(name=f"job-{at // nodes_per_job}", nodes=nodes, step_every=step_every)
            for place, node in enumerate(nodes):
                self._put(node, _HELLO, _hello(f"node-{node:05d}"))
                self._put(node, _DEVICES, fleet_reports.devices(node, _SOME_TIME_S))
                self._put(node, _GREETING, job.greeting(place))
                for variant in range(STEP_VARIANTS):
                    self._put(node, _STEPS + variant, job.step(place, _SOME_STEP))
        for number in range(NUM_PROBES):
            self._put(num_agents + number, _HELLO, _hello(f"probe-{number}"))

    def speak_tls(self, authority: Path, folder: Path) -> None:
        """Each agent shows its own certificate of a folder, as `names_of` names them."""
        self._c.swarm_tls(self._swarm, str(authority).encode(), str(folder).encode())

    @property
    def num_welcome(self) -> int:
        """Agents that are attached."""
        return int(self.counts.num_welcome)

    @property
    def are_welcome(self) -> bool:
        """Whether all are."""
        return self.num_welcome == self.num_agents

    @property
    def num_waiting(self) -> int:
        """Reports that are not acknowledged yet."""
        return int(self._c.swarm_num_waiting(self._swarm))

    def attach_within(self, spread_s: float) -> None:
        """All begin at a moment of their own in the next seconds."""
        self._c.swarm_attach_within(self._swarm, spread_s)

    def drop_all(self) -> None:
        """Every connection breaks at once; all come back as agents do."""
        self._c.swarm_drop_all(self._swarm)

    def lose_ranks(self, every: int, within: int) -> list[str]:
        """Every so many agents report a killed rank, once, in one of their next `within` reports.

        Returns:
            The jobs of these ranks, one each.
        """
        jobs = list[str]()
        for number, agent in enumerate(range(0, self.num_agents, every)):
            jobs.append(f"loss-{agent:05d}")
            self._put(agent, _LOSS, fleet_reports.lost_rank(jobs[-1]))
            self._c.swarm_lose(self._swarm, agent, 1 + number % within)
        return jobs

    def mark(self) -> None:
        """From now on `num_behind` is about what was told until now."""
        self._c.swarm_mark(self._swarm)

    @property
    def num_behind(self) -> int:
        """Agents that wait for an acknowledgement of what they had told at the mark."""
        return int(self._c.swarm_num_behind(self._swarm))

    def run(self, for_s: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass, or until something holds; how many seconds it took."""
        began_s = time.monotonic()
        while (left_s := began_s + for_s - time.monotonic()) > 0.0:
            if until is not None and until():
                break
            self._c.swarm_run(self._swarm, left_s if until is None else min(left_s, LOOK_S))
        return time.monotonic() - began_s

    def begin_anew(self) -> None:
        """What was counted of waits so far is forgotten."""
        self.counts.num_waits = self.counts.num_probes = 0
        self.counts.late_s = 0.0

    @property
    def welcomes(self) -> list[float]:
        """Seconds from an agent's first byte to its welcome."""
        return list(self.counts.waits[: self.counts.num_waits])

    @property
    def probes(self) -> list[float]:
        """The same, of newcomers."""
        return list(self.counts.probes[: self.counts.num_probes])

    def close(self) -> None:
        """All go, in peace."""
        self._c.swarm_close(self._swarm)

    def _put(self, agent: int, which: int, data: bytes) -> None:
        times, steps = _places(data, _TIME), _places(data, _STEP)
        self._c.swarm_part(
            *(self._swarm, agent, which, data, len(data)),
            *(_numbers(times), len(times), _numbers(steps), len(steps)),
        )


def names_of(num_agents: int) -> list[str]:
    """Of all nodes of a swarm, and of those that only try how long one waits."""
    return [
        *(f"node-{number:05d}" for number in range(num_agents)),
        *(f"probe-{number}" for number in range(NUM_PROBES)),
    ]


def _hello(node: str) -> bytes:
    hello = control_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        product_version="swarm",
        node=node,
        agent_incarnation="swarm",
    )
    return control_pb2.AttachRequest(hello=hello).SerializeToString()


def _places(data: bytes, mark: bytes) -> list[int]:
    found, at = list[int](), data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + len(mark))
    return found


def _numbers(values: list[int]) -> Any:
    return (ctypes.c_int32 * max(1, len(values)))(*values)
