"""`waltz-core access`: changes, output, files, and the wait for the daemons."""

import asyncio
import json
from dataclasses import replace

import pytest

from tests.cluster_contract import ADDRESSES, CLUSTER_KEY, STORAGES, server_descriptor
from tests.commands import run_command
from waltz_core.access.tokens import hash_of
from waltz_core.cli.access import access_change, access_export, access_views
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.change.stored_permissions import StoredPermissions
from waltz_core.cluster.znodes import access_node
from waltz_core.cluster.znodes.model import PartitionAssignment
from waltz_core.cluster.zookeeper.zookeeper_in_memory import (
    MemorySession,
    MemoryZooKeeper,
    WriteFault,
)
from waltz_core.errors import CoordinatorOutcomeUnknown, CoordinatorUnavailable

CONNECT = ("--connect", "zk:1/w")
ACCESS_ZNODE = "/w/x/access"
SERVER, STORAGE = "server 10.0.1.1:5001", f"storage {ADDRESSES[0]}"


class AccessCluster:
    """A cluster in memory; each command opens a session to it."""

    def __init__(self):
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.faults = []
        self.daemons = []
        asyncio.run(self._create())

    async def _create(self):
        coordinator = self.zookeeper.coordinator("/w")
        await coordinator.create_cluster(
            NewCluster("w", 8, CLUSTER_KEY, STORAGES[:1], {ADDRESSES[0]: tuple(range(8))})
        )
        await coordinator.register_server(server_descriptor(1))
        self.daemons = [coordinator, self.zookeeper.coordinator("/w")]

    def publish(self, *revisions):
        """Let the server and the storage publish these revisions; None publishes no revision."""

        async def publish():
            names = ("server-1", f"storage-{ADDRESSES[0]}")
            for daemon, name, revision in zip(self.daemons, names, revisions, strict=True):
                if revision is not None:
                    daemon.set_applied_revision(name, revision)
                    await daemon._applied_revisions.publish()

        asyncio.run(publish())

    def set_assignment(self, servers):
        entry = self.zookeeper.entry("/w/serverDescriptors")
        data = PartitionAssignment(0, 8, servers).to_bytes()
        self.zookeeper._nodes["/w/serverDescriptors"] = replace(entry, data=data)

    def expire_server(self):
        """End the server's session; without ZooKeeper it continues to serve."""
        self.daemons[0]._znodes.expire()

    def open_session(self, _connect):
        cluster = self

        class Session:
            async def __aenter__(self):
                coordinator = cluster.zookeeper.coordinator("/w")
                coordinator._znodes.faults = cluster.faults
                return coordinator

            async def __aexit__(self, *_):
                pass

        return Session()

    def run(self, *arguments, code=0):
        """Run a command of `access`."""
        command = run_command("access", *map(str, arguments), *CONNECT)
        assert command.returncode == code, (arguments, command.stdout, command.stderr)
        return command

    def json(self, *arguments, code=0):
        """Run a command and return its JSON."""
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    @property
    def permissions(self):
        return access_node.decode_permissions(self.zookeeper.dump()[ACCESS_ZNODE])

    @property
    def audit(self):
        rows = [data for path, data in self.zookeeper.dump().items() if "/x/audit/e_" in path]
        return [(each["command"], each["outcome"]) for each in map(json.loads, rows)]


@pytest.fixture
def empty_cluster(monkeypatch):
    cluster = AccessCluster()
    for module in (access_change, access_views, access_export):
        monkeypatch.setattr(module, "open_command_session", cluster.open_session)
    monkeypatch.setattr(access_change, "ACCESS_OFF_WAIT_S", 0.0)
    return cluster


@pytest.fixture
def cluster(empty_cluster):
    """A cluster whose servers have `replicate`."""
    empty_cluster.run("init")
    empty_cluster.run("group", "add", "servers", "s1", "s2")
    empty_cluster.run("grant", "servers", "replicate", "--group")
    return empty_cluster


