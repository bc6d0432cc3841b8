"""Operations of two ZooKeeper users on each znode, in a real ZooKeeper (decision 048, AC 13)."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import ACL, OPEN_ACL_UNSAFE, make_digest_acl_credential

from tests.cluster_contract import STORAGES, server_descriptor
from tests.commands import run_command
from waltz_core import errors
from waltz_core.access.permissions import Permissions
from waltz_core.cluster.change.audit import AuditEntry
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.interface import CreateNode
from waltz_core.cluster.znodes.paths import ZNODES, znode_at
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.cluster.zookeeper.zookeeper_session import open_session

pytestmark = pytest.mark.zookeeper

HASH = make_digest_acl_credential("admin", "of admin")
FILES = {
    "administrator": "digest:admin:of admin\nmembers:digest:waltz:of members\n",
    "member": f"digest:waltz:of members\nadministrators:digest:{HASH}\n",
    "old": "digest:waltz:of members\n",
    "alone": "digest:admin:of admin\n",
    "granted": "digest:admin:of admin\n"
    f"digest:{make_digest_acl_credential('waltz', 'of members')}:cdrw\n",
    "readable": "digest:waltz:of members\nworld:anyone:r\n",
}
USERS = {"administrator": "admin:of admin", "member": "waltz:of members", "public": None}
# Decision 048, "ZooKeeper".
PUBLIC = {"R", "R/ids", "R/serverDescriptors", "R/serverDescriptors/s_N", "R/store"}
PUBLIC |= {"R/store/group", "R/x", "R/x/restored"}
OF_MEMBERS = {"R/x": "cr", "R/x/access": "r", "R/x/audit": "", "R/x/audit/e_N": ""}
# Only commands of Waltz 0.13 create it.
RESERVED = {"R/store/adminLock"}


class ZooKeeperUsers(NamedTuple):
    """A ZooKeeper, and the directory of the auth files."""

    hosts: str
    directory: Path

    def connect(self, root: str, name: str) -> str:
        """Return the connect string of a user; none for "public"."""
        if name not in FILES:
            return f"{self.hosts}{root}"
        path = self.directory / f"{name}.auth"
        path.write_text(FILES[name])
        return f"{self.hosts}{root}?auth={path}"

    @contextlib.contextmanager
    def kazoo(self, user: str) -> Iterator[KazooClient]:
        """Open a session without any code of this project."""
        credentials = USERS[user]
        client = KazooClient(self.hosts, auth_data=[("digest", credentials)] if credentials else [])
        client.start()
        try:
            yield client
        finally:
            client.stop()
            client.close()


@pytest.fixture
def users(zookeeper: str, tmp_path: Path) -> ZooKeeperUsers:
    return ZooKeeperUsers(zookeeper, tmp_path)


async def create_nodes_of_members(coordinator: Coordinator) -> None:
    """Create the znodes of servers, storages and clients; the session must stay open."""
    paths = coordinator.paths
    await coordinator.register_server(server_descriptor(await coordinator.next_server_id()))
    view = await coordinator.read_partition(0)
    marker = model.PartitionMarker(model.MarkerState.OPEN, 0, bytes(16))
    await coordinator.write_partition(0, model.PartitionMetadata(1, 0, {}), marker, view.versions)
    await coordinator.register_storage_id("10.0.0.1:5280", model.UUID(int=1))
    await coordinator.issued_ids.allocate_id()
    await coordinator.writes.begin("nightly", {0: -1}, 1_000_000)
    await coordinator.writes.enter("nightly", 0, "run", coordinator.next_client_id)
    await coordinator._nodes.put_ephemeral(
        paths.applied_revision("server-1"), b"{}", paths.applied_revisions
    )
    await coordinator._nodes.put_ephemeral(paths.load(1), b"{}", paths.loads)
    await coordinator._nodes.put_ephemeral(paths.reach_report(1), b"{}", paths.reach_reports)


async def create_nodes_of_administrators(coordinator: Coordinator) -> None:
    """Create the znodes that commands create after the cluster."""
    paths = coordinator.paths
    permissions = access_node.encode_permissions(Permissions(1, "ops", 0, bytes(32)))
    await coordinator._znodes.write(
        [
            CreateNode(paths.access, permissions),
            CreateNode(paths.restore_sources, NO_RESTORE_SOURCES.to_bytes()),
        ]
    )
    await coordinator.audit.begin(AuditEntry("ops", 0, "cluster create"))


@contextlib.asynccontextmanager
async def whole_cluster(users: ZooKeeperUsers, root: str, *, creator: str, member: str):
    """Create every node of the table, by its creator."""
    async with (
        open_session(users.connect(root, creator)) as commands,
        open_session(users.connect(root, member)) as daemons,
    ):
        new = NewCluster("payments", 2, model.UUID(int=7), STORAGES)
        await commands.create_cluster(new)
        await create_nodes_of_administrators(commands)
        await create_nodes_of_members(daemons)
        yield


def tree(client: KazooClient, path: str) -> list[str]:
    children = client.get_children(path)
    return [path, *(each for name in children for each in tree(client, f"{path}/{name}"))]


def permitted(call, *words, **named) -> bool:
    try:
        call(*words, **named)
    except NoAuthError:
        return False
    return True


def permissions_found(client: KazooClient, users: ZooKeeperUsers, path: str) -> str:
    """Try each operation on a znode; return the permitted ones. An administrator undoes them."""
    found = ""
    with users.kazoo("administrator") as administrator:
        data, stat = administrator.get(path)
        if not stat.ephemeralOwner:
            if permitted(client.create, f"{path}/new", acl=OPEN_ACL_UNSAFE):
                found += "c"
            administrator.ensure_path(f"{path}/new")
        if permitted(client.get, path):
            assert permitted(client.get_children, path)
            found += "r"
        if permitted(client.set, path, data):
            found += "w"
        if not stat.ephemeralOwner:
            if permitted(client.delete, f"{path}/new"):
                found += "d"
            else:
                administrator.delete(f"{path}/new")
        acl, _ = administrator.get_acls(path)
        if permitted(client.set_acls, path, acl):
            found += "a"
    return found


def expected_permissions(user: str, row: str) -> str:
    if user == "administrator":
        return "crwda"
    if user == "member":
        return "".join(each for each in "crwd" if each in OF_MEMBERS.get(row, "crwd"))
    return "r" if row in PUBLIC else ""


@pytest.mark.parametrize("user", USERS)
def test_the_access_list_of_each_znode_permits_each_user_the_documented_operations(
    users: ZooKeeperUsers, user: str
):
    """Members create nodes with the same access lists as administrators."""
    root = f"/users/{user}/cluster"

    async def run():
        async with whole_cluster(users, root, creator="administrator", member="member"):
            await asyncio.to_thread(check_all_nodes, users, root, user)

    asyncio.run(run())


def check_all_nodes(users: ZooKeeperUsers, root: str, user: str) -> None:
    rows = set()
    with users.kazoo("administrator") as administrator, users.kazoo(user) as client:
        for path in tree(administrator, root):
            row = znode_at(root, path).path
            rows.add(row)
            expected = expected_permissions(user, row)
            if administrator.exists(path).ephemeralOwner:
                expected = expected.replace("c", "").replace("d", "")
            assert permissions_found(client, users, path) == expected, path
        assert rows == {znode.path for znode in ZNODES} - RESERVED
        above = root.rpartition("/")[0]
        expected = {"administrator": "crwda"}.get(user, "r")
        assert permissions_found(client, users, above) == expected


def test_members_delete_no_node_of_administrators(users: ZooKeeperUsers):
    """Deletion is a permission of the parent."""
    root = "/deletions"

    async def run():
        async with whole_cluster(users, root, creator="administrator", member="member"):
            await asyncio.to_thread(check)

    def check() -> None:
        with users.kazoo("administrator") as administrator, users.kazoo("member") as member:
            entry = "/deletions/x/audit/e_0000000000"
            for path in (entry, f"{root}/x/audit", f"{root}/x/access", f"{root}/x/restored"):
                assert administrator.exists(path)
                assert not permitted(member.delete, path), path
            # Members can delete the nodes that they have created.
            for name in ("nightly/0", "nightly"):
                member.delete(f"{root}/x/writes/{name}")
            (server,) = member.get_children(f"{root}/serverDescriptors")
            member.delete(f"{root}/serverDescriptors/{server}")

    asyncio.run(run())


# --- protect


def access_lists(users: ZooKeeperUsers, root: str) -> dict[str, set[ACL]]:
    """Return the access list of each node, by its row."""
    with users.kazoo("administrator") as client:
        return {
            znode_at(root, path).path: set(client.get_acls(path)[0]) for path in tree(client, root)
        }


@pytest.mark.parametrize("before", ["old", "public"])
def test_command_protect_gives_all_znodes_the_access_lists_of_a_new_cluster(
    users: ZooKeeperUsers, before: str
):
    """At first, nodes are open, or belong to the old user, which becomes the members' user."""
    root, new = f"/protected-{before}", f"/new-{before}"

    async def run():
        async with (
            whole_cluster(users, root, creator=before, member=before),
            whole_cluster(users, new, creator="administrator", member="member"),
        ):
            count = await zookeeper_session.protect(users.connect(root, "administrator"))
            found = await asyncio.to_thread(access_lists, users, root)
            assert found == await asyncio.to_thread(access_lists, users, new)
            assert count >= len(found)

    asyncio.run(run())


