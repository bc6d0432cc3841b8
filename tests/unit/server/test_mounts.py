"""Mounts: only the latest connection of a client may append."""

from waltz_core.errors import BadRequest, ClientIdDenied, Overloaded, WaltzError
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId, TransactionId
from waltz_core.server.append.mounts import CLIENTS_MAX, Mounts, PartitionPosition
from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import FILTER_HEADERS_MAX, LATEST_MARK, MountWriter

ALICE, BOB = ClientId(1), ClientId(2)
OLD, NEW = ConnectionId(10), ConnectionId(11)

PLACE = PartitionPosition(PartitionId(0), Generation(1), TransactionId(9))


def mount_error(
    mounts: Mounts,
    client: ClientId,
    connection: ConnectionId,
    sequence: int,
    header_values: tuple[int, ...] = (),
    principal: str = "",
) -> WaltzError | None:
    req_id = ReqId(client, Generation(1), PartitionId(0), 1)
    message = MountWriter(req_id, sequence, LATEST_MARK, False, header_values)
    return mounts.mount_error(message, connection, PLACE, principal)


def test_a_client_id_without_a_proof_belongs_to_the_principal_that_mounts_it_first() -> None:
    mounts = Mounts(2)
    mounts.begin_mount(ALICE, OLD, 5, "alice")
    assert isinstance(mount_error(mounts, ALICE, NEW, 6, principal="eve"), ClientIdDenied)
    assert mount_error(mounts, ALICE, NEW, 6, principal="alice") is None
    assert mount_error(mounts, BOB, NEW, 6, principal="eve") is None
    mounts.on_connection_closed(OLD)  # the fence remains without a connection
    assert isinstance(mount_error(mounts, ALICE, NEW, 6, principal="eve"), ClientIdDenied)
    mounts.on_generation_started()
    assert mount_error(mounts, ALICE, NEW, 6, principal="eve") is None


def test_appends_are_accepted_only_after_the_mount_is_answered() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 5)
    assert mounts.has_mount(ALICE, OLD)
    assert not mounts.is_ready(ALICE, OLD)
    mounts.finish_mount(ALICE, OLD)
    assert mounts.is_ready(ALICE, OLD)
    assert not mounts.is_ready(BOB, OLD)


def test_a_mount_on_another_connection_requires_a_higher_sequence() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 5)
    assert mount_error(mounts, ALICE, OLD, 5) is None
    assert mount_error(mounts, ALICE, NEW, 5) is not None
    assert mount_error(mounts, ALICE, NEW, 4) is not None
    assert mount_error(mounts, ALICE, OLD, 4) is not None
    assert mount_error(mounts, ALICE, NEW, 6) is None
    assert mount_error(mounts, BOB, NEW, 0) is None


def test_a_newer_connection_fences_the_older_one_at_once() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 5)
    mounts.finish_mount(ALICE, OLD)
    mounts.begin_mount(ALICE, NEW, 6)
    assert not mounts.is_ready(ALICE, OLD)
    assert not mounts.is_ready(ALICE, NEW)
    mounts.finish_mount(ALICE, NEW)
    assert mounts.is_ready(ALICE, NEW)
    assert not mounts.is_ready(ALICE, OLD)
    mounts.on_connection_closed(OLD)
    assert mounts.has_mount(ALICE, NEW)


def test_a_fence_lasts_until_the_end_of_the_generation() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 5)
    mounts.on_connection_closed(OLD)
    assert mounts.mounted_client_count == 0
    assert "connection sequence 5" in str(mount_error(mounts, ALICE, NEW, 5))
    mounts.on_generation_started()
    assert mount_error(mounts, ALICE, NEW, 0) is None


def test_a_release_ends_the_mounts_and_keeps_the_fences() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, NEW, 6)
    mounts.finish_mount(ALICE, NEW)
    mounts.on_partition_released()
    assert not mounts.is_ready(ALICE, NEW)
    assert "connection sequence 6" in str(mount_error(mounts, ALICE, OLD, 5))
    assert mount_error(mounts, ALICE, NEW, 6) is None  # the same connection mounts again
    mounts.on_connection_closed(NEW)
    assert mount_error(mounts, ALICE, OLD, 5) is not None


def test_a_limited_number_of_disconnected_clients_is_remembered() -> None:
    mounts = Mounts(2)
    for client in range(3):
        connection = ConnectionId(100 + client)
        mounts.begin_mount(ClientId(client), connection, 7)
        mounts.on_connection_closed(connection)
    assert mounts.highest_sequence(ClientId(0)) is None
    assert mounts.highest_sequence(ClientId(1)) == 7
    assert mounts.highest_sequence(ClientId(2)) == 7


def test_one_connection_may_mount_several_clients() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 1)
    mounts.begin_mount(BOB, OLD, 1)
    mounts.begin_mount(ALICE, OLD, 2)
    mounts.on_connection_closed(OLD)
    assert (mounts.highest_sequence(ALICE), mounts.highest_sequence(BOB)) == (2, 1)


def test_the_mounted_clients_of_a_connection_are_limited() -> None:
    mounts = Mounts(10)
    for client in range(CLIENTS_MAX):
        assert mount_error(mounts, ClientId(client), OLD, 1) is None
        mounts.begin_mount(ClientId(client), OLD, 1)
    assert isinstance(mount_error(mounts, ClientId(CLIENTS_MAX), OLD, 1), Overloaded)
    assert mount_error(mounts, ClientId(0), OLD, 2) is None
    assert mount_error(mounts, ClientId(CLIENTS_MAX), NEW, 1) is None
    mounts.begin_mount(ClientId(0), NEW, 2)
    assert mount_error(mounts, ClientId(CLIENTS_MAX), OLD, 1) is None


def test_the_number_of_headers_in_a_filter_is_limited() -> None:
    """The server stores the headers, and searches every frame for them, while the mount lasts."""
    mounts, many = Mounts(10), tuple(range(FILTER_HEADERS_MAX + 1))
    assert mount_error(mounts, ALICE, OLD, 1, many[1:]) is None
    assert isinstance(mount_error(mounts, ALICE, OLD, 1, many), BadRequest)


def test_a_lost_row_ends_the_mount() -> None:
    mounts = Mounts(10)
    mounts.begin_mount(ALICE, OLD, 1)
    mounts.finish_mount(ALICE, OLD)
    mounts.require_remount(ALICE)
    mounts.require_remount(BOB)
    assert not mounts.is_ready(ALICE, OLD)
    mounts.begin_mount(ALICE, OLD, 1)
    mounts.finish_mount(ALICE, OLD)
    assert mounts.is_ready(ALICE, OLD)


def test_each_mount_has_a_different_number() -> None:
    mounts = Mounts(10)
    assert mounts.mount_number(ALICE, NEW) == 0
    numbers = []
    for sequence in (1, 1, 2):
        mounts.begin_mount(ALICE, NEW, sequence)
        numbers.append(mounts.mount_number(ALICE, NEW))
    assert mounts.mount_number(ALICE, OLD) == 0
    mounts.on_generation_started()
    mounts.begin_mount(ALICE, NEW, 1)
    numbers.append(mounts.mount_number(ALICE, NEW))
    assert sorted(set(numbers)) == numbers