def test_permissions_are_created_once(empty_cluster):
    created = empty_cluster.run("init", "--accept-0.13")
    assert (
        created.stdout == "the permissions were created; they contain no grant yet; "
        "the permissions have revision 1\n"
    )
    assert empty_cluster.permissions.accepts_0_13
    assert "access control is off at all 2 daemons, or they are" in created.stderr
    key = empty_cluster.permissions.client_key
    assert "has permissions already" in empty_cluster.run("init", code=1).stderr
    assert empty_cluster.permissions.client_key == key
    assert key.hex() not in created.stdout + created.stderr
    assert empty_cluster.run("accept-0-13", "off").stdout.startswith(
        "client IDs without a proof of their principal are not"
    )
    assert not empty_cluster.permissions.accepts_0_13


def test_access_commands_are_rejected_before_access_init_and_without_a_cluster(empty_cluster):
    arguments = [
        ("grant", "a", "read"),
        ("list",),
        ("check", "a", "read"),
        ("token", "revoke", "t"),
    ]
    for argument in arguments:
        assert (
            "has no permissions. Hint: `access init`" in empty_cluster.run(*argument, code=1).stderr
        )


def test_grants_are_shown_and_checked(cluster):
    granted = cluster.run("grant", "etl", "read,append", "--partitions", "0-3,7")
    assert granted.stdout == (
        "etl has the verbs read,append for partitions 0-3,7; the permissions have revision 4\n"
    )
    assert cluster.permissions.changed_by
    listing = cluster.json("list")
    assert (listing["revision"], listing["groups"]) == (4, {"servers": ["s1", "s2"]})
    assert listing["grants"] == [
        {"group": "servers", "verb": "replicate", "partitions": "all"},
        {"principal": "etl", "verb": "read", "partitions": "0-3,7"},
        {"principal": "etl", "verb": "append", "partitions": "0-3,7"},
    ]
    text = cluster.run("list").stdout
    assert "etl            read,append  0-3,7\n" in text
    assert "group servers  replicate    all\n" in text
    for arguments, code in (
        (("etl", "append", "--partition", "7"), 0),
        (("etl", "append", "--partition", "6"), 1),
        (("etl", "append"), 1),
        (("etl", "replicate", "--partition", "0"), 1),
        (("s2", "replicate"), 0),
        (("servers", "replicate"), 1),
    ):
        assert cluster.json("check", *arguments, code=code)["permitted"] is (code == 0)
    cluster.run("grant", "ops", "administer", "--partitions", "0-7")
    # A daemon denies a request for all partitions, too.
    denied = cluster.run("check", "ops", "administer", code=1)
    assert denied.stdout == (
        "denied: ops has the verb administer for partitions 0-7, but not for "
        "`all`; the permissions have revision 5\n"
    )
    assert cluster.json("check", "ops", "administer", code=1)["permitted"] is False
    cluster.run("check", "ops", "administer", "--partition", "7")
    cluster.run("grant", "ops", "administer")
    cluster.run("check", "ops", "administer")
    denied = cluster.run("check", "etl", "append", code=1)
    assert denied.stdout == (
        "denied: etl has the verb append for partitions 0-3,7; the permissions have revision 6\n"
    )


def test_a_repeated_grant_creates_no_revision(cluster):
    repeated_grant = cluster.run("grant", "servers", "replicate", "--group", "--partitions", "0-3")
    assert repeated_grant.stdout == "nothing to change; the permissions stay at revision 3\n"
    assert cluster.json("grant", "servers", "replicate", "--group")["changed"] is False


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("grant", "a b", "read"), "expected a principal name of 1 to 128 characters"),
        (
            ("grant", "etl", "write"),
            "verbs: expected one or more of read, append, administer, replicate",
        ),
        (
            ("grant", "etl", "read", "--partitions", "8"),
            "partitions: expected numbers and ranges such as 0-3,7 in 0..7, or all; found '8'",
        ),
        (
            ("grant", "readers", "read", "--group"),
            "there is no group 'readers'; the existing groups are: se",
        ),
        (
            ("revoke", "etl", "read"),
            "etl has no grant of read for partitions all",
        ),
        (
            ("limit", "etl"),
            "limits (--bytes-per-s, --appends-per-s, --connections, --feeds), or --remove",
        ),
        (
            ("limit", "etl", "--feeds", "0"),
            "limit feeds: expected a number from 1 to 2^63 - 1, found 0",
        ),
        (("limit", "etl", "--feeds", "1", "--remove"), "expected one or more limits ("),
        (
            ("check", "etl", "read", "--partition", "8"),
            "--partition: expected a partition in 0..7, found 8",
        ),
        (("token", "revoke"), "expected the ID of a token, or --expired"),
        (("token", "revoke", "t1"), "there is no token with ID 't1'."),
    ],
)
def test_invalid_arguments_change_no_permission(cluster, arguments, error):
    before = cluster.permissions
    assert error in cluster.run(*arguments, code=1).stderr
    assert cluster.permissions == before


