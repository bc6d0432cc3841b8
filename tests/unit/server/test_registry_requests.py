"""The registry of writes through a server: contract, owners of writes, and invalid requests."""

import asyncio

import pytest

from tests.loops import poll_until, run_on_loop
from tests.unit.cluster.test_coordinator import ROOT, with_cluster
from tests.unit.server.registry_world import (
    PARTITION_COUNT,
    Owners,
    RegistryServer,
    requests_of,
    serving,
)
from tests.write_registry_contract import (
    MARKS,
    SCENARIOS,
    the_retention_of_a_write_begins_with_its_last_change,
)
from waltz_core import errors
from waltz_core.access.client_ids import NO_PROOF
from waltz_core.client.links import write_requests
from waltz_core.client.links.connections import ServerLink
from waltz_core.cluster import write_registry as writes_module
from waltz_core.cluster.write_registry import WriteState
from waltz_core.config import ClientConfig
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.server.process.registry_requests import (
    CONCURRENT_READS_MAX,
    KEEP_MS_MAX,
    OPERATIONS_IN_PROGRESS_MAX,
    TASKS_MAX,
    RegistryRequests,
)
from waltz_core.wire.messages import RegistryOperation, RegistryRequest

REQ_ID = ReqId(ClientId(-1), Generation(0), PartitionId(-1), -5)
OPERATIONS = RegistryOperation


# A server removes expired writes by itself, so this scenario would find no expired write.
SERVED = [
    each for each in SCENARIOS if each is not the_retention_of_a_write_begins_with_its_last_change
]


@pytest.mark.parametrize("check_scenario", SERVED, ids=lambda scenario: scenario.__name__)
def test_all_scenarios_of_the_write_registry_pass_through_a_server(check_scenario):
    serving(lambda world: check_scenario(world, ROOT))


# ---------------------------------------------------------------------------------------------
# owners (decision 048, AC 14)


class Requester:
    """The access of a connection."""

    def __init__(self, principal, *, is_enforced=True, ids_left=100):
        self.ids_left = ids_left
        self.principal, self.is_enforced, self.denied = principal, is_enforced, []

    def is_only_reported(self, error, request):
        self.denied.append(str(error))
        return not self.is_enforced

    def charge_client_id(self):
        if self.ids_left == 0:
            raise errors.Overloaded("no ID is left")
        self.ids_left -= 1

    def proof_of(self, client_id):
        return f"{self.principal}/{client_id}".encode().ljust(16)


async def with_requests():
    """Return the requests of a server, and the registry itself."""
    _, _, coordinator = await with_cluster()
    registry_requests = RegistryRequests(
        coordinator.writes, coordinator.next_client_id, PARTITION_COUNT, asyncio.get_running_loop()
    )
    return registry_requests, coordinator.writes


def request(operation, write="w", **rest):
    arguments = {
        OPERATIONS.BEGIN: b'{"keep_ms": 1000}',
        OPERATIONS.ENTER: b'{"run": "r"}',
        OPERATIONS.TASKS: b'{"run": "other"}',
        OPERATIONS.FINISH: b'{"keep_ms": 1000, "summary": {"rows": 1}}',
    }
    return RegistryRequest(
        REQ_ID, operation, write, **{"arguments": arguments.get(operation, b""), **rest}
    )


@run_on_loop
async def test_a_write_belongs_to_the_principal_that_began_it():
    requests, write_registry = await with_requests()
    requester, other, stranger = Requester("mine"), Requester("other"), Requester("anonymous")
    await requests.answer(request(OPERATIONS.BEGIN), requester)
    entered = await requests.answer(request(OPERATIONS.ENTER), requester)
    assert entered.proof == b"mine/1".ljust(16)
    for operation in OPERATIONS:
        for each in (other, stranger):
            with pytest.raises(errors.PermissionDenied, match="write w belongs to another"):
                await requests.answer(request(operation, attempt=1), each)
    assert len(other.denied) == len(stranger.denied) == len(OPERATIONS)
    assert (await write_registry.read("w")).principal == "mine"
    for operation in (OPERATIONS.CHECK, OPERATIONS.TASKS, OPERATIONS.FINISH, OPERATIONS.FORGET):
        await requests.answer(request(operation, attempt=1), requester)
    assert await write_registry.read("w") is None
    # The name of the write is free again.
    await requests.answer(request(OPERATIONS.BEGIN), other)
    assert (await write_registry.read("w")).principal == "other"


