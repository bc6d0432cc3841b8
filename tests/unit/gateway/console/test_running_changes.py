"""Running changes of the console: permissions, audit entries, outcomes and limits."""

import asyncio
import dataclasses
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.loops import poll_until, run_on_virtual_loop
from waltz_core import errors
from waltz_core.access.permissions import Grant, Permissions, StoredToken
from waltz_core.access.principals import ANONYMOUS
from waltz_core.access.requirements import ADMINISTER, READ
from waltz_core.administration import member_connections
from waltz_core.administration.change_run import OUTCOME_INTERRUPTED, now_ms
from waltz_core.cluster.change.audit import OUTCOME_BEGUN, OUTCOME_DONE, AuditEntry, AuditLog
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.gateway.console import running_changes
from waltz_core.gateway.console.change_kinds import CHANGE_KINDS
from waltz_core.gateway.console.running_changes import (
    ENDED_CHANGES_MAX,
    HISTORY_MAX,
    INTERRUPTION_S_MAX,
    RUNNING_CHANGES_MAX,
    ChangeCaller,
    ConsoleChanges,
)

ROOT = "/w"
CONNECT = f"zk:2181{ROOT}"
WITH_AUTH_FILE = f"{CONNECT}?auth=/etc/zk"
SERVER = "10.0.1.1:5180"
ARGUMENTS = {"server": SERVER}
NO_TOKEN = ChangeCaller("", None)
AUTHOR = Author("ops", 1)
LATER_MS = 1 << 50
ALL = None
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    groups={"ops": ("carl",), "empty": ()},
    grants=(
        Grant("ann", False, ADMINISTER, ALL),
        Grant("bob", False, ADMINISTER, ((0, 1),)),
        Grant("ops", True, ADMINISTER, ALL),
        Grant("eve", False, READ, ALL),
    ),
    tokens={
        name[0].encode().hex() * 32: StoredToken(name, name.split("-")[0], expires_ms)
        for name, expires_ms in (
            *((each, LATER_MS) for each in ("ann", "bob", "carl", "eve")),
            ("xann", 1),
        )
    },
)


def caller(name):
    """Return the caller with the token whose ID begins like the name."""
    return ChangeCaller(name[0].encode().hex() * 32, None)


class World:
    """A cluster in memory, and the changes of one gateway."""

    def __init__(self, tasks, connect):
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.session = self.zookeeper.session()
        self.coordinator = Coordinator(self.session, ROOT)
        self.changes = ConsoleChanges(connect, lambda: self.coordinator, tasks)
        self.calls = []
        self.started_count = 0
        self.may_end = asyncio.Event()
        self.error = None

    async def function(self, run, *, server):
        """The function of a change, which ends when the test permits it."""
        self.calls.append((server, member_connections.ssl_context()))
        run.note_step("step 1")
        run.report_wait("the test")
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return {"summary": "it is removed"}

    async def start(self, by=NO_TOKEN, server=None):
        """Start a change, by default with a new server ID."""
        self.started_count += 1
        kind = CHANGE_KINDS["remove-server"]._replace(function=self.function)
        name = server or f"10.0.1.{self.started_count}:5180"
        return await self.changes.start(by, kind, {"server": name})

    async def end(self, *changes, error=None):
        """Let the running changes end, and wait for the given changes."""
        self.error = error
        self.may_end.set()
        await poll_until(lambda: all(change.ended_ms is not None for change in changes))

    async def audit(self):
        entries = await self.coordinator.audit.read()
        return [(entry.user, entry.command, entry.outcome) for entry in entries]


@asynccontextmanager
async def open_world(monkeypatch, connect=CONNECT, permissions=None):
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks, connect)
        await world.coordinator.create_cluster(NewCluster("w", 2, UUID(int=7)))
        if permissions is not None:
            await world.coordinator.permissions.create(permissions, AUTHOR)

        @asynccontextmanager
        async def open_session(text):
            assert text == connect
            coordinator = world.zookeeper.coordinator(ROOT)
            yield coordinator
            await coordinator.close()

        monkeypatch.setattr(zookeeper_session, "open_session", open_session)
        yield world
        world.may_end.set()