def test_the_last_grant_of_replicate_is_kept_unless_option_force_is_set(cluster):
    last = (
        ("revoke", "servers", "replicate", "--group", "--partitions", "2"),
        ("group", "remove", "servers", "s1", "s2"),
        ("group", "delete", "servers"),
    )
    before = cluster.permissions
    for arguments in last:
        assert (
            "no principal would have the verb `replicate` for"
            in cluster.run(*arguments, code=1).stderr
        )
    assert cluster.permissions == before
    cluster.run(*last[0], "--force")
    assert cluster.permissions.grants[0].partitions == ((0, 1), (3, 7))
    cluster.run(*last[2], "--force")
    assert cluster.permissions.grants == ()


def test_a_revocation_reports_permissions_that_remain_through_groups(cluster):
    cluster.run("group", "add", "analysts", "ann")
    cluster.run("grant", "analysts", "read", "--group", "--partitions", "0-1")
    cluster.run("grant", "ann", "read")
    revoked = cluster.run("revoke", "ann", "read")
    assert revoked.stdout == (
        "ann no longer has a grant of read for partitions all; the permissions have revision 7\n"
    )
    assert (
        "ann still has the verb read for partitions 0-1, because its group has it\n"
        in revoked.stderr
    )


def test_limits_are_shown(cluster):
    cluster.run("limit", "*", "--connections", "100")
    cluster.run("limit", "etl", "--bytes-per-s", "5", "--appends-per-s", "6")
    assert cluster.json("list")["limits"] == {
        "*": {"connections": 100},
        "etl": {"bytes_per_s": 5, "appends_per_s": 6},
    }
    assert "etl        5            6              -            -" in cluster.run("list").stdout
    cluster.run("limit", "etl", "--remove")
    assert list(cluster.permissions.limits) == ["*"]


def test_a_limit_of_an_unknown_principal_is_stored_with_a_warning(cluster, tmp_path):
    cluster.run("token", "create", "etl", "--file", tmp_path / "token")
    cluster.run("grant", "ann", "read")
    for principal in ("*", "s1", "etl", "ann"):
        assert "names" not in cluster.run("limit", principal, "--feeds", "1").stderr
    unknown = cluster.run("limit", "anne", "--feeds", "1")
    assert unknown.stderr.startswith("no permission or token names anne yet\n")
    assert cluster.permissions.limits["anne"].feeds == 1
    group = cluster.run("limit", "servers", "--feeds", "1").stderr
    assert (
        "names servers yet. Hint: servers is a group, but only principals can have limits.\n"
        in group
    )


def test_each_change_has_an_audit_entry(cluster):
    cluster.run("revoke", "servers", "replicate", "--group", code=1)
    commands = [(command.split(" --connect")[0], outcome) for command, outcome in cluster.audit]
    assert commands[:3] == [
        ("access init", "done"),
        ("access group add servers s1 s2", "done"),
        ("access grant servers replicate --group", "done"),
    ]
    assert commands[3][1].startswith(
        "failed: the change was rejected: after it, no principal would have"
    )


# --- tokens


