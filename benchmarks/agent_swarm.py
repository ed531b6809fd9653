"""Thousands of agents in one process: a real connection, stream and spool each, cheaply.

They keep to the agent's rules: Hello, the greeting, reports in order, all kept until they are
acknowledged and sent again on the next connection; full jitter before each new try. What they tell
is made by `fleet_reports`.
"""

import heapq
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.http2_stream import Stream, opening
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert.reports import PROTOCOL_VERSION

METHOD = "/pacekeeper.v1.AgentControlService/Attach"
FIRST_BACKOFF_S = 0.2
RECONNECT_MAX_S = 10.0
READ_BYTES = 1 << 16
OPENED_AT_ONCE = 64  # connections between two looks at the others
PROBE_PERIOD_S = 0.5

Body = Callable[[int, float], bytes]
"""What an agent tells at its n-th report, at this time: a NodeReport without number and time."""


@dataclass(slots=True, eq=False, kw_only=True)
class Agent:
    """One node's agent. `body` of number 0 is its greeting."""

    node: str
    body: Body
    phase_s: float = 0.0
    sequence: int = 0
    settled: int = 0  # up to this number all are acknowledged
    spool: deque[tuple[int, bytes]] = field(default_factory=deque)  # not acknowledged
    num_sent: int = 0  # of the spool, on this connection
    wire: socket.socket | None = None
    stream: Stream = field(default_factory=Stream)
    unwritten: bytes = b""
    is_welcome: bool = False
    opened_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    number: int = 0  # in the swarm


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was seen so far. `broken`: streams that the controller ended before it had welcomed
    them; `refused`: connections nobody took; `welcomes`: seconds from the first byte to a welcome.
    """

    made: int = 0
    acknowledged: int = 0
    broken: int = 0
    refused: int = 0
    commands: int = 0
    welcomes: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    late_s: float = 0.0  # the swarm's own: how late it was at most with a report


class Swarm:
    """All agents of a fleet, driven by one loop. Not for more than one thread."""

    def __init__(self, address: tuple[str, int], agents: list[Agent], *, period_s: float) -> None:
        self.address, self.agents, self.period_s = address, agents, period_s
        self.counts = Counts()
        self.random = Random(len(agents))
        self._opening = opening(METHOD, f"{address[0]}:{address[1]}")
        self._poll = select.epoll()
        self._by_fd: dict[int, Agent] = {}
        self._tries: list[tuple[float, int]] = []  # when an agent that is away tries again
        self._next_probe_s = time.monotonic() + PROBE_PERIOD_S
        self._probe: Agent | None = None
        self._num_probes = 0
        self._lap_s, self._at = time.monotonic(), 0
        for i, agent in enumerate(agents):
            agent.number, agent.phase_s = i, i * period_s / len(agents)

    @property
    def num_welcome(self) -> int:
        """Agents that are attached."""
        return sum(agent.is_welcome for agent in self.agents)

    @property
    def num_waiting(self) -> int:
        """Reports that are not acknowledged yet."""
        return sum(len(agent.spool) for agent in self.agents)

    def attach_within(self, spread_s: float) -> None:
        """All begin at a moment of their own in the next seconds."""
        now_s = time.monotonic()
        for i in range(len(self.agents)):
            heapq.heappush(self._tries, (now_s + self.random.uniform(0.0, spread_s), i))

    def drop_all(self) -> None:
        """Every connection breaks at once; all come back as agents do."""
        for agent in self.agents:
            if agent.wire is not None:
                self._lose(agent, now_s=time.monotonic())

    def run(self, for_s: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass, or until something holds; how many seconds it took."""
        began_s = looked_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + for_s:
            if until is not None and now_s - looked_s > 0.05:
                looked_s = now_s
                if until():
                    break
            self._speak(now_s)
            self._connect(now_s)
            self._ask_probe(now_s)
            for fd, events in self._poll.poll(0.001, 4096):
                agent = self._by_fd.get(fd)
                if agent is not None:
                    self._serve(agent, events)
        return time.monotonic() - began_s

    def close(self) -> None:
        """All go, in peace."""
        for agent in list(self._by_fd.values()):
            self._forget(agent)
        self._poll.close()

    def _speak(self, now_s: float) -> None:
        """Reports that are due, attached or not."""
        while True:
            agent = self.agents[self._at]
            due_s = self._lap_s + agent.phase_s
            if due_s > now_s:
                return
            self.counts.late_s = max(self.counts.late_s, now_s - due_s)
            if agent.sequence or agent.is_welcome:  # it begins once it was attached
                agent.sequence += 1
                self.counts.made += 1
                agent.spool.append((agent.sequence, agent.body(agent.sequence, now_s)))
                if agent.is_welcome:
                    self._send_spool(agent, now_s)
            self._at += 1
            if self._at == len(self.agents):
                self._at, self._lap_s = 0, self._lap_s + self.period_s

    def _send_spool(self, agent: Agent, now_s: float) -> None:
        while agent.num_sent < len(agent.spool):
            sequence, body = agent.spool[agent.num_sent]
            agent.num_sent += 1
            self._say(agent, report(sequence, now_s, body))

    def _say(self, agent: Agent, message: bytes) -> None:
        agent.unwritten += agent.stream.send(message)
        self._write(agent)

    def _connect(self, now_s: float) -> None:
        for _ in range(OPENED_AT_ONCE):
            if not self._tries or self._tries[0][0] > now_s:
                return
            _, i = heapq.heappop(self._tries)
            self._open(self.agents[i], now_s)

    def _ask_probe(self, now_s: float) -> None:
        """A newcomer now and then: how long it waits for its welcome is what everybody waits."""
        if now_s < self._next_probe_s:
            return
        self._next_probe_s = now_s + PROBE_PERIOD_S
        if self._probe is None:
            self._num_probes += 1
            self._probe = Agent(node=f"probe-{self._num_probes % 16}", body=lambda _, __: b"")
            self._open(self._probe, now_s)

    def _open(self, agent: Agent, now_s: float) -> None:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect_ex(self.address)
        hello = control_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            product_version="swarm",
            node=agent.node,
            agent_incarnation="swarm",
        )
        agent.wire, agent.stream, agent.opened_s = made, Stream(), now_s
        agent.is_welcome, agent.num_sent = False, 0
        first = control_pb2.AttachRequest(hello=hello).SerializeToString()
        agent.unwritten = self._opening + agent.stream.send(first)
        self._by_fd[made.fileno()] = agent
        self._poll.register(made.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, agent: Agent, events: int) -> None:
        assert agent.wire is not None
        now_s = time.monotonic()
        if events & select.EPOLLOUT:
            self._write(agent)
            if agent.wire is not None and not agent.unwritten:
                self._poll.modify(agent.wire.fileno(), select.EPOLLIN)
        if agent.wire is None or not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = agent.wire.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        messages, answer = agent.stream.take(data)
        for message in messages:
            self._hear(agent, control_pb2.AttachResponse.FromString(message), now_s)
        if not data or agent.stream.is_over:
            self._lose(agent, now_s)
        elif answer and agent.wire is not None:
            agent.unwritten += answer
            self._write(agent)

    def _hear(self, agent: Agent, message: control_pb2.AttachResponse, now_s: float) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                agent.is_welcome, agent.backoff_s = True, FIRST_BACKOFF_S
                if agent is self._probe:
                    self.counts.probes.append(now_s - agent.opened_s)
                    self._forget(agent)
                    self._probe = None
                    return
                self.counts.welcomes.append(now_s - agent.opened_s)
                self._say(agent, report(agent.settled, now_s, agent.body(0, now_s)))
                self._send_spool(agent, now_s)
            case "acknowledge":
                while agent.spool and agent.spool[0][0] <= message.acknowledge.sequence:
                    agent.settled, _ = agent.spool.popleft()
                    agent.num_sent -= 1
                    self.counts.acknowledged += 1
            case _:
                self.counts.commands += 1

    def _write(self, agent: Agent) -> None:
        if agent.wire is None or not agent.unwritten:
            return
        try:
            sent = agent.wire.send(agent.unwritten)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose(agent, time.monotonic())
            return
        agent.unwritten = agent.unwritten[sent:]
        if agent.unwritten:
            self._poll.modify(agent.wire.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _lose(self, agent: Agent, now_s: float) -> None:
        """Its connection broke: it tries again after a while, longer each time."""
        if agent.stream.is_over and not agent.is_welcome:
            self.counts.broken += 1
        elif not agent.is_welcome:
            self.counts.refused += 1
        self._forget(agent)
        if agent is self._probe:
            self._probe = None
            return
        retry_s = now_s + self.random.uniform(0.0, agent.backoff_s)
        heapq.heappush(self._tries, (retry_s, agent.number))
        agent.backoff_s = min(RECONNECT_MAX_S, agent.backoff_s * 2.0)

    def _forget(self, agent: Agent) -> None:
        if agent.wire is not None:
            del self._by_fd[agent.wire.fileno()]
            agent.wire.close()  # the poll forgets it, too
        agent.wire, agent.is_welcome, agent.unwritten = None, False, b""


def report(sequence: int, now_s: float, body: bytes) -> bytes:
    """An AttachRequest with a NodeReport: messages merge when their bytes are joined."""
    numbered = control_pb2.AttachRequest()
    numbered.report.sequence = sequence
    numbered.report.sent_mono_s = now_s
    head = numbered.report.SerializeToString()
    return b"\x12" + varint(len(head) + len(body)) + head + body


def varint(value: int) -> bytes:
    """As protobuf writes lengths."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
