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
from collections.abc import Iterator, Mapping
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

    def __init__(
        self,
        programs: Path,
        folder: Path,
        *settings: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._programs, self._folder = programs, folder
        # Set as `nobody`: what a preloaded library shares by name must not be root's.
        self._environment = ["env", *(f"{k}={v}" for k, v in (environment or {}).items())]
        self._as_user = as_nobody()
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
            program = [*self._environment, str(self._programs / "postgres")]
            command = [*self._as_user, *program, "-D", self._data, *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                self.admin().close()
                return
            assert self._process.poll() is None, (self._folder / "log").read_text()

    def stop(self, how: str = "fast") -> None:
        """`fast`: an orderly end; `immediate`: a crash, with recovery at the next start."""
        assert self._process is not None
        if self._process.poll() is None:
            self._run("pg_ctl", "stop", "-m", how, "-w")
        self._process.wait()

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process is not None and self._process.poll() is None

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


def open_root() -> str | None:
    """Where folders are made that `nobody` may enter: the tests' own one is closed."""
    return os.environ.get("PYTEST_DEBUG_TEMPROOT")


def as_nobody() -> list[str]:
    """The beginning of a command that root runs as `nobody`: servers refuse to run as root."""
    if os.getuid():
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@contextlib.contextmanager
def cluster(
    *settings: str, root: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A private server; skips, or fails in CI, where there are no programs.

    Args:
        *settings: As in postgresql.conf.
        root: The directory to make its folder in.
        environment: More variables of the server.
    """
    programs = server_folder()
    if programs is None:
        if os.environ.get("PACEKEEPER_NEEDS_POSTGRES"):
            pytest.fail("no PostgreSQL server is installed, and this run needs one")
        pytest.skip("needs a PostgreSQL server: apt-get install postgresql")
    where = root or open_root()
    with tempfile.TemporaryDirectory(prefix="pg-", dir=where, ignore_cleanup_errors=True) as folder:
        made = Cluster(programs, Path(folder), *settings, environment=environment)
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