def test_a_token_is_written_to_a_private_file_and_its_hash_to_zookeeper(cluster, tmp_path):
    file = tmp_path / "token"
    created = cluster.run("token", "create", "etl", "--file", str(file), "--expires", "12h")
    secret = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600
    ((token_hash, token),) = cluster.permissions.tokens.items()
    assert token_hash == hash_of(bytes.fromhex(secret))
    assert token.principal == "etl"
    assert token.expires_ms - cluster.permissions.changed_ms == 12 * 3_600_000
    assert f"created token {token.token_id} of etl in {file}; it expires at 20" in created.stdout
    assert "principal etl has no grant yet. Hint: `access grant` adds one." in created.stderr

    cluster.run("grant", "etl", "read")
    (token_entry,) = cluster.json("list")["tokens"]
    assert token_entry == {
        "id": token.token_id,
        "principal": "etl",
        "expires_ms": token.expires_ms,
        "is_expired": False,
    }
    output = cluster.run("list").stdout + cluster.run("list", "--json").stdout + str(cluster.audit)
    for each in (secret, token_hash, cluster.permissions.client_key.hex()):
        assert each not in output
    assert "was revoked" in cluster.run("token", "revoke", token.token_id).stdout
    assert cluster.permissions.tokens == {}


def test_an_existing_file_is_not_overwritten(cluster, tmp_path):
    file = tmp_path / "token"
    file.write_text("mine")
    before = cluster.permissions
    arguments = ("token", "create", "etl", "--file")
    assert (
        "another name; delete the file only if an" in cluster.run(*arguments, file, code=1).stderr
    )
    assert file.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    cluster.run(*arguments, link, code=1)
    assert not (tmp_path / "target").exists()
    assert (
        "cannot be created: No such file"
        in cluster.run(*arguments, tmp_path / "no" / "token", code=1).stderr
    )
    assert cluster.permissions == before


@pytest.mark.parametrize("expires", ["0d", "90", "d", "-1d", "3651d", "1.5h", "90 d"])
def test_a_token_expires_after_a_duration(cluster, tmp_path, expires):
    file = tmp_path / "token"
    arguments = ("token", "create", "etl", "--file", file, f"--expires={expires}")
    assert "--expires: expected a duration such as 90d" in cluster.run(*arguments, code=1).stderr
    assert not file.exists()


def test_a_rejected_token_leaves_no_file(cluster, tmp_path, monkeypatch):
    file = tmp_path / "token"
    arguments = ("token", "create", "--file", file)
    assert (
        "expected the name of a principal that is not reserved"
        in cluster.run(*arguments, "anonymous", code=1).stderr
    )
    assert not file.exists()
    size = len(cluster.zookeeper.dump()[ACCESS_ZNODE])
    monkeypatch.setattr(access_node, "NODE_BYTES_MAX", size + 10)
    too_large = cluster.run(*arguments, "etl", code=1)
    assert f"for their znode: expected at most {size + 10} bytes" in too_large.stderr
    assert not file.exists()


def test_the_file_of_a_token_remains_if_its_creation_has_an_unknown_outcome(
    cluster, tmp_path, monkeypatch
):
    """ZooKeeper does not answer the write, so the token may be valid."""
    file, before = tmp_path / "token", cluster.permissions

    async def write_without_answer(_self, _new, _before):
        raise CoordinatorOutcomeUnknown("zk:1 did not answer a write")

    monkeypatch.setattr(StoredPermissions, "_try_write", write_without_answer)
    failed = cluster.run("token", "create", "etl", "--file", file, code=1)
    assert "Hint: `access list` shows whether token t" in failed.stderr
    assert file.exists()
    assert cluster.permissions == before


def test_one_command_removes_all_expired_tokens(cluster, tmp_path):
    for name, expires in (("a", "1m"), ("b", "90d")):
        cluster.run("token", "create", name, "--file", tmp_path / name, "--expires", expires)
    path = ACCESS_ZNODE
    found = cluster.permissions
    old = {
        key: replace(token, expires_ms=1) if token.principal == "a" else token
        for key, token in found.tokens.items()
    }
    entry = cluster.zookeeper.entry(path)
    cluster.zookeeper._nodes[path] = replace(
        entry, data=access_node.encode_permissions(replace(found, tokens=old))
    )
    assert [token["is_expired"] for token in cluster.json("list")["tokens"]] == [True, False]
    removed = cluster.run("token", "revoke", "--expired")
    assert removed.stdout.startswith("expired tokens removed: 1; the permissions have revision")
    assert [each.principal for each in cluster.permissions.tokens.values()] == ["b"]


# --- files