@pytest.mark.parametrize("beginner", [None, "anonymous"])
@run_on_loop
async def test_a_write_without_an_owner_belongs_to_the_first_principal_that_enters_a_task(beginner):
    requests, write_registry = await with_requests()
    await requests.answer(request(OPERATIONS.BEGIN), beginner and Requester(beginner))
    await requests.answer(request(OPERATIONS.ENTER), Requester("anonymous"))
    # Only entering a task as a named principal sets the owner.
    for each in ("other", "mine"):
        await requests.answer(request(OPERATIONS.BEGIN), Requester(each))
        await requests.answer(request(OPERATIONS.READ), Requester(each))
    entered = await requests.answer(request(OPERATIONS.ENTER, task=1), Requester("mine"))
    assert entered.proof == b"mine/2".ljust(16)
    assert (await write_registry.read("w")).principal == "mine"
    with pytest.raises(errors.PermissionDenied):
        await requests.answer(request(OPERATIONS.ENTER), Requester("other"))
    # A task that began before the write had an owner continues with its client ID and a proof.
    again = await requests.answer(request(OPERATIONS.ENTER), Requester("mine"))
    assert again.proof == b"mine/1".ljust(16)


@run_on_loop
async def test_one_of_several_concurrent_principals_becomes_the_owner_of_a_write():
    requests, write_registry = await with_requests()
    await requests.answer(request(OPERATIONS.BEGIN), None)
    owners, denied = [], []

    async def enter(number):
        try:
            await requests.answer(request(OPERATIONS.ENTER, task=number), Requester(f"p{number}"))
            owners.append(number)
        except errors.PermissionDenied:
            denied.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(enter(number))
    (winner,) = owners
    assert len(denied) == 3
    assert (await write_registry.read("w")).principal == f"p{winner}"
    assert list(await write_registry.read_tasks("w")) == [winner]


@run_on_loop
async def test_report_mode_permits_and_counts_requests_that_enforcement_would_deny():
    requests, write_registry = await with_requests()
    await requests.answer(request(OPERATIONS.BEGIN), Requester("mine"))
    other = Requester("other", is_enforced=False)
    entered = await requests.answer(request(OPERATIONS.ENTER), other)
    # A proof would remain valid after access control is enforced.
    assert entered.proof == NO_PROOF
    assert len(other.denied) == 1
    assert (await write_registry.read("w")).principal == "mine"
    assert list(await write_registry.read_tasks("w")) == [0]


@run_on_loop
async def test_a_principal_has_a_limited_number_of_writes(monkeypatch):
    monkeypatch.setattr(writes_module, "WRITES_PER_PRINCIPAL_MAX", 3)
    requests, write_registry = await with_requests()
    requester = Requester("mine")
    for name in ("a", "b"):
        await requests.answer(request(OPERATIONS.BEGIN, name), requester)
    expired_arguments = b'{"keep_ms": 0}'
    await requests.answer(
        request(OPERATIONS.BEGIN, "expired", arguments=expired_arguments), requester
    )
    await requests.answer(request(OPERATIONS.BEGIN, "c"), requester)  # removes the expired write
    assert await write_registry.read("expired") is None
    with pytest.raises(errors.BadRequest, match="mine already has 3 exactly-once writes"):
        await requests.answer(request(OPERATIONS.BEGIN, "d"), requester)
    # Existing writes continue, and other principals are not affected.
    await requests.answer(request(OPERATIONS.BEGIN, "a"), requester)
    await requests.answer(request(OPERATIONS.BEGIN, "d"), Requester("other"))
    await requests.answer(request(OPERATIONS.FORGET, "b"), requester)
    await requests.answer(request(OPERATIONS.BEGIN, "e"), requester)
    # With "report", all clients without a token are one principal, and no request may fail.
    await requests.answer(request(OPERATIONS.BEGIN, "f"), Requester("mine", is_enforced=False))