# --- permissions (rules 1 and 2)


@run_on_virtual_loop
async def test_without_access_control_or_an_auth_file_every_caller_may_make_changes(monkeypatch):
    async with open_world(monkeypatch) as world:
        for by in (NO_TOKEN, caller("ann")):
            assert await world.changes.check_permitted(by) == ANONYMOUS


@run_on_virtual_loop
async def test_without_access_control_a_gateway_with_an_auth_file_makes_no_changes(monkeypatch):
    async with open_world(monkeypatch, WITH_AUTH_FILE) as world:
        for by in (NO_TOKEN, caller("ann")):
            with pytest.raises(errors.PermissionDenied, match="has no access control"):
                await world.start(by)
        assert (world.calls, await world.audit()) == ([], [])


@pytest.mark.parametrize("connect", [CONNECT, WITH_AUTH_FILE])
@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (caller("ann"), "ann"),
        (caller("carl"), "carl"),  # by its group
        (caller("bob"), errors.PermissionDenied),  # not for all partitions
        (caller("eve"), errors.PermissionDenied),  # another verb
        (NO_TOKEN, errors.PermissionDenied),
        (caller("xann"), errors.AuthenticationFailed),  # expired
        (caller("unknown"), errors.AuthenticationFailed),
    ],
)
@run_on_virtual_loop
async def test_a_principal_needs_the_verb_administer_for_all_partitions(
    monkeypatch, connect, by, expected
):
    async with open_world(monkeypatch, connect, PERMISSIONS) as world:
        if isinstance(expected, str):
            assert await world.changes.check_permitted(by) == expected
            return
        for request in (world.changes.check_permitted, world.start):
            with pytest.raises(expected):
                await request(by)
        assert (world.calls, await world.audit()) == ([], [])


@run_on_virtual_loop
async def test_a_grant_for_anonymous_permits_callers_without_a_token(monkeypatch):
    grants = (Grant(ANONYMOUS, False, ADMINISTER, ALL),)
    permissions = dataclasses.replace(PERMISSIONS, grants=grants)
    async with open_world(monkeypatch, WITH_AUTH_FILE, permissions) as world:
        assert await world.changes.check_permitted(NO_TOKEN) == ANONYMOUS
        with pytest.raises(errors.PermissionDenied, match="principal 'ann' may not change"):
            await world.changes.check_permitted(caller("ann"))


@run_on_virtual_loop
async def test_a_change_is_denied_if_its_permission_was_revoked_before_the_start(
    monkeypatch,
):
    async with open_world(monkeypatch, WITH_AUTH_FILE, PERMISSIONS) as world:
        await world.changes.check_permitted(caller("ann"))
        await world.coordinator.permissions.change(
            lambda before: dataclasses.replace(before, grants=()), AUTHOR
        )
        with pytest.raises(errors.PermissionDenied):
            await world.start(caller("ann"))
        assert (world.calls, await world.audit()) == ([], [])


@run_on_virtual_loop
async def test_a_gateway_without_an_administrator_makes_no_changes(monkeypatch):
    async with open_world(monkeypatch, WITH_AUTH_FILE, PERMISSIONS) as world:

        async def check_administrator():
            raise errors.BadConfig("expected the auth file of an administrator")

        monkeypatch.setattr(world.coordinator, "check_administrator", check_administrator)
        with pytest.raises(errors.BadConfig, match="of an administrator"):
            await world.start(caller("ann"))
        assert (world.calls, await world.audit()) == ([], [])


# --- the course of a change


