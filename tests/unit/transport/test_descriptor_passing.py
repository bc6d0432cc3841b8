"""Passing of an open file from one process to another, with checks of the receiver."""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import subprocess
import time

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.transport import descriptor_passing, net

pytestmark = pytest.mark.skipif(
    not descriptor_passing.IS_SUPPORTED, reason="abstract names are Linux's"
)


@pytest.fixture
def name():
    return f"waltz-test/{secrets.token_hex(16)}"


@pytest.fixture
def path(tmp_path):
    """Return the file that is offered."""
    offered = tmp_path / "file"
    offered.write_bytes(b"here")
    return offered


@contextlib.asynccontextmanager
async def serve_file(name, path):
    """Serve one file under the request b"this"."""

    async def open_asked(question):
        if question != b"this":
            raise errors.UnknownPartition("not here")
        return os.open(path, os.O_RDONLY)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(descriptor_passing.serve_descriptors(name, 4, open_asked))
        await asyncio.sleep(0)  # the first step of the server binds and listens
        assert descriptor_passing.is_offered(name)
        yield task
        task.cancel()


def run(name, path, call):
    """Call a function on a thread while the file is served; return its result."""

    async def main():
        async with serve_file(name, path), asyncio.timeout(TEST_TIMEOUT_S):
            return await asyncio.to_thread(call)

    return net.run(main())


def read_file(name, question=b"this"):
    with open(
        descriptor_passing.request_descriptor(name, question, timeout_s=TEST_TIMEOUT_S), "rb"
    ) as file:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(file.fileno(), b"x")
        return file.read()


def test_a_file_is_passed_for_each_request(path, name):
    run(name, path, lambda: read_file(name))  # the first event loop of a process opens files
    gc.collect()  # closes files of other tests before the count
    count = len(os.listdir("/proc/self/fd"))
    result = run(
        name, path, lambda: [read_file(name) for _ in range(3 * descriptor_passing.CALLERS_MAX)]
    )
    assert set(result) == {b"here"}
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_passed_file_stays_readable_and_is_not_inherited(path, name):
    taken = run(
        name,
        path,
        lambda: descriptor_passing.request_descriptor(name, b"this", timeout_s=TEST_TIMEOUT_S),
    )
    assert not os.get_inheritable(taken)
    path.unlink()
    with open(taken, "rb") as file:
        assert file.read() == b"here"
    assert not descriptor_passing.is_offered(name)


def test_a_missing_file_is_not_passed(tmp_path, name):
    with pytest.raises(errors.Unreachable, match="Connection refused"):
        descriptor_passing.request_descriptor(name, b"this", timeout_s=TEST_TIMEOUT_S)
    path = tmp_path / "none"

    def take_with_idle_callers():
        for question in (b"that", b"this"):  # rejected, and a file that does not exist
            with pytest.raises(errors.Unreachable, match="the requested file is not available"):
                descriptor_passing.request_descriptor(name, question, timeout_s=TEST_TIMEOUT_S)

    run(name, path, take_with_idle_callers)


PYTHON = ["/usr/bin/env", "python3", "-c"]


def has_another_user():
    """Return whether root can start Python as another user, who can read its files."""
    if os.geteuid() != 0:
        return False
    return subprocess.run([*PYTHON, ""], user=65_534, cwd="/", check=False).returncode == 0


needs_another_user = pytest.mark.skipif(
    not has_another_user(), reason="no Python can be run here as another user"
)

FILE_REQUEST_SCRIPT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.settimeout(600)
    asking.connect("\\0" + sys.argv[1])
    try:
        asking.sendall(b"this")
        print(len(socket.recv_fds(asking, 1, 1)[1]))
    except OSError:
        print(0)
