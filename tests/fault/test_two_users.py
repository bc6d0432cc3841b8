"""A running cluster changes to two ZooKeeper users, with the steps of docs/zookeeper.md."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.security import make_digest_acl_credential

from tests.commands import run_command
from tests.fault.doctor import await_findings, remote_options
from tests.fault.load import Load, Scenario, are_all_replicas_engaged, owner_addresses, wait_until
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.client.stream.append_errors import TRANSIENT_OUTCOMES
from waltz_core.local import LocalCluster

ONE_USER = "digest:waltz:of members\n"
MEMBERS = f"{ONE_USER}administrators:digest:{make_digest_acl_credential('admin', 'of admin')}\n"
ADMINISTRATORS = "digest:admin:of admin\nmembers:digest:waltz:of members\n"
SETTINGS: dict[str, dict[str, object]] = {
    kind: {"zookeeper_session_timeout_ms": 3_000} for kind in ("server", "storage")
}


class UserChange:
    """A cluster of two servers and three storages, and its auth files."""

    def __init__(self, directory: Path, *, is_open: bool) -> None:
        self.members_file, self.administrators_file = (
            directory / name for name in ("members.auth", "administrators.auth")
        )
        self.administrators_file.write_text(ADMINISTRATORS)
        self.members_file.write_text(ONE_USER)
        self.cluster = LocalCluster(
            directory / "c",
            server_count=2,
            partition_count=4,
            settings=SETTINGS,
            auth_file=None if is_open else self.members_file,
        )

    @property
    def connect_without_user(self) -> str:
        """The connect string without a user."""
        return self.cluster.connect.partition("?")[0]

    def restart_all(self, auth: str, load: Load) -> None:
        """Write the auth file; restart storages and servers, one after the other."""
        self.members_file.write_text(auth)
        self.cluster._load_state().auth_file = str(self.members_file)
        for member in self.cluster.members:
            if member.kind != "zookeeper":
                self.restart(member.name, load)

    def restart(self, name: str, load: Load) -> None:
        """Restart one process; return once all partitions have all replicas and commit."""
        self.cluster.kill(name, signal.SIGTERM)
        self.cluster.start(name)
        wait_until(
            "both servers own partitions", lambda: len(owner_addresses(self.cluster) - {None}) == 2
        )
        load.await_commits()
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(self.cluster))
        load.await_commits()

    def check_no_process_was_denied(self) -> None:
        for member in self.cluster.members:
            log = self.cluster.log_path(member.name).read_text(encoding="utf-8")
            assert member.kind == "zookeeper" or "denies access" not in log, member.name
            assert member.kind == "zookeeper" or "requires authentication" not in log, member.name

    def protect(self) -> None:
        result = run_command(
            "cluster", "protect", f"{self.connect_without_user}?auth={self.administrators_file}"
        )
        assert result.returncode == 0, result.stderr

    def check_users(self) -> None:
        """Check the results of clients, commands and the doctor for each of the three users."""
        members = f"{self.connect_without_user}?auth={self.members_file}"
        administrators = f"{self.connect_without_user}?auth={self.administrators_file}"
        with WaltzClient(self.connect_without_user, PATIENT_CLIENT) as client:
            assert min(client.high_water_marks().values()) >= 0
            # A server issues the client ID, so an append needs no user.
            appended = client.append(b"row", partition=0).result(TEST_TIMEOUT_S)
            (chunk,) = client.read_range(0, appended, appended)
            assert [row.data for row in chunk.rows()] == [b"row"]
        with WaltzClient(administrators, PATIENT_CLIENT) as client:
            client.high_water_marks()
        await_findings([], *remote_options(members))
        await_findings([], *remote_options(administrators))
        (finding,) = await_findings(
            ["zookeeper-access-denied"], *remote_options(self.connect_without_user)
        )
        assert "requires authentication for " in finding["sentence"]
        denied = run_command("cluster", "auto-assign", "--connect", members)
        assert "expected the auth file of an administrator" in denied.stderr
        result = run_command("cluster", "audit", "--connect", administrators)
        assert "cluster protect" in result.stdout


def check_no_append_failed(load: Load) -> None:
    """Wait for commits; check that each row is committed, or may be sent again unchanged.

    A partition that moves, or whose storage ends, does not commit all rows in flight.
    """
    load.await_commits()
    assert set(load.failure_reasons) <= {outcome.name for outcome in TRANSIENT_OUTCOMES}


@pytest.fixture
def user_change(tmp_path: Path, cluster_of: Callable, request: pytest.FixtureRequest) -> UserChange:  # type: ignore[type-arg]
    found = UserChange(tmp_path, is_open=request.param)
    cluster_of(found.cluster).up()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("user_change", [False], indirect=True)
def test_a_cluster_changes_from_one_zookeeper_user_to_two_while_clients_append(
    user_change: UserChange,
):
    """Clients keep their auth file and their sessions."""
    scenario = Scenario(user_change.cluster)
    with scenario.load() as load:
        load.await_commits()
        user_change.restart_all(MEMBERS, load)
        check_no_append_failed(load)
        user_change.protect()
        check_no_append_failed(load)
        # With the new permissions, partitions can still move.
        user_change.restart("server-1", load)
        check_no_append_failed(load)
    user_change.check_no_process_was_denied()
    scenario.check_outcomes_against_log()
    user_change.check_users()


@pytest.mark.parametrize("user_change", [True], indirect=True)
@pytest.mark.slow
def test_a_cluster_without_zookeeper_users_gets_two_users_while_clients_append(
    user_change: UserChange,
):
    """Clients restart with the members' file between the two rounds."""
    scenario = Scenario(user_change.cluster)
    with scenario.load() as load:
        load.await_commits()
        user_change.restart_all(f"{MEMBERS}world:anyone:cdrwa\n", load)
        check_no_append_failed(load)
    with scenario.load() as load:
        user_change.restart_all(MEMBERS, load)
        check_no_append_failed(load)
        user_change.protect()
        check_no_append_failed(load)
    user_change.check_no_process_was_denied()
    scenario.check_outcomes_against_log()
    user_change.check_users()