def test_an_export_is_imported_with_a_later_revision(cluster, tmp_path):
    file = tmp_path / "access"
    cluster.run("export", "--file", file)
    saved = cluster.permissions
    assert file.stat().st_mode & 0o777 == 0o600
    assert access_node.decode_permissions(file.read_bytes()) == saved
    cluster.run("export", "--file", file, code=1)
    cluster.run("grant", "etl", "read")
    import_preview = cluster.run("import", "--file", file)
    assert "nothing was changed. Hint: add --yes" in import_preview.stdout
    assert "the file has permissions of revision 3, written at 20" in import_preview.stdout
    assert "the cluster has permissions of revision 4, written at 20" in import_preview.stdout
    assert cluster.permissions.revision == 4
    cluster.run("import", "--file", file, "--yes")
    now = cluster.permissions
    assert replace(now, revision=3, changed_by="", changed_ms=0) == replace(
        saved, changed_by="", changed_ms=0
    )
    assert now.revision == 5


def test_an_import_without_a_grant_of_replicate_needs_option_force(cluster, tmp_path):
    file = tmp_path / "access"
    file.write_bytes(access_node.encode_permissions(replace(cluster.permissions, grants=())))
    arguments = ("import", "--file", file, "--yes")
    assert "no principal would have the verb `replicate`" in cluster.run(*arguments, code=1).stderr
    cluster.run(*arguments, "--force")
    assert cluster.permissions.grants == ()


def test_a_file_that_is_not_an_export_is_rejected(cluster, tmp_path):
    file = tmp_path / "access"
    file.write_bytes(b"{}")
    for arguments in (("--file", file), ("--file", file, "--yes")):
        assert (
            f"{file} is not a file of exported permissions: permissions: expected format 1"
            in cluster.run("import", *arguments, code=1).stderr
        )
    file.write_bytes((access_node.NODE_BYTES_MAX + 1) * b" ")
    assert "bytes, found more" in cluster.run("import", "--file", file, code=1).stderr


def test_an_import_sets_the_access_lists_of_nodes_that_other_users_may_have_created(
    cluster, tmp_path, monkeypatch
):
    reset = []

    async def record_reset(_self, path):
        reset.append((path, cluster.permissions.revision))

    monkeypatch.setattr(MemorySession, "reset_access_list", record_reset)
    cluster.run("export", "--file", tmp_path / "access")
    cluster.run("import", "--file", tmp_path / "access", "--yes")
    assert reset == [(ACCESS_ZNODE, 3), ("/w/x/audit", 3)]  # before the write
    assert cluster.permissions.revision == 4


# --- the daemons


def test_a_command_names_the_daemons_that_use_its_revision(cluster):
    cluster.publish(4, 4)
    report = cluster.json("grant", "etl", "read", "--timeout-s", "0")
    assert (report["applied"], report["late"]) == ([SERVER, STORAGE], {})
    cluster.publish(5, 4)
    timed_out = cluster.run("grant", "etl", "append", "--timeout-s", "0", code=1)
    assert f"{STORAGE}: it uses revision 4\n" in timed_out.stderr
    assert "revision 5 is stored, but 1 of 2 daemons do not use it. Hint:" in timed_out.stderr
    assert timed_out.stdout == (
        "etl has the verbs append for partitions all; the permissions have revision 5\n"
    )
    assert cluster.json("list")["late"] == {STORAGE: "it uses revision 4"}
    cluster.publish(5, 5)
    # If the command is repeated, it waits again.
    assert "all 2 daemons use revision 5" in cluster.run("grant", "etl", "append").stderr


def test_a_daemon_that_publishes_no_revision_counts_as_not_updated(cluster):
    """The daemon may have lost its session, and still use the revoked grant."""
    cluster.publish(4, None)
    timed_out = cluster.run("grant", "etl", "read", "--timeout-s", "0", code=1)
    assert (
        f"{STORAGE} publishes no revision: access control is off there, or the daemon"
        in timed_out.stderr
    )
    report = cluster.json("grant", "etl", "read", "--timeout-s", "0", code=1)
    assert report["without_revision"] == [STORAGE]