@run_on_virtual_loop
async def test_a_change_has_an_audit_entry_with_its_principal_and_outcome(monkeypatch):
    async with open_world(monkeypatch, WITH_AUTH_FILE, PERMISSIONS) as world:
        ssl = SimpleNamespace()
        before_ms = now_ms()
        change = await world.start(caller("ann")._replace(ssl=ssl))
        await poll_until(lambda: world.calls)
        assert world.calls == [(SERVER, ssl)]
        assert member_connections.ssl_context() is None  # of other tasks
        user, command = f"ann via gateway@{socket.gethostname()}", f"cluster remove-server {SERVER}"
        assert await world.audit() == [(user, command, OUTCOME_BEGUN)]
        running = change.fields()
        assert before_ms <= running.pop("begun_ms") <= now_ms()
        assert running == {
            "id": "1",
            "name": "remove-server",
            "command": command,
            "user": user,
            "ended_ms": None,
            "outcome": OUTCOME_BEGUN,
            "summary": "",
            "steps": ["step 1"],
            "waits_for": "the test",
        }
        await world.end(change)
        assert await world.audit() == [(user, command, OUTCOME_DONE)]
        ended = change.fields()
        assert (ended["outcome"], ended["summary"]) == (OUTCOME_DONE, "it is removed")
        assert (ended["steps"], ended["waits_for"]) == (["step 1"], "")
        assert ended["ended_ms"] >= ended["begun_ms"]
        entry = (await world.changes.fields())["history"][0]
        assert (entry["user"], entry["command"], entry["outcome"]) == (user, command, OUTCOME_DONE)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.BadRequest("it still runs. Hint: stop it."), "failed: it still runs. Hint: stop"),
        (errors.CoordinatorUnavailable("no answer"), "failed: no answer"),
        (ValueError("secret"), "failed: internal error; the log of the gateway has the details"),
    ],
)
@run_on_virtual_loop
async def test_an_error_is_the_outcome_of_a_change(monkeypatch, error, outcome):
    async with open_world(monkeypatch) as world:
        change = await world.start()
        await world.end(change, error=error)
        assert change.outcome.startswith(outcome)
        ((_, _, recorded),) = await world.audit()
        assert recorded.startswith("failed: ")
        assert "secret" not in recorded
        await world.start()  # the gateway continues


@run_on_virtual_loop
async def test_a_change_without_a_session_with_zookeeper_fails(monkeypatch):
    async with open_world(monkeypatch) as world:

        def open_session(_connect):
            raise errors.CoordinatorUnavailable("no connection")

        monkeypatch.setattr(zookeeper_session, "open_session", open_session)
        change = await world.start()
        await poll_until(lambda: change.ended_ms is not None)
        assert change.outcome == "failed: no connection"


@run_on_virtual_loop
async def test_a_change_that_times_out_reports_its_pending_step(monkeypatch):
    monkeypatch.setattr(running_changes, "TIMEOUT_S", 1.0)
    async with open_world(monkeypatch) as world:
        change = await world.start()
        await poll_until(lambda: change.ended_ms is not None)
        assert "did not finish within 1 s. It still waits for: the test" in change.outcome
        ((_, _, recorded),) = await world.audit()
        assert recorded == change.outcome


@run_on_virtual_loop
async def test_a_stopping_gateway_records_the_interruption_of_its_changes(monkeypatch):
    async with open_world(monkeypatch) as world:
        running = await world.start()
        await poll_until(lambda: world.calls)
        just_started = await world.start()
        await world.changes.interrupt()
        changes = (running, just_started)
        await poll_until(lambda: all(change.ended_ms is not None for change in changes))
        assert {change.outcome for change in changes} == {"failed: the gateway was stopped"}
        assert [outcome for _, _, outcome in await world.audit()] == [OUTCOME_INTERRUPTED]


@run_on_virtual_loop
async def test_a_stopping_gateway_waits_for_zookeeper_for_a_limited_time(monkeypatch):
    async with open_world(monkeypatch) as world:
        change = await world.start()
        await poll_until(lambda: world.calls)

        async def end(*_):
            await asyncio.Event().wait()

        monkeypatch.setattr(AuditLog, "end", end)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await world.changes.interrupt()
        await poll_until(lambda: change.ended_ms is not None)
        assert loop.time() - begun_s < INTERRUPTION_S_MAX + 0.5
        assert change.outcome == "failed: the gateway was stopped"
        assert [outcome for _, _, outcome in await world.audit()] == [OUTCOME_BEGUN]


