"""A network of nodes on this computer that can really be torn apart or slowed: one namespace each.

All in a user namespace of its own: nobody needs to be root, and nothing is left behind.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

INTERFACE = "eth0"
_NAMESPACES = {"user": 0x10000000, "net": 0x40000000}  # CLONE_NEWUSER, CLONE_NEWNET
_SWITCH = """
set -e
ip link add switch type bridge
ip link set switch up
echo ready
while read -r line; do $line; echo done; done
"""
_NODE = "echo ready; read -r line"
_OFFLOADS = """
import ctypes, fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    for command in (0x17, 0x1F, 0x24):  # checksums, TCP segments, segments
        value = ctypes.create_string_buffer(struct.pack("II", command, 0))
        request = struct.pack("16sQ16x", sys.argv[1].encode(), ctypes.addressof(value))
        fcntl.ioctl(end, 0x8946, request)  # SIOCETHTOOL
"""
PROXY = Path(__file__).with_name("link_proxy.py")
BURST = "16kb"  # less than a message of a probe
Process = subprocess.Popen[str]


class Network:
    """Nodes 0, 1, ... at 10.77.0.1, 10.77.0.2, ... on one switch; use as a context manager.

    The links of `proxied` nodes pass a process that can delay, limit and lose their frames.

    Skips the test where the kernel or its settings do not allow it.
    """

    def __init__(self, num_nodes: int, *, proxied: Sequence[int] = ()) -> None:
        self._num_nodes, self._proxied = num_nodes, proxied
        self._nodes: list[Process] = []
        self._proxies: dict[int, Process] = {}

    def __enter__(self) -> "Network":
        if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
            pytest.skip("needs unshare, nsenter and ip")
        self._switch = _start(["unshare", "-r", "-n", "sh", "-c", _SWITCH])
        if _line(self._switch) != "ready":
            self.__exit__()
            pytest.skip("no network namespaces of one's own here")
        for node in range(self._num_nodes):
            process = _start(_inside(self._switch, ["unshare", "-n", "sh", "-c", _NODE]))
            self._nodes.append(process)
            assert _line(process) == "ready"
            ends = f"port{node} type veth peer name {INTERFACE} netns {process.pid}"
            self._tell(f"ip link add {ends}")
            self._tell(f"ip link set port{node} master switch up")
            address = f"{self.host(node)}/24"
            for words in (
                ["link", "set", "lo", "up"],
                ["address", "add", address, "dev", INTERFACE],
                ["link", "set", INTERFACE, "up"],
            ):
                subprocess.run(_inside(process, ["ip", *words]), check=True, timeout=30.0)
        for node in self._proxied:
            self._put_between(node)
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._proxies.values(), *self._nodes, self._switch]:
            process.kill()
            process.communicate()

    def host(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def keeper(self, node: int) -> int:
        """The process that keeps a node, for `move_to`."""
        return self._nodes[node].pid

    def cut_off(self, node: int) -> None:
        """No byte goes to or from the node any more, and no connection breaks."""
        self._tell(f"ip link set port{node} nomaster")

    def limit(self, node: int, bytes_per_s: float) -> None:
        """Limit the node's link in both directions by the kernel's token bucket; 0: no limit.

        Skips the test where the kernel has none.
        """
        inside = _inside(self._nodes[node], ["tc"])
        for line, device in ((_inside(self._switch, ["tc"]), f"port{node}"), (inside, INTERFACE)):
            words = ["qdisc", "del", "dev", device, "root"]
            if bytes_per_s:
                rate = f"{round(bytes_per_s * 8)}bit"
                words = ["qdisc", "replace", "dev", device, "root", "tbf"]
                words += ["rate", rate, "burst", BURST, "latency", "400ms"]
            found = subprocess.run([*line, *words], capture_output=True, text=True, timeout=30.0)
            if found.returncode:
                pytest.skip(f"no token bucket in this kernel: {found.stderr.strip()}")

    def shape(self, node: int, **shape: float | str) -> None:
        """Shape the node's link in userspace; `link_proxy.Shape`. It must be `proxied`."""
        proxy = self._proxies[node]
        assert proxy.stdin is not None
        proxy.stdin.write(json.dumps(shape) + "\n")
        proxy.stdin.flush()
        assert _line(proxy) == "done"

    def _put_between(self, node: int) -> None:
        """Put a proxy between the node's port and the switch."""
        self._tell(f"ip link add inner{node} type veth peer name outer{node}")
        self._tell(f"ip link set port{node} nomaster")
        for name in (f"port{node}", f"inner{node}"):
            self._tell(f"ip link set {name} promisc on up")
        self._tell(f"ip link set outer{node} master switch up")
        for other in range(self._num_nodes):
            _without_offloads(self._nodes[other])
        line = [sys.executable, str(PROXY), f"port{node}", f"inner{node}"]
        self._proxies[node] = _start(_inside(self._switch, line))
        assert _line(self._proxies[node]) == "ready"

    def _tell(self, line: str) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()
        assert _line(self._switch) == "done", line


def move_to(keeper: int) -> None:
    """This process, while it has one thread only, goes to the node that process `keeper` keeps."""
    system = ctypes.CDLL(None, use_errno=True)
    files = {name: os.open(f"/proc/{keeper}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES}
    for name, file in files.items():
        if system.setns(file, _NAMESPACES[name]):
            raise OSError(ctypes.get_errno(), f"can not enter the {name} namespace of {keeper}")
        os.close(file)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _without_offloads(process: Process) -> None:
    """A frame as it is on a wire: one segment with its checksum, for a proxy that reads frames."""
    subprocess.run(
        _inside(process, [sys.executable, "-c", _OFFLOADS, INTERFACE]), check=True, timeout=30.0
    )


def _start(line: list[str]) -> Process:
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _inside(process: Process, line: Sequence[str]) -> list[str]:
    return ["nsenter", "-t", str(process.pid), "-U", "--preserve-credentials", "-n", *line]


def _line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
