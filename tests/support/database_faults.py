"""What comes between a controller and its database: a proxy that loses bytes, a pooler.

Also a clock of the server that is set by a file (Debian: faketime), and a small file system that
can be filled (needs the right to mount).
"""

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg

from support.ports import free_port
from support.postgres import Cluster, as_nobody, open_root

LOOK_S = 0.02
FENCE = b"FOR KEY SHARE"
READY = b"Z\x00\x00\x00\x05I"  # ends a handshake
ANSWERED_WRITES = re.compile(rb"COMMIT|UPDATE leases")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class DatabaseProxy:
    """A TCP proxy before a database server. What it discards it has acknowledged before.

    Attributes:
        loses_requests: Nothing more reaches the server.
        loses_answers: Nothing more reaches the client.
        loses_writers: As both, of connections that sent a fence: the lease's connection goes on.
        loses_next: As `loses_answers`, of connections made from now on, after their handshake.
        loses_commits: A COMMIT or a write of the lease is done, its answer is replaced by a reset.
        num_effects: Connections reset, pieces of data discarded, answers replaced and freezes.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.loses_requests = self.loses_answers = False
        self.loses_writers = self.loses_commits = self.loses_next = False
        self.num_effects = self._num_open = 0
        self._counting = threading.Lock()
        self._freezes: int | None = None
        self.has_frozen = threading.Event()
        self._generation = 0  # connections of an earlier one are reset
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Reset all connections; new ones are served."""
        self._count(self._num_open)
        self._generation += 1

    def freeze_in_transaction(self, pid: int) -> None:
        """SIGSTOP the process when its next write transaction has passed the fence."""
        self.has_frozen.clear()
        self._freezes = pid

    def heal(self) -> None:
        """Lose nothing more; connections that have lost bytes are reset."""
        is_hurt = self.loses_requests or self.loses_answers or self.loses_writers
        is_hurt = is_hurt or self.loses_next
        self.loses_requests = self.loses_answers = self.loses_writers = False
        self.loses_commits, self.loses_next, self._freezes = False, False, None
        if is_hurt:
            self._generation += 1

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _count(self, number: int = 1) -> None:
        with self._counting:
            self.num_effects += number

    def _accept(self) -> None:
        while not self._is_over:
            if not select.select([self._listener], [], [], LOOK_S)[0]:
                continue
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _reset(client)
                continue
            thread = threading.Thread(target=self._serve, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        generation, is_writer, is_fenced, is_write = self._generation, False, False, False
        is_next, is_ready = self.loses_next, False
        with self._counting:
            self._num_open += 1
        try:
            while not self._is_over and generation == self._generation:
                for source in select.select([client, server], [], [], LOOK_S)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    is_request = source is client
                    if is_request:
                        is_fenced = FENCE in data
                        is_writer = is_writer or is_fenced
                        is_write = ANSWERED_WRITES.search(data) is not None
                    elif is_write and self.loses_commits:
                        self._count()
                        return
                    elif is_fenced and self._freezes is not None:
                        pid, self._freezes = self._freezes, None
                        os.kill(pid, signal.SIGSTOP)
                        self._count()
                        self.has_frozen.set()
                    is_lost = self.loses_requests if is_request else self.loses_answers
                    is_lost = is_lost or (is_next and is_ready and not is_request)
                    if is_lost or (is_writer and self.loses_writers):
                        self._count()
                    else:
                        (server if is_request else client).sendall(data)
                    is_ready = is_ready or (not is_request and data.endswith(READY))
        except OSError:
            pass
        finally:
            with self._counting:
                self._num_open -= 1
            _reset(client)
            _reset(server)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


class Pooler:
    """pgbouncer in transaction mode before a server; None of `found` where it is missing."""

    @staticmethod
    def found() -> str | None:
        return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")

    def __init__(self, folder: Path, target: int) -> None:
        self.port, self._folder = free_port(), folder
        folder.chmod(0o755)
        (folder / "users").write_text('"postgres" ""\n')
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={target}\n"
            f"[pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={self.port}\nunix_socket_dir=\n"
            f"auth_type=trust\nauth_file={folder}/users\npool_mode=transaction\n"
            "server_login_retry=1\nserver_check_delay=0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        program = self.found()
        assert program is not None, "pgbouncer is missing"
        with (self._folder / "log").open("ab") as log:
            command = [*as_nobody(), program, "-q", str(self._folder / "pgbouncer.ini")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(url, connect_timeout=2, prepare_threshold=None).close()
                return
            assert self._process.poll() is None, (self._folder / "log").read_text()

    def kill(self) -> int:
        """The exit code."""
        assert self._process is not None
        self._process.kill()
        return self._process.wait()


def faketime() -> Path | None:
    """Debian's libfaketime."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found else None


class MovedClock:
    """The wall clock of processes that start with `environment`: `set` moves it while they run.

    While it is ahead, faketime keeps the server's own timers (idle_in_transaction_session_timeout)
    from firing, which a real clock does not: move it back before anything depends on them. With
    the monotonic clock left alone, as here, clock_nanosleep fails with EINVAL (0.9.10), so Python's
    time.sleep does; waits for locks and in poll are right.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        folder.mkdir(mode=0o755)
        self._file = folder / "clock"
        self.set("+0")
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset: str) -> None:
        """As `-1h` or `+60`."""
        new = self._file.with_suffix(".new")
        new.write_text(offset)
        new.chmod(0o644)
        new.replace(self._file)

    def is_of(self, pid: int) -> bool:
        """Whether the process has loaded the library."""
        return "libfaketime" in Path(f"/proc/{pid}/maps").read_text()


class SmallDisk:
    """A mounted tmpfs that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self) -> None:
        """Not a byte is left."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[SmallDisk | None]:
    """A file system of this size; None where this user may not mount one."""
    with tempfile.TemporaryDirectory(prefix="disk-", dir=open_root()) as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", folder]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            yield None
            return
        try:
            yield SmallDisk(Path(folder))
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def restart(server: Cluster, how: str, while_down: Callable[[], None] = lambda: None) -> None:
    """Stop a server (`fast`: in order, `immediate`: a crash), and start it again."""
    server.stop(how)
    while_down()
    server.start()