"""


@needs_another_user
def test_a_process_of_another_user_gets_no_file(path, name):

    def file_count_for(user):
        line = [*PYTHON, FILE_REQUEST_SCRIPT, name]
        ran = subprocess.run(line, user=user, cwd="/", capture_output=True, text=True, check=True)
        return int(ran.stdout)

    assert run(name, path, lambda: (file_count_for(os.geteuid()), file_count_for(65_534))) == (1, 0)


FILE_SENDER_SCRIPT = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("\\0" + sys.argv[1])
    listening.listen()
    print("listening", flush=True)
    while True:
        caller, _ = listening.accept()
        with caller:
            if caller.recv(4):
                socket.send_fds(caller, [b"\\x01"], [os.open("/dev/null", os.O_RDONLY)])
"""


@needs_another_user
def test_a_file_from_another_user_is_rejected(name):
    line = [*PYTHON, FILE_SENDER_SCRIPT, name]
    with subprocess.Popen(line, user=65_534, cwd="/", stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"listening\n"
            assert not descriptor_passing.is_offered(name)
            with pytest.raises(errors.Unreachable, match="untrusted user 65534"):
                descriptor_passing.request_descriptor(name, b"this", timeout_s=TEST_TIMEOUT_S)
        finally:
            other.kill()


def test_an_idle_connection_does_not_delay_others_for_long(path, name, monkeypatch):
    monkeypatch.setattr(descriptor_passing, "REQUEST_TIMEOUT_S", 0.5)

    def take_with_idle_callers():
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(socket.socket(socket.AF_UNIX))
                for _ in range(descriptor_passing.CALLERS_MAX)
            ]
            for each in silent:
                each.connect(f"\0{name}")
                each.send(b"th")
            assert read_file(name) == b"here"
            assert {each.recv(1) for each in silent} == {b""}

    run(name, path, take_with_idle_callers)


def test_a_file_opened_after_the_timeout_is_closed(path, name):
    late_s = [0.0]

    async def open_slowly(_question):
        late_s[0] = (
            2 * descriptor_passing.REQUEST_TIMEOUT_S
        )  # the timeout has passed on the loop's clock
        for _ in range(5):
            await asyncio.sleep(0)
        return await asyncio.to_thread(os.open, path, os.O_RDONLY)

    async def main():
        loop = asyncio.get_running_loop()
        loop.time = lambda: time.monotonic() + late_s[0]
        async with asyncio.TaskGroup() as tasks:
            offered = tasks.create_task(descriptor_passing.serve_descriptors(name, 4, open_slowly))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(read_file, name) == b"here"
            offered.cancel()

    asyncio.run(main())  # this loop uses a modified clock


def test_a_second_server_does_not_take_over_a_socket_name_in_use(tmp_path, path, name):

    async def main():
        async with serve_file(name, path), serve_file(name, tmp_path / "none") as second:
            await second  # the second server has stopped without affecting the first one
            return await asyncio.to_thread(read_file, name)

    assert net.run(main()) == b"here"


def test_no_file_is_served_on_systems_without_abstract_sockets(name, monkeypatch):
    monkeypatch.setattr(descriptor_passing, "IS_SUPPORTED", False)
    net.run(descriptor_passing.serve_descriptors(name, 4, None))
    assert not descriptor_passing.is_offered(name)
    with pytest.raises(errors.Unreachable, match="does not support abstract Unix sockets"):
        descriptor_passing.request_descriptor(name, b"this", timeout_s=1)


def test_a_connection_that_is_rejected_once_is_accepted_later(path, name, monkeypatch):
    monkeypatch.setattr(descriptor_passing, "ACCEPT_PAUSE_S", 0.01)
    failures = [OSError(24, "Too many open files")]

    async def main():
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def fails_once(listening):
            if failures:
                raise failures.pop()
            return await accept(listening)

        monkeypatch.setattr(descriptor_passing, "_accept", fails_once)
        async with serve_file(name, path):
            assert await asyncio.to_thread(read_file, name) == b"here"

    net.run(main())
    assert not failures