def test_a_server_without_a_zookeeper_session_is_reported(cluster, monkeypatch):
    """The server's session has ended, and the server may still use the revoked grant."""
    cluster.publish(4, 4)
    cluster.run("grant", "etl", "read", "--timeout-s", "0")
    read = access_change.read_revision_use

    async def read_after_expiry(coordinator, revision, known):
        cluster.expire_server()
        return await read(coordinator, revision, known)

    with monkeypatch.context() as patched:
        patched.setattr(access_change, "read_revision_use", read_after_expiry)
        cluster.publish(4, 5)
        timed_out = cluster.run("revoke", "etl", "read", "--timeout-s", "0", code=1)
    assert (
        f"{SERVER} is not registered in ZooKeeper: it may still use older permissions\n"
        in timed_out.stderr
    )
    assert "revision 5 is stored, but 1 of 2 daemons do not use it. Hint:" in timed_out.stderr


def test_an_assigned_server_without_a_zookeeper_session_is_reported(cluster):
    cluster.publish(4, 4)
    cluster.expire_server()
    cluster.set_assignment({1: {0: 3}})
    report = cluster.json("grant", "etl", "read", "--timeout-s", "0", code=1)
    assert (report["unregistered"], report["applied"]) == (["server 1"], [STORAGE])
    assert cluster.json("list")["unregistered"] == ["server 1"]
    cluster.set_assignment({})  # the other servers have taken over its partitions
    assert cluster.json("grant", "etl", "read", "--timeout-s", "0")["unregistered"] == []


def test_a_change_fails_if_no_daemon_confirms_it_although_access_control_was_in_use(cluster):
    cluster.publish(3, 3)
    for daemon in cluster.daemons:
        daemon._znodes.expire()
    timed_out = cluster.run(
        "revoke", "servers", "replicate", "--group", "--force", "--timeout-s", "0", code=1
    )
    assert "access control is off at all:" not in timed_out.stderr
    assert (
        f"{STORAGE} publishes no revision: access control is off there, or the daemon"
        in timed_out.stderr
    )


def test_a_daemon_with_a_later_revision_than_zookeeper_is_reported(cluster):
    cluster.publish(17, 4)
    timed_out = cluster.run("grant", "etl", "read", "--timeout-s", "0", code=1)
    assert f"{SERVER}: it uses revision 17, and ignores older revisions" in timed_out.stderr
    assert "Restart each daemon that ignores older revisions." in timed_out.stderr


def test_a_command_waits_until_the_daemons_use_its_revision(cluster, monkeypatch):
    cluster.publish(3, 3)
    waits = []
    sleep = asyncio.sleep

    async def publish_later(_seconds):
        waits.append(1)
        for each in cluster.daemons if len(waits) == 3 else ():
            name = each._applied_revisions._target[0]
            each.set_applied_revision(name, 4)
            await each._applied_revisions.publish()
        await sleep(0)

    monkeypatch.setattr(access_change.asyncio, "sleep", publish_later)
    assert "all 2 daemons use revision 4" in cluster.run("grant", "etl", "read").stderr
    assert len(waits) == 3


def test_a_change_is_shown_although_zookeeper_is_lost_afterwards(cluster, tmp_path, monkeypatch):
    async def fail_to_read(_coordinator, _revision, _known):
        raise CoordinatorUnavailable("zk:1 does not answer")

    monkeypatch.setattr(access_change, "read_revision_use", fail_to_read)
    for arguments in ((), ("--json",)):
        file = tmp_path / f"token{len(arguments)}"
        failed = cluster.run("token", "create", "etl", "--file", file, *arguments, code=1)
        *_, token = cluster.permissions.tokens.values()
        assert f"token {token.token_id} of etl in {file}" in failed.stderr
        expected = "not check which daemons use this revision: zk:1 does not answer. Hint:"
        assert expected in failed.stderr
        assert (f"token {token.token_id}" in failed.stdout) is (not arguments)


@pytest.mark.parametrize("fault", WriteFault)
def test_a_lost_answer_of_zookeeper_creates_no_second_revision(cluster, fault):
    # The first write is the audit entry.
    cluster.faults.extend([None, fault])
    cluster.run("grant", "etl", "read")
    assert cluster.permissions.revision == 4
