"""The audit log of a daemon: its lines, its limits, and a disk that is full."""

import asyncio
import contextlib
import dataclasses
import json
import logging
from pathlib import Path

import pytest

from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.access.permissions import Permissions, StoredToken
from waltz_core.access.requirements import ADMINISTER, APPEND, require_all
from waltz_core.access.tokens import hash_of
from waltz_core.config import StorageConfig
from waltz_core.errors import BadConfig, Overloaded, Unavailable
from waltz_core.records.record import ReqId
from waltz_core.transport import tls
from waltz_core.transport.admission import audit_log
from waltz_core.transport.admission.audit_log import AuditFile, Peer
from waltz_core.transport.admission.port_access import PortAccess
from waltz_core.wire.admin_messages import SetAvailable
from waltz_core.wire.messages import (
    AppendRequest,
    Authenticate,
    ExpireRequest,
    ObjectReplacementRequest,
    ServerPartitionsRequest,
)

SECRET = bytes(range(32))
NOW_MS = 1_795_867_200_123
PEER = Peer("ann", "10.0.0.1:5000")
REQ_ID = ReqId(1, 2, 3, 4)
APPEND_3 = AppendRequest(REQ_ID, 0, (), (), (), 0, b"secret payload", 0)
PERMISSIONS = Permissions(7, "ops@host", NOW_MS, bytes(32))
MAY_APPEND, MAY_ADMINISTER = require_all(APPEND), require_all(ADMINISTER)


@pytest.fixture(autouse=True)
def long_timeout(monkeypatch):
    """Wait long enough for the thread on a busy machine."""
    monkeypatch.setattr(audit_log, "CLOSE_S_MAX", TEST_TIMEOUT_S)


@contextlib.asynccontextmanager
async def open_log(path, clock_ms=lambda: NOW_MS):
    log = AuditFile(str(path), clock_ms)
    yield log
    await log.close()


def lines_of(path):
    data = path.read_bytes()
    assert data.endswith(b"\n")
    assert all(each == 10 or 32 <= each < 127 for each in data), "expected printable ASCII only"
    return [json.loads(line) for line in data.splitlines()]


async def begin_request(request):
    """Begin a request; return the error."""
    done = asyncio.get_running_loop().create_future()
    request.begin(done.set_result)
    return await done


def deny(log, peer=PEER, message=APPEND_3, requirement=MAY_APPEND):
    """Deny a request; return whether the denial has a separate line."""
    put, lines = log._put, []
    log._put = lambda line: (lines.append(line), put(line))
    log.deny(peer, requirement, message, error="no", is_enforced=True)
    log._put = put
    return any(b'"repeated"' not in line.data for line in lines)


def append_to(partition):
    return AppendRequest(ReqId(1, 2, partition, 4), 0, (), (), (), 0, b"secret payload", 0)


@run_on_loop
async def test_a_request_starts_after_its_line_is_written(tmp_path):
    async with open_log(tmp_path / "audit") as log:
        request = log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (1, 2, 3, 7), False))
        assert await begin_request(request) is None
        begin = {
            "time": "2026-11-28T12:00:00.123Z",
            "request": 1,
            "principal": "ann",
            "address": "10.0.0.1:5000",
            "verb": "administer",
            "object": "partitions 1-3,7",
            "outcome": "begun",
            "message": "SetAvailable is_available=False",
        }
        (line,) = lines_of(tmp_path / "audit")
        assert line == begin
        request.end("rejected", "a reason")
        log.log_revision(PERMISSIONS)
    _, end, revision = lines_of(tmp_path / "audit")
    assert end == begin | {"outcome": "rejected", "error": "a reason"}
    assert revision == {
        "time": "2026-11-28T12:00:00.123Z",
        "principal": "ops@host",
        "address": "",
        "verb": "",
        "object": "permissions",
        "message": "revision 7 of 2026-11-28T12:00:00.123Z",
        "outcome": "in_use",
    }


@run_on_loop
async def test_a_flood_of_denials_is_limited_and_counted(tmp_path):
    now_ms = 0
    async with open_log(tmp_path / "audit", lambda: now_ms) as log:
        assert sum(deny(log, message=append_to(n)) for n in range(1_000)) == 60
        # The same principal from other hosts, and other principals of the same host.
        assert not any(deny(log, Peer("ann", f"10.0.1.{n}:1")) for n in range(20))
        assert not any(deny(log, Peer(f"p{n}", "10.0.0.1:1")) for n in range(20))
        assert sum(deny(log, Peer(f"p{n}", f"10.0.2.{n}:1")) for n in range(10_000)) == 240
        now_ms += 60_000
        assert deny(log)
    lines = lines_of(tmp_path / "audit")
    assert len(lines) == 301
    assert "secret" not in (tmp_path / "audit").read_text()
    assert [line["omitted"] for line in lines if "omitted" in line] == [940 + 40, 9_760]