def test_an_auth_file_with_one_user_still_protects_the_znodes(users: ZooKeeperUsers):
    root = "/one-user"

    async def run():
        async with whole_cluster(users, root, creator="public", member="old"):
            await zookeeper_session.protect(users.connect(root, "old"))
            with users.kazoo("member") as client:
                found = {each for path in tree(client, root) for each in client.get_acls(path)[0]}
            assert {(each.id.id, each.perms) for each in found} == {
                (make_digest_acl_credential("waltz", "of members"), 31)
            }

    asyncio.run(run())


# --- nodes that another user has created before


def test_creating_or_importing_permissions_sets_the_access_lists_of_znodes(users: ZooKeeperUsers):
    """A member may create nodes below `R/x`, also those of administrators."""
    root, new = "/created-before", "/new-permissions"
    found = Permissions(1, "ops", 0, bytes(32))
    author = Author("ops", 1)

    async def run():
        async with (
            whole_cluster(users, new, creator="administrator", member="member"),
            open_session(users.connect(root, "administrator")) as commands,
        ):
            await commands.create_cluster(NewCluster("payments", 2, model.UUID(int=7), STORAGES))
            await asyncio.to_thread(create_open, f"{root}/x/audit")
            await commands.permissions.create(found, author)
            await asyncio.to_thread(check, "R/x/audit")
            await asyncio.to_thread(
                create_open, f"{root}/x/access", access_node.encode_permissions(found)
            )
            await commands.permissions.replace(found, author, lambda *_: None, new_key=bytes(32))
            await asyncio.to_thread(check, "R/x/access")

    def create_open(path: str, data: bytes = b"") -> None:
        with users.kazoo("administrator") as administrator:
            administrator.delete(path) if administrator.exists(path) else None
        with users.kazoo("member") as member:
            member.create(path, data, acl=OPEN_ACL_UNSAFE)

    def check(row: str) -> None:
        assert access_lists(users, root)[row] == access_lists(users, new)[row]

    asyncio.run(run())


