"""A PostgreSQL for tests: the one of PACEKEEPER_TEST_POSTGRES, else a private cluster, else skip.

Debian's server programs are found; root runs them as `nobody`. Where PACEKEEPER_NEEDS_POSTGRES is
set (CI), a missing server fails the run.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from support.ports import free_port

NOBODY = 65534
SETTINGS = ("unix_socket_directories=", "listen_addresses=127.0.0.1", "max_connections=50")


def server_folder() -> Path | None:
    """Where `postgres` and `initdb` are."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    named = shutil.which("initdb")
    return found[0].parent if found else Path(named).resolve().parent if named else None


class Cluster:
    """One server on a port of its own; its data is durable as by default."""

    def __init__(self, programs: Path, folder: Path, *settings: str) -> None:
        self._programs, self._folder = programs, folder
        self._as_user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        self._as_user = self._as_user if os.getuid() == 0 else []
        self.port = free_port()
        self._settings = (*SETTINGS, f"port={self.port}", *settings)
        self._process: subprocess.Popen[bytes] | None = None
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        self._run("initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C")

    def start(self) -> None:
        """Returns when it answers."""
        options = [word for setting in self._settings for word in ("-c", setting)]
        with (self._folder / "log").open("ab") as log:
            command = [*self._as_user, str(self._programs / "postgres"), "-D", self._data, *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                self.admin().close()
                return
            assert self._process.poll() is None, (self._folder / "log").read_text()

    def stop(self, how: str = "fast") -> None:
        """`fast`: an orderly end; `immediate`: a crash, with recovery at the next start."""
        self._run("pg_ctl", "stop", "-m", how, "-w")
        assert self._process is not None
        self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def admin(self, database: str = "postgres") -> "psycopg.Connection[tuple[object, ...]]":
        """A connection of the server's owner."""
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=2)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *options: str) -> None:
        command = [*self._as_user, str(self._programs / program), "-D", self._data, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def cluster(*settings: str) -> Iterator[Cluster]:
    """A private server; skips, or fails in CI, where there are no programs."""
    programs = server_folder()
    if programs is None:
        if os.environ.get("PACEKEEPER_NEEDS_POSTGRES"):
            pytest.fail("no PostgreSQL server is installed, and this run needs one")
        pytest.skip("needs a PostgreSQL server: apt-get install postgresql")
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")  # `nobody` may not enter the tests' own folder
    with tempfile.TemporaryDirectory(prefix="pg-", dir=root, ignore_cleanup_errors=True) as folder:
        made = Cluster(programs, Path(folder), *settings)
        made.start()
        try:
            yield made
        finally:
            with contextlib.suppress(AssertionError):
                made.stop("immediate")


@contextlib.contextmanager
def server_url() -> Iterator[str]:
    """The server that all tests of a process share."""
    if named := os.environ.get("PACEKEEPER_TEST_POSTGRES"):
        yield named
        return
    with cluster("fsync=off") as made:
        yield made.url()


def new_database(server: str) -> str:
    """The URL of an empty database, of one test."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    return f"{server.rpartition('/')[0]}/{name}"
