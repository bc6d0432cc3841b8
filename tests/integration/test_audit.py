"""The audit logs of real daemons: requests of administrators, rotation, and a full disk."""

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.fault.load import wait_until
from tests.integration.permitted_cluster import (
    DAEMONS,
    DENIED_PARTITION,
    PERMISSIONS,
    PERMITTED_PARTITION,
    ClusterAccess,
    permitted_cluster,
)
from tests.small_disk import CANNOT_MOUNT_REASON, SmallDisk, can_mount
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import PermissionDenied, Unavailable
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.transport import net, tls
from waltz_core.wire.admin_messages import AdminRejected, Done, SetAvailable
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    Message,
    WireProtocol,
)

REQ_ID = ReqId(ClientId(-1), Generation(-1), PartitionId(PERMITTED_PARTITION), -1)


@dataclass(frozen=True)
class Audited:
    """A cluster whose daemons have audit logs in one directory, on a small disk if possible."""

    access: ClusterAccess
    logs: Path
    disk: SmallDisk | None

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.logs / name).read_text().splitlines()]

    def ask(self, protocol: WireProtocol, request: Message) -> Message:
        """Send a request of the administrator; return the answer."""
        is_admin = protocol is WireProtocol.ADMIN
        member = self.access.cluster.member("storage-1" if is_admin else "server-1")
        port = member.admin_port if is_admin else member.port
        context = tls.dial_context(ClientConfig(), self.access.connect("administer"))

        async def ask() -> Message:
            link = await net.dial(protocol, f"127.0.0.1:{port}", ssl=context)
            link.send(request)
            (answer,) = await link.receive()
            link.abort("done")
            return answer

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def audited(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Audited]:
    logs = tmp_path_factory.mktemp("audit") / "logs"
    with contextlib.ExitStack() as stack:
        disk = None
        if can_mount():
            with contextlib.suppress(subprocess.CalledProcessError):
                disk = SmallDisk(logs, "64k")
                stack.callback(disk.unmount)
        logs.mkdir(exist_ok=True)
        access = stack.enter_context(permitted_cluster(tmp_path_factory, certificates))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in DAEMONS:
            kind = name.partition("-")[0].upper()
            patch.setenv(f"WALTZ_{kind}_AUDIT_LOG", str(logs / name))
            access.cluster.kill(name)
            access.cluster.log_path(name).write_text("")
            access.cluster.start(name)
        access.await_applied()
        yield Audited(access, logs, disk)


def test_administrative_requests_and_denials_are_in_the_audit_logs(audited: Audited):
    assert audited.ask(WireProtocol.ADMIN, SetAvailable(1, (PERMITTED_PARTITION,), True)) == Done(1)
    answer = audited.ask(WireProtocol.CLIENT, AddPreferredRequest(REQ_ID, (PERMITTED_PARTITION,)))
    assert answer == AddPreferredResponse(REQ_ID, True)
    denied = audited.ask(WireProtocol.ADMIN, SetAvailable(2, (DENIED_PARTITION,), True))
    assert isinstance(denied, AdminRejected)
    with WaltzClient(audited.access.connect("writer")) as client, pytest.raises(PermissionDenied):
        client.append(b"other", partition=DENIED_PARTITION).result()
    for name, request, message in (
        ("storage-1", "SetAvailable is_available=True", "SetAvailable is_available=True"),
        ("server-1", "AddPreferredRequest", "MountWriter"),
    ):
        wait_until("the audit lines are written", lambda name=name: len(audited.lines(name)) >= 4)
        revision, begin, end, denial, *_ = audited.lines(name)
        assert (revision["principal"], revision["outcome"]) == ("ops", "in_use")
        assert (begin["principal"], begin["verb"]) == ("administer", "administer")
        assert (begin["object"], begin["message"]) == (f"partitions {PERMITTED_PARTITION}", request)
        assert (begin["outcome"], end["outcome"]) == ("begun", "done")
        assert begin["request"] == end["request"]
        assert (denial["object"], denial["outcome"]) == (f"partitions {DENIED_PARTITION}", "denied")
        assert str(denial["message"]).startswith(message)


def test_sighup_makes_a_daemon_open_a_new_audit_log(audited: Audited):
    for name in DAEMONS:
        old = audited.logs / f"{name}.1"
        (audited.logs / name).rename(old)
        audited.access.write(PERMISSIONS)
        line = f"revision {audited.access.revision} of "
        wait_until("the audit log has the line", lambda old=old, line=line: line in old.read_text())
        lines_count = len(old.read_text().splitlines())
        assert not (audited.logs / name).exists()
        audited.access.cluster.kill(name, signal.SIGHUP)
        log = audited.access.cluster.log_path(name)
        wait_until("it is open", lambda log=log: "audit.opened path=" in log.read_text())
        audited.access.write(PERMISSIONS)
        wait_until("the audit log has the line", lambda name=name: len(audited.lines(name)) == 1)
        assert len(old.read_text().splitlines()) == lines_count


def test_a_daemon_rejects_administrative_requests_if_its_audit_log_has_no_space(audited: Audited):
    disk = audited.disk
    if disk is None:
        pytest.skip(CANNOT_MOUNT_REASON)
    disk.fill()
    log = audited.access.cluster.log_path("storage-1")

    def is_rejected() -> bool:
        answer = audited.ask(WireProtocol.ADMIN, SetAvailable(1, (PERMITTED_PARTITION,), True))
        if isinstance(answer, AdminRejected):
            assert answer.error_code == Unavailable.code
        return isinstance(answer, AdminRejected)

    wait_until("the last page is full", is_rejected)
    assert "audit.write_failed path=" in log.read_text()
    rejected = audited.ask(WireProtocol.ADMIN, SetAvailable(1, (PERMITTED_PARTITION,), False))
    assert isinstance(rejected, AdminRejected)
    assert "No space left on device" in rejected.text
    with WaltzClient(audited.access.connect("writer")) as client:  # others are not affected
        client.append(b"mine", partition=PERMITTED_PARTITION).result()
    disk.free()
    assert audited.ask(WireProtocol.ADMIN, SetAvailable(7, (PERMITTED_PARTITION,), True)) == Done(7)
    wait_until("the last outcome is written", _all_ended(audited.logs / "storage-1"))


def _all_ended(path: Path) -> Callable[[], bool]:
    """Return whether each request that has begun has an outcome; a part of a line may be lost."""

    def have_ended() -> bool:
        outcomes: dict[object, object] = {}
        torn = 0
        for each in path.read_text().splitlines():
            try:
                line = json.loads(each)
            except ValueError:
                torn += 1
                continue
            if "request" in line:
                outcomes[line["request"]] = line["outcome"]
        assert torn <= 3
        return bool(outcomes) and "begun" not in outcomes.values()

    return have_ended
