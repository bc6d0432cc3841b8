"""A real PostgreSQL server for tests, from the packages of this machine, on a Unix socket.

The server listens on no TCP port, and its directory is deleted after the tests. The server syncs
nothing, because these tests kill processes, not the machine. PostgreSQL does not run as root. If
root runs the tests, the server runs as `postgres` or `nobody`.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S

PACKAGES_DIRECTORY = Path("/usr/lib/postgresql")
SERVER_USERS = ("postgres", "nobody")
CLOSE_TIMEOUT_S = 30.0
# The kernel already has all data that a killed server has committed.
SERVER_SETTINGS = ("fsync=off", "full_page_writes=off", "max_connections=60")


def find_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL programs; None if there is none."""
    paths = [path for path in PACKAGES_DIRECTORY.glob("*/bin") if (path / "initdb").exists()]
    paths.sort(key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    if on_path is not None and shutil.which("postgres") is not None:
        paths.append(Path(on_path).resolve().parent)
    return paths[-1] if paths else None


def find_server_user() -> pwd.struct_passwd | None:
    """Return the user that runs the server: the current user, or another user in place of root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in SERVER_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


_database_numbers = itertools.count(1)


class PostgresServer:
    """A server on a directory."""

    def __init__(self, find_programs: Path, directory: Path, user: pwd.struct_passwd) -> None:
        self.directory = directory
        self._programs = find_programs
        self._run_options: dict[str, Any] = {"cwd": directory}
        if os.geteuid() == 0:
            self._run_options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._server: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Create its data directory."""
        command = [str(self._programs / "initdb"), "--auth=trust", "--username=waltz", "--no-sync"]
        command += ["--encoding=UTF8", "--locale=C", f"--pgdata={self.directory / 'data'}"]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT_S,
            **self._run_options,
        )
        assert result.returncode == 0, result.stderr

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        log = self.directory / "log"
        command = [str(self._programs / "postgres"), "-D", str(self.directory / "data")]
        command += ["-k", str(self.directory), "-c", "listen_addresses="]
        command += [part for server_setting in SERVER_SETTINGS for part in ("-c", server_setting)]
        with log.open("ab") as output:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **self._run_options,
            )
        self._server = server
        wait_until("PostgreSQL answers", lambda: server.poll() is not None or self.answers())
        assert server.poll() is None, log.read_text()

    def stop(self) -> None:
        """Kill the server, with all connections."""
        server, self._server = self._server, None
        if server is None:
            return
        if server.poll() is None:
            server.send_signal(signal.SIGQUIT)
        try:
            server.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def url(self, database: str) -> str:
        """Return SQLAlchemy's URL of a database."""
        return f"postgresql+psycopg://waltz@/{database}?host={self.directory}"

    def create(self) -> str:
        """Create a database; return its URL."""
        database = f"waltz_{next(_database_numbers)}"
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{database}"')
        return self.url(database)

    def connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        """Return a connection to the default database."""
        return psycopg.connect(
            host=str(self.directory), user="waltz", dbname="postgres", autocommit=True
        )

    def answers(self) -> bool:
        """Return whether the server accepts connections."""
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


@contextlib.contextmanager
def run_postgres() -> Iterator[PostgresServer]:
    """Run a server for the duration of a `with` block; skips the test without PostgreSQL."""
    where, user = find_programs(), find_server_user()
    if where is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    if user is None:
        pytest.skip(f"PostgreSQL does not run as root, and none of the users {SERVER_USERS} exists")
    # A socket's path has a hundred characters at most, so pytest's own directory is not used.
    directory = Path(tempfile.mkdtemp(prefix="waltz-postgres-"))
    os.chown(directory, user.pw_uid, user.pw_gid)
    postgres = PostgresServer(where, directory, user)
    try:
        postgres.make()
        postgres.start()
        yield postgres
    finally:
        postgres.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield one server for the whole session; each test creates its own database."""
    with run_postgres() as server:
        yield server