def test_clients_without_a_zookeeper_user_read_neither_permissions_nor_the_audit_log(
    users: ZooKeeperUsers,
):
    """The auth file has one user and a line for clients that read, before and after `protect`."""
    root = "/readable"

    async def run():
        async with whole_cluster(users, root, creator="readable", member="readable"):
            await asyncio.to_thread(check)
            await zookeeper_session.protect(users.connect(root, "readable"))
            await asyncio.to_thread(check)

    def check() -> None:
        with users.kazoo("member") as member, users.kazoo("public") as public:
            for path in tree(member, root):
                is_secret = path.startswith((f"{root}/x/access", f"{root}/x/audit"))
                assert permitted(public.get, path) is not is_secret, path

    asyncio.run(run())


def test_a_user_may_remove_another_user_from_the_auth_file(users: ZooKeeperUsers):
    """The other user must not be treated as the members' user of a cluster with two users."""
    root, file = "/withdrawn", users.directory / "zookeeper.auth"
    connect = f"{users.hosts}{root}?auth={file}"

    async def run():
        file.write_text("digest:waltz:1\n" + line_of("other", "2", "crwd"))
        async with open_session(connect) as commands:
            await commands.create_cluster(NewCluster("payments", 1, model.UUID(int=7), STORAGES))
        file.write_text("digest:waltz:1\n")
        async with open_session(connect) as commands:
            await commands.check_administrator()
        await zookeeper_session.protect(connect)

    asyncio.run(run())


