"""A network of nodes on this computer that can really be torn apart: one namespace per node.

All in a user namespace of its own: nobody needs to be root, and nothing is left behind.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

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
Process = subprocess.Popen[str]


class Network:
    """Nodes 0, 1, ... at 10.77.0.1, 10.77.0.2, ... on one switch; use as a context manager.

    Skips the test where the kernel or its settings do not allow it.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._nodes: list[Process] = []

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
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._nodes, self._switch]:
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


def _start(line: list[str]) -> Process:
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _inside(process: Process, line: Sequence[str]) -> list[str]:
    return ["nsenter", "-t", str(process.pid), "-U", "--preserve-credentials", "-n", *line]


def _line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