@run_on_loop
async def test_equal_denials_within_a_minute_are_logged_as_one_line_with_their_number(tmp_path):
    now_ms = 0
    async with open_log(tmp_path / "audit", lambda: now_ms) as log:
        for _ in range(1_000):
            deny(log)
        deny(log, message=append_to(9))
        deny(log, Peer("ann", "10.0.0.2:1"))
        deny(log, Peer("ann", "10.0.0.1:5001"))  # another connection of the host
        now_ms += 60_000
        deny(log)
        deny(log)
    lines = lines_of(tmp_path / "audit")
    assert [(line["address"], line["object"], line.get("repeated", 0)) for line in lines] == [
        ("10.0.0.1:5000", "partitions 3", 0),
        ("10.0.0.1:5000", "partitions 9", 0),
        ("10.0.0.2:1", "partitions 3", 0),
        ("10.0.0.1:5000", "partitions 3", 1_000),
        ("10.0.0.1:5000", "partitions 3", 0),
        ("10.0.0.1:5000", "partitions 3", 1),
    ]
    assert {line["outcome"] for line in lines} == {"denied"}


@run_on_loop
async def test_denials_leave_room_in_the_file_for_administrative_requests(
    tmp_path, caplog, monkeypatch
):
    """If denials filled the disk, no administrative request could start."""
    path = tmp_path / "audit"
    async with open_log(path) as log:
        monkeypatch.setattr(audit_log, "DENIALS_FILE_BYTES_MAX", 1_000)
        size = lambda: path.stat().st_size  # noqa: E731
        for partition in range(50):
            before = size()
            if deny(log, message=append_to(partition)):
                await poll_until(lambda before=before: size() > before)
        assert 1_000 <= size() < 1_500
        assert caplog.text.count(f"audit.denials_omitted path={path} bytes={size()}") == 1
        assert (
            await begin_request(log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (1,), False)))
            is None
        )
        path.rename(tmp_path / "audit.1")
        log.reopen()
        await poll_until(path.exists)
        assert (
            await begin_request(log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (1,), False)))
            is None
        )
        assert deny(log, message=append_to(51))
    assert [line["outcome"] for line in lines_of(path)] == ["begun", "denied"]


@run_on_loop
async def test_the_addresses_of_a_network_count_as_one_host(tmp_path):
    async with open_log(tmp_path / "audit") as log:
        peers = [Peer(f"p{number}", f"2001:db8::{number:x}:5000") for number in range(80)]
        assert [deny(log, peer) for peer in peers] == [True] * 60 + [False] * 20
        assert deny(log, Peer("p80", "2001:db8:0:1::1:5000"))
    assert len(lines_of(tmp_path / "audit")) == 61


@run_on_loop
async def test_hostile_text_cannot_break_the_lines_of_the_audit_log(tmp_path):
    text = 'x"}\n{"outcome":"done"}\r\0\x1b[2J\u2028é'
    peer = Peer(text, text)
    message = ObjectReplacementRequest(REQ_ID, text, 0, 1, 5)
    async with open_log(tmp_path / "audit") as log:
        assert deny(log, peer, message)
        assert await begin_request(log.request(peer, MAY_ADMINISTER, message)) is None
        log.log_revision(Permissions(1, text, 1 << 60, bytes(32)))
    lines = lines_of(tmp_path / "audit")
    assert [line["principal"] for line in lines] == [text] * 3
    assert text in lines[0]["message"]
    long = ExpireRequest(REQ_ID, 1, 0), SetAvailable(1, tuple(range(0, 100_000, 2)), False)
    async with open_log(tmp_path / "long") as log:
        for each in long:
            assert await begin_request(log.request(PEER, MAY_ADMINISTER, each)) is None
    assert max(map(len, (tmp_path / "long").read_bytes().splitlines())) < 3_000
    # Formatting ranges of millions of partitions would block a daemon for seconds.
    assert lines_of(tmp_path / "long")[1]["object"] == "50000 partitions"


@run_on_loop
async def test_on_a_full_disk_requests_are_rejected_and_outcomes_wait(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "audit"
    async with open_log(path) as log:
        request = log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (1,), False))
        assert await begin_request(request) is None
        path.unlink()
        path.symlink_to("/dev/full")
        log.reopen()
        for _ in range(2):
            error = await begin_request(
                log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (1,), True))
            )
            assert isinstance(error, Unavailable)
            assert "No space left on device" in str(error)
        request.end("done")
        assert deny(log)
        path.unlink()
        log.reopen()
        assert (
            await begin_request(log.request(PEER, MAY_ADMINISTER, SetAvailable(9, (2,), True)))
            is None
        )
        logged = [record.getMessage() for record in caplog.records]
        assert logged == [
            f"audit.opened path={path}",
            f"audit.write_failed path={path} error=No space left on device",
            f"audit.opened path={path}",
            f"audit.write_resumed path={path} lost=3",
        ]
    assert [(line["request"], line["outcome"]) for line in lines_of(path)] == [
        (1, "done"),
        (4, "begun"),
    ]