@run_on_loop
async def test_no_client_id_is_issued_if_the_owner_of_the_write_changes_concurrently():
    """If the client ID were not denied, two principals would have proofs of the same client ID."""
    _, write_registry = await with_requests()
    mine, other = write_registry.for_principal("mine"), write_registry.for_principal("other")

    async def let_other_begin():
        await mine.forget("w")
        await other.begin("w", MARKS, 1_000)
        return ClientId(7)

    await mine.begin("w", MARKS, 1_000)
    with pytest.raises(errors.PermissionDenied, match="belongs to another principal than mine"):
        await mine.enter("w", 0, "r", let_other_begin)


@run_on_loop
async def test_a_write_name_without_a_number_belongs_to_no_series():
    requests, write_registry = await with_requests()
    for name in ("a-5", "a-b", "a"):
        arguments = b'{"keep_ms": 1000, "in_series": true}'
        await requests.answer(request(OPERATIONS.BEGIN, name, arguments=arguments), None)
    assert sorted(await write_registry.read_all()) == ["a", "a-5", "a-b"]


@run_on_loop
async def test_a_task_with_many_runs_stays_small_and_still_detects_other_runs():
    """An attempt writes all remembered runs to ZooKeeper."""
    requests, write_registry = await with_requests()
    await write_registry.begin("w", MARKS, 1_000)
    for run in range(30):
        arguments = b'{"run": "%s%d"}' % (b"x" * 190, run)
        await requests.answer(request(OPERATIONS.ENTER, arguments=arguments), None)
    (task,) = (await write_registry.read_tasks("w")).values()
    assert len(task.to_bytes()) < 4_000
    for run in (*task.runs, "another"):
        assert writes_module.client_ids_of_other_runs(run, {0: task}) == {0: int(task.client_id)}


@run_on_loop
async def test_a_principal_with_too_many_client_ids_enters_no_further_task():
    requests, write_registry = await with_requests()
    requester = Requester("mine", ids_left=2)
    await requests.answer(request(OPERATIONS.BEGIN), requester)
    for task in (0, 1, 0):  # an attempt needs no further ID
        await requests.answer(request(OPERATIONS.ENTER, task=task), requester)
    with pytest.raises(errors.Overloaded):
        await requests.answer(request(OPERATIONS.ENTER, task=2), requester)
    assert list(await write_registry.read_tasks("w")) == [0, 1]


@run_on_loop
async def test_an_operation_of_a_closed_connection_is_dropped_before_its_turn():
    """The principal may have lost its permissions, or an attacker may have sent many requests."""
    requests, write_registry = await with_requests()
    requester, is_closed, may_read = Requester("mine"), False, asyncio.Event()
    await requests.answer(request(OPERATIONS.BEGIN), requester)
    of_principal = write_registry.for_principal("mine")
    read = of_principal.read

    async def slow_read(write):
        await may_read.wait()
        return await read(write)

    of_principal.read = slow_read
    write_registry.for_principal = lambda *_, **__: of_principal
    async with asyncio.TaskGroup() as group:
        for _ in range(OPERATIONS_IN_PROGRESS_MAX):
            group.create_task(requests.answer(request(OPERATIONS.READ), requester))
        forget = requests.answer(request(OPERATIONS.FORGET), requester, is_closed=lambda: is_closed)
        dropped = group.create_task(_outcome(forget))
        await asyncio.sleep(0)
        is_closed = True
        may_read.set()
    assert dropped.result() is errors.Unreachable
    assert await write_registry.read("w") is not None