@run_on_virtual_loop
async def test_a_repeated_request_starts_one_change(monkeypatch):
    async with open_world(monkeypatch) as world:
        first = await world.start(server=SERVER)
        with pytest.raises(errors.BadRequest, match="the same change runs as number 1"):
            await world.start(server=SERVER)
        await world.end(first)
        assert len(await world.audit()) == 1
        again = await world.start(server=SERVER)
        await world.end(again)
        assert len(world.calls) == 2


# --- limits


@run_on_virtual_loop
async def test_the_number_of_running_changes_is_limited(monkeypatch):
    async with open_world(monkeypatch) as world:

        async def try_to_start():
            try:
                return await world.start()
            except errors.Overloaded:
                return None

        permitted, all_wait = (
            world.changes.check_permitted,
            asyncio.Barrier(RUNNING_CHANGES_MAX + 2),
        )

        async def check_permitted(_self, by):
            await all_wait.wait()
            return await permitted(by)

        with monkeypatch.context() as patch:
            patch.setattr(ConsoleChanges, "check_permitted", check_permitted)
            async with asyncio.TaskGroup() as group:
                tries = [group.create_task(try_to_start()) for _ in range(RUNNING_CHANGES_MAX + 2)]
        started = [each.result() for each in tries if each.result() is not None]
        assert len(started) == RUNNING_CHANGES_MAX
        with pytest.raises(errors.Overloaded, match=f"{RUNNING_CHANGES_MAX} changes already run"):
            await world.start()
        await world.end(*started)
        assert (await world.start()).number == RUNNING_CHANGES_MAX + 1


@run_on_virtual_loop
async def test_only_the_newest_finished_changes_are_listed(monkeypatch):
    async with open_world(monkeypatch) as world:
        oldest = await world.start()
        await poll_until(lambda: world.calls)
        may_end, world.may_end = world.may_end, asyncio.Event()
        for _ in range(ENDED_CHANGES_MAX + 5):
            await world.end(await world.start())
        await world.start()
        numbers = [each["id"] for each in (await world.changes.fields())["running"]]
        last = ENDED_CHANGES_MAX + 7
        assert numbers == [
            *map(str, range(last, last - ENDED_CHANGES_MAX - 1, -1)),
            str(oldest.number),
        ]
        may_end.set()


@run_on_virtual_loop
async def test_the_newest_audit_entries_are_listed_first(monkeypatch):
    async with open_world(monkeypatch) as world:
        for number in range(HISTORY_MAX + 3):
            await world.coordinator.audit.begin(AuditEntry("ann@host", number, "cluster prefer"))
        history = (await world.changes.fields())["history"]
        assert [change["begun_ms"] for change in history] == list(range(HISTORY_MAX + 2, 2, -1))


@run_on_virtual_loop
async def test_the_kinds_of_changes_are_listed_for_the_dialogs(monkeypatch):
    async with open_world(monkeypatch) as world:
        fields = await world.changes.fields()
        assert [kind["name"] for kind in fields["kinds"]] == list(CHANGE_KINDS)
        (added,) = [kind for kind in fields["kinds"] if kind["name"] == "add-storage"]
        assert added["parameters"][1] == {
            "name": "group",
            "kind": "integer",
            "text": "the number of its group; default: a new group",
            "option": "--group",
            "is_required": False,
        }


@run_on_virtual_loop
async def test_without_zookeeper_no_change_starts(monkeypatch):
    async with open_world(monkeypatch) as world:
        world.session.suspend()
        for request in (world.start, world.changes.fields):
            with pytest.raises(errors.CoordinatorUnavailable):
                await request()
        assert world.calls == []