# --- a changed password


def identities(client: KazooClient, root: str) -> set[str]:
    """Return all users that the access lists name."""
    return {entry.id.id for path in tree(client, root) for entry in client.get_acls(path)[0]}


def identity(name: str, password: str) -> str:
    return make_digest_acl_credential(name, password)


def line_of(name: str, password: str, permissions: str) -> str:
    return f"digest:{identity(name, password)}:{permissions}\n"


def one_user_changes() -> list[set[str] | str]:
    old, new = "digest:waltz:1\n", "digest:waltz:2\n"
    both_old = old + line_of("waltz", "2", "cdrwa")
    both_new = new + line_of("waltz", "1", "cdrwa")
    return [{old, both_old}, both_old, {both_old, both_new}, {both_new, new}, new]


def members_user_changes() -> list[set[str] | str]:
    others = f"administrators:digest:{identity('admin', '1')}\n"
    old, new = f"digest:waltz:1\n{others}", f"digest:waltz:2\n{others}"
    both_old = old + line_of("waltz", "2", "cdrw")
    both_new = new + line_of("waltz", "1", "cdrw")
    administrator = "digest:admin:1\nmembers:digest:waltz:2\n"
    both = administrator + line_of("waltz", "1", "cdrw")
    return [{old, both_old}, both, {both_old, both_new}, {both_new, new}, administrator]


def administrators_user_changes() -> list[set[str] | str]:
    old, new = (
        f"digest:waltz:2\nadministrators:digest:{identity('admin', each)}\n" for each in "12"
    )
    line = line_of("admin", "2", "cdrwa")
    administrator = "digest:admin:{}\nmembers:digest:waltz:2\n"
    protecting = administrator.format(1) + line
    return [{old, old + line}, protecting, {old + line, new}, administrator.format(2)]


@pytest.mark.parametrize(
    ("first", "changes", "last"),
    [
        ("digest:waltz:1\n", one_user_changes, {identity("waltz", "2")}),
        (
            "digest:admin:1\nmembers:digest:waltz:1\n",
            members_user_changes,
            {identity("waltz", "2"), identity("admin", "1"), "anyone"},
        ),
        (
            "digest:admin:1\nmembers:digest:waltz:2\n",
            administrators_user_changes,
            {identity("waltz", "2"), identity("admin", "2"), "anyone"},
        ),
    ],
)
def test_every_process_keeps_its_access_while_a_password_changes(
    users: ZooKeeperUsers, first, changes, last
):
    """Test the auth files of docs/zookeeper.md in their order.

    A set has the files of processes that run together; a string is the file for `protect`.
    """
    root, file = f"/changed-{changes.__name__}", users.directory / "zookeeper.auth"
    connect = f"{users.hosts}{root}?auth={file}"

    async def run_together(texts: set[str]) -> None:
        """Let each process create a node, and read those of all others."""
        async with contextlib.AsyncExitStack() as stack:
            processes = []
            for text in sorted(texts):
                file.write_text(text)
                processes.append(await stack.enter_async_context(open_session(connect)))
            for process in processes:
                await process.writes.begin(f"w{await process.next_client_id()}", {0: -1}, 1_000_000)
            for process in processes:
                await process.writes.read_all()

    async def run():
        file.write_text(first)
        async with open_session(connect) as commands:
            await commands.create_cluster(NewCluster("payments", 1, model.UUID(int=7), STORAGES))
        for step in changes():
            if isinstance(step, str):
                file.write_text(step)
                await zookeeper_session.protect(connect)
            else:
                await run_together(step)
        async with open_session(connect) as commands:  # as the user that has protected it
            assert await asyncio.to_thread(identities, commands._znodes._client, root) == last

    asyncio.run(run())