@pytest.mark.parametrize("is_left", [False, True])
@run_on_loop
async def test_a_principal_reads_the_tasks_of_one_write_at_a_time(monkeypatch, is_left):
    """Each request reads a znode per task; a principal must not cause many reads at once."""
    requests, _ = await with_requests()
    requester, left, most, is_open = Requester("mine"), [], [], asyncio.Event()
    await requests.answer(request(OPERATIONS.BEGIN), requester)
    for task in range(3 * CONCURRENT_READS_MAX):
        await requests.answer(request(OPERATIONS.ENTER, task=task), requester)
    real, running_tasks = writes_module.WriteRegistry.read_task_state, []

    async def read_task_state(self, write, task):
        running_tasks.append(task)
        most.append(len(running_tasks))
        await is_open.wait()
        running_tasks.remove(task)
        return await real(self, write, task)

    monkeypatch.setattr(writes_module.WriteRegistry, "read_task_state", read_task_state)
    async with asyncio.TaskGroup() as group:
        listings = [
            group.create_task(
                _outcome(
                    requests.answer(
                        request(OPERATIONS.TASKS), requester, is_closed=lambda: bool(left)
                    )
                )
            )
            for _ in range(3)
        ]
        await poll_until(lambda: most)
        left += [1] * is_left
        is_open.set()
    assert max(most) == CONCURRENT_READS_MAX
    if is_left:
        assert [listing.result() for listing in listings] == [errors.Unreachable] * 3
        assert len(most) == CONCURRENT_READS_MAX, (
            "the remaining tasks and the other requests are not read"
        )
    else:
        assert [listing.result() for listing in listings] == [None] * 3


async def _outcome(answering):
    try:
        await answering
    except errors.WaltzError as error:
        return type(error)
    return None


@run_on_loop
async def test_concurrent_requests_share_one_task_to_remove_expired_writes():
    """A request must not cause much more work than its own."""
    requests, write_registry = await with_requests()
    started, may_end = [], asyncio.Event()

    async def forget_expired():
        started.append(1)
        await may_end.wait()

    write_registry.forget_expired = forget_expired
    for _ in range(5):
        await requests.answer(request(OPERATIONS.FORGET), Requester("mine"))
        await asyncio.sleep(0)
    assert started == [1]
    may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await requests.answer(request(OPERATIONS.FORGET), Requester("mine"))
    await asyncio.sleep(0)
    assert started == [1, 1]


def test_a_write_without_an_owner_is_encoded_without_a_principal():
    known = WriteState({0: 1}, 5)
    assert b"principal" not in known.to_bytes()
    owned = WriteState({0: 1}, 5, principal="mine")
    assert WriteState.from_bytes(owned.to_bytes()) == owned


# ---------------------------------------------------------------------------------------------
# invalid requests


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (request(7), errors.BadRequest),
        (request(-1), errors.BadRequest),
        (request(OPERATIONS.READ, "a/b"), errors.BadRequest),
        (request(OPERATIONS.BEGIN, "../x"), errors.BadRequest),
        (request(OPERATIONS.BEGIN, arguments=b""), errors.BadRequest),
        (request(OPERATIONS.BEGIN, arguments=b"[]"), errors.BadRequest),
        (request(OPERATIONS.BEGIN, arguments=b"{" * 10_000), errors.BadRequest),
        (request(OPERATIONS.BEGIN, arguments=b'{"keep_ms": true}'), errors.BadRequest),
        (
            request(OPERATIONS.BEGIN, arguments=b'{"keep_ms": %d}' % (KEEP_MS_MAX + 1)),
            errors.BadRequest,
        ),
        (request(OPERATIONS.BEGIN, partitions=(0,)), errors.BadRequest),
        (request(OPERATIONS.BEGIN, partitions=(4,), marks=bytes(8)), errors.UnknownPartition),
        (request(OPERATIONS.BEGIN, "n", partitions=(0,) * 5, marks=bytes(40)), errors.BadRequest),
        # ZooKeeper would keep nodes that cannot be decoded forever.
        (
            request(OPERATIONS.BEGIN, "new", partitions=(0,), marks=b"\x80" + bytes(7)),
            errors.BadRequest,
        ),
        (
            request(
                OPERATIONS.FINISH,
                arguments=b'{"keep_ms": 1, "summary": {"x": %s}}' % (b"[" * 10 + b"]" * 10),
            ),
            errors.BadRequest,
        ),
        (request(OPERATIONS.ENTER, task=-1), errors.BadRequest),
        (request(OPERATIONS.ENTER, task=TASKS_MAX), errors.BadRequest),
        (
            request(
                OPERATIONS.FINISH,
                arguments=b'{"keep_ms": 1, "summary": {"x": "%s"}}' % (b"x" * (17 * 1024)),
            ),
            errors.TooLarge,
        ),
        (request(OPERATIONS.ENTER, arguments=b'{"run": "%s"}' % (b"x" * 201)), errors.BadRequest),
        (request(OPERATIONS.ENTER, arguments=b'{"run": "\\ud800"}'), errors.BadRequest),
        (request(OPERATIONS.FINISH, arguments=b'{"keep_ms": 1, "summary": 5}'), errors.BadRequest),
        (
            request(
                OPERATIONS.FINISH,
                arguments=b'{"keep_ms": 1, "summary": {"x": "%s"}}' % (b"x" * (1 << 20)),
            ),
            errors.TooLarge,
        ),
    ],
)
@run_on_loop
async def test_an_invalid_request_is_rejected(wrong, error):
    requests, write_registry = await with_requests()
    await write_registry.begin("w", MARKS, 1_000)
    before = await write_registry.read_all()
    with pytest.raises(error):
        await requests.answer(wrong, Requester("mine"))
    assert await write_registry.read_all() == before