@run_on_loop
async def test_an_incomplete_line_does_not_affect_the_next_one(tmp_path):
    path = tmp_path / "audit"
    path.write_bytes(b'{"time":"20')  # of an earlier process
    async with open_log(path) as log:
        log.log_revision(PERMISSIONS)
    part, line = path.read_bytes().splitlines()
    assert part == b'{"time":"20'
    assert json.loads(line)["message"].startswith("revision 7")


@run_on_loop
async def test_while_the_disk_hangs_the_queue_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_log, "QUEUE_LINES_MAX", 5)
    is_writing, may_write = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    log = AuditFile(str(tmp_path / "audit"), lambda: NOW_MS)
    write = log._file.write

    def block_write(lines):
        loop.call_soon_threadsafe(is_writing.set)
        asyncio.run_coroutine_threadsafe(may_write.wait(), loop).result()
        return write(lines)

    log._file.write = block_write
    log.log_revision(PERMISSIONS)
    await is_writing.wait()
    outcomes = []
    for number in range(7):
        log.request(PEER, MAY_ADMINISTER, SetAvailable(number, (1,), True)).begin(outcomes.append)
    await poll_until(lambda: len(outcomes) == 2)
    assert [type(outcome) for outcome in outcomes] == [Overloaded, Overloaded]
    assert not deny(log)
    may_write.set()
    await poll_until(lambda: len(outcomes) == 7)
    await log.close()
    assert len(lines_of(tmp_path / "audit")) == 6


@run_on_loop
async def test_a_failed_reopening_keeps_the_current_file(tmp_path, caplog):
    path = tmp_path / "logs" / "audit"
    with pytest.raises(BadConfig, match=r"setting audit_log: .* cannot be opened \(No such file"):
        AuditFile(str(path))
    path.parent.mkdir()
    async with open_log(path) as log:
        path.parent.rename(tmp_path / "moved")
        log.reopen()
        log.log_revision(PERMISSIONS)
    assert len(lines_of(tmp_path / "moved" / "audit")) == 1
    assert f"audit.open_failed path={path} error=No such file or directory" in caplog.text


@pytest.mark.parametrize("is_enforced", [True, False])
@run_on_loop
async def test_the_audit_log_of_a_port_has_denials_new_revisions_and_rejected_tokens(
    tmp_path, is_enforced
):
    port = PortAccess("CN=(.+)", is_enforced=is_enforced, clock_ms=lambda: NOW_MS)
    denied = []
    port.on_denied = lambda: denied.append(1)
    async with open_log(tmp_path / "audit") as log:
        port.audit = log
        for _ in range(2):
            port.apply(PERMISSIONS)
        access = port.add_connection(None, "a:1", denied.append)
        assert (access.denial(APPEND_3, 8) is None) is not is_enforced
        for tokens in ({hash_of(SECRET): StoredToken("t1", "etl", NOW_MS)}, {}):
            port.apply(dataclasses.replace(PERMISSIONS, tokens=tokens))
        for secret in (SECRET, bytes(32)):
            access.on_token_rejected(Authenticate(REQ_ID, secret), "it is not valid")
        assert (
            access.audit_request(ServerPartitionsRequest(REQ_ID)) is None
        )  # also principals that are not administrators
        assert access.audit_request(ExpireRequest(REQ_ID, 1, 0)) is not None
        assert access.may_begin(Unavailable("no")) is not is_enforced
    assert SECRET.hex() not in (tmp_path / "audit").read_text()
    revision, denial, revoked, unknown = lines_of(tmp_path / "audit")
    assert revision["message"].startswith("revision 7 ")
    assert denial["outcome"] == ("denied" if is_enforced else "would_be_denied")
    assert (denial["principal"], denial["verb"]) == ("anonymous", "append")
    assert denial["error"].startswith("AppendRequest requires the verb append for partition 3")
    assert [(each["outcome"], each["verb"]) for each in (revoked, unknown)] == [("denied", "")] * 2
    assert (revoked["principal"], revoked["object"]) == ("etl", "token t1")
    assert (unknown["principal"], unknown["object"]) == ("anonymous", "unknown token")
    assert denied == [1]


def test_the_audit_log_needs_access_control():
    with pytest.raises(BadConfig, match=r'audit_log requires access = "report" or access = "on"'):
        StorageConfig(connect="zk:1/w", directory="d", audit_log="a")
    config = StorageConfig(connect="zk:1/w", directory="d", audit_log="a", access="report")
    with pytest.raises(BadConfig, match='tls: audit_log requires tls = "on"'):
        tls.listen_context(config)
    assert not Path("a").exists()