# --- commands


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("member", ["cluster", "protect"]),
        ("member", ["cluster", "audit", "--connect"]),
        ("member", ["cluster", "create", "--partitions", "1"]),
        ("member", ["cluster", "delete", "payments", "--force", "--connect"]),
        ("member", ["cluster", "add-storage", "10.0.0.9:5280", "--connect"]),
        ("old", ["cluster", "delete", "payments", "--force", "--connect"]),
        ("public", ["cluster", "delete", "payments", "--force", "--connect"]),
        ("alone", ["cluster", "protect"]),
        ("alone", ["access", "init", "--connect"]),
        ("alone", ["cluster", "delete", "payments", "--force", "--connect"]),
    ],
    ids=lambda each: each if isinstance(each, str) else each[1],
)
def test_an_administrator_command_with_a_wrong_auth_file_changes_nothing(
    users: ZooKeeperUsers, user, words
):
    root = f"/commands-{user}-{words[1]}"

    async def run():
        async with whole_cluster(users, root, creator="administrator", member="member"):
            before = await asyncio.to_thread(content, users, root)
            result = await asyncio.to_thread(run_command, *words, users.connect(root, user))
            assert result.returncode != 0
            assert result.stderr.count("\n") == 1, result.stderr
            expected = {
                "member": (
                    "expected the auth file of an administrator, with a line "
                    "members:digest:USER:PASSWORD, found only the members' user 'waltz'"
                ),
                "old": ("line members:digest:USER:PASSWORD, found only the members' user 'waltz'"),
                "alone": (
                    f"the auth file has only user 'admin', but {root} also grants access "
                    "to 'waltz', so servers and storages could not read znodes that this command "
                    "creates. Hint: add the line members:digest:waltz:PASSWORD to the auth file"
                ),
                "public": "requires authentication for /commands-public-delete/x/audit:",
            }
            assert expected[user] in result.stderr
            assert await asyncio.to_thread(content, users, root) == before

    asyncio.run(run())


@pytest.mark.parametrize(
    ("user", "error"),
    [
        ("old", "found only the members' user 'waltz'"),
        ("alone", "the auth file has only user"),
        ("granted", "the auth file has only user"),
    ],
)
def test_the_administrator_check_works_before_the_first_audit_entry(
    users: ZooKeeperUsers, user, error
):
    root = f"/without-audit-{user}"

    async def run():
        async with open_session(users.connect(root, "administrator")) as commands:
            await commands.create_cluster(NewCluster("payments", 1, model.UUID(int=7), STORAGES))
            await commands.check_administrator()
        async with open_session(users.connect(root, user)) as commands:
            with pytest.raises(errors.BadConfig, match=error):
                await commands.check_administrator()

    asyncio.run(run())


def content(users: ZooKeeperUsers, root: str) -> dict[str, bytes]:
    with users.kazoo("administrator") as client:
        return {path: client.get(path)[0] for path in tree(client, root)}


def test_a_member_creates_no_cluster(users: ZooKeeperUsers):
    result = run_command("cluster", "create", users.connect("/none", "member"), "--partitions", "1")
    assert "expected the auth file of an administrator" in result.stderr
    with users.kazoo("public") as client:
        assert client.exists("/none") is None


def test_a_client_without_a_zookeeper_user_reads_the_public_znodes(users: ZooKeeperUsers):
    """Such a client finds servers, but ZooKeeper gives it no client ID."""
    root = "/clients"

    async def run():
        async with (
            whole_cluster(users, root, creator="administrator", member="member"),
            open_session(users.connect(root, "public")) as client,
        ):
            assert (await client.read_cluster()).params.name == "payments"
            assert list((await client.read_servers()).servers) == [1]
            assert len((await client.read_groups()).groups) == len(STORAGES)
            assert await client.read_restore_sources() == NO_RESTORE_SOURCES
            with pytest.raises(errors.BadConfig, match="requires authentication for /clients/ids/"):
                await client.next_client_id()
            with pytest.raises(errors.BadConfig, match="authentication for /clients/x/writes"):
                await client.writes.begin("other", {0: -1}, 1_000)

    asyncio.run(run())