# ---------------------------------------------------------------------------------------------
# requests of a client


@run_on_loop
async def test_requests_are_answered_by_another_server_if_one_does_not_answer():
    async with asyncio.TaskGroup() as tasks:
        _, _, coordinator = await with_cluster()
        servers = [RegistryServer(coordinator, tasks) for _ in range(3)]
        directory = Owners(*[await each.start() for each in servers])
        requests, links = requests_of(directory)
        await requests.begin("w", MARKS, 1_000)
        for number, server in enumerate(servers[:2]):
            await server.stop()
            assert (await requests.read("w")).marks == MARKS
            assert (await requests.enter("w", 0, "r")).state.attempt == number + 1
        await servers[2].stop()
        short_timeout, more_links = requests_of(
            directory, config=ClientConfig(request_timeout_ms=100, retry_interval_ms_min=5)
        )
        with pytest.raises(
            errors.Unreachable, match="answer a request about an exactly-once write within 100 ms:"
        ):
            await short_timeout.read("w")
        await links.close("over")
        await more_links.close("over")


@run_on_loop
async def test_zookeeper_is_used_only_if_no_server_supports_the_requests(monkeypatch):
    async with asyncio.TaskGroup() as tasks:
        _, _, coordinator = await with_cluster()
        opened = []

        async def connect(*_, **__):
            opened.append(1)
            return coordinator

        monkeypatch.setattr(write_requests.zookeeper_session, "connect", connect)
        new = RegistryServer(coordinator, tasks)
        owner_of_new = await new.start()
        old = RegistryServer(coordinator, tasks)
        owner_of_old = await old.start()
        is_new = property(lambda link: link.address == owner_of_new.address)
        monkeypatch.setattr(ServerLink, "supports_registry", is_new)
        both, links = requests_of(Owners(owner_of_old, owner_of_new))
        old_only, other_links = requests_of(Owners(owner_of_old))
        state = await both.begin("w", MARKS, 1_000)
        assert opened == []
        assert await old_only.begin("w", MARKS, 1_000) == state
        assert opened == [1]
        entered = await old_only.enter("w", 3, "one")
        assert (entered.state.client_id, entered.identity.proof) == (1, bytes(16))
        await old_only.check("w", 3, 1)
        assert (await old_only.tasks("w", "two")) == ((3,), {3: 1})
        assert await old_only.read("w") == state
        assert (await old_only.finish("w", {"rows": 2}, 5)).is_done
        await old_only.forget("w")
        assert await old_only.read("w") is None
        assert opened == [1]
        await old_only.close()
        for each, server in ((links, new), (other_links, old)):
            await each.close("over")
            await server.stop()
