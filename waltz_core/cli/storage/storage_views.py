"""`waltz-core storage list | validate | max-transaction-id`: show storages and replicas."""

from typing import NamedTuple

from waltz_core.administration import member_connections
from waltz_core.administration.member_queries import damaged_record_count
from waltz_core.cli.output import print_error, print_json, print_table
from waltz_core.cli.storage.storage_target import (
    ClusterStorages,
    StorageChoice,
    StorageTarget,
    choose_storages,
    find_one_storage,
    find_storages,
    parse_partition_numbers,
    partitions_option,
    read_cluster_storages,
    with_storage_options,
)
from waltz_core.cli.subcommands import subcommand
from waltz_core.client.links.storage_admin import StorageAdmin, admin_connection
from waltz_core.errors import StorageIdMismatch, WaltzError
from waltz_core.records.record import ReplicaId
from waltz_core.wire.admin_messages import (
    CheckCluster,
    Done,
    HeldRequest,
    HeldResponse,
    ReplicaRequest,
    ReplicaResponse,
    SessionInfoRequest,
    SessionInfoResponse,
    StorageRequest,
    StorageResponse,
)
from waltz_core.wire.messages import WireProtocol


class ReplicaRow(NamedTuple):
    """One replica in one storage. If a 0.13 storage does not report a value, the value is None."""

    storage: str
    partition: int
    state: str
    session: int
    low_water_mark: int
    last: int | None = None
    promised: int | None = None
    damaged: int | None = None


# ---------------------------------------------------------------------------------------------
# list


@subcommand
@with_storage_options()
async def list_command(choice: StorageChoice) -> int:
    """List the replicas of storages, and the state of each."""
    rows: list[ReplicaRow] = []
    errors_by_storage: dict[str, str] = {}
    for target in await find_storages(choice):
        try:
            async with admin_connection(
                target.admin_address, ssl=member_connections.ssl_context()
            ) as admin:
                rows += await _replica_rows(admin, str(target))
        except WaltzError as error:
            if target.name is None:
                raise
            errors_by_storage[str(target)] = str(error)
    if choice.as_json:
        print_json({"replicas": [row._asdict() for row in rows], "unreached": errors_by_storage})
    else:
        titles = [name.replace("_", " ") for name in ReplicaRow._fields]
        print_table(titles, [["-" if cell is None else cell for cell in row] for row in rows])
        for name, error_text in errors_by_storage.items():
            print_error(f"{name}: {error_text}")
    return 1 if errors_by_storage else 0


async def _replica_rows(admin: StorageAdmin, name: str) -> list[ReplicaRow]:
    rows = []
    for partition, is_available in (await admin.request(HeldResponse, HeldRequest)).available:
        if admin.is_current:
            rows.append(
                _replica_row(name, await admin.request(ReplicaResponse, ReplicaRequest, partition))
            )
        else:
            marks = await admin.request(SessionInfoResponse, SessionInfoRequest, partition)
            state = "online" if is_available else "offline"
            rows.append(
                ReplicaRow(name, partition, state, marks.last_session, marks.low_water_mark)
            )
    return rows


def _replica_row(name: str, replica: ReplicaResponse) -> ReplicaRow:
    return ReplicaRow(
        name,
        replica.partition_id,
        replica_state_text(replica),
        replica.last_session,
        replica.low_water_mark,
        replica.synced_max,
        replica.promised,
        damaged_record_count(replica),
    )


def replica_state_text(replica: ReplicaResponse) -> str:
    """Return the state of a replica in words: online, offline, suspect and so on."""
    if not replica.is_held:
        return "not held"
    states = ["online" if replica.is_served else "not served"]
    if not replica.is_available:
        states = ["offline"]
    if replica.is_suspect:
        states.append("suspect")
    if replica.reason:
        states.append(f"unreadable: {replica.reason}")
    return ", ".join(states)


# ---------------------------------------------------------------------------------------------
# validate


@subcommand
@with_storage_options(works_on_cluster=True)
async def validate(choice: StorageChoice) -> int:
    """Check that each storage of a cluster answers at both of its ports."""
    facts = await read_cluster_storages(choice)
    results = {
        str(target): {
            "data_port": await _data_port_problem(str(target)),
            "admin_port": await _admin_port_problem(facts, target),
        }
        for target in choose_storages(facts, choice)
    }
    is_healthy = all(problem is None for ports in results.values() for problem in ports.values())
    if choice.as_json:
        print_json({"is_healthy": is_healthy, "storages": results})
    else:
        rows = [
            (name, port, problem or "ok")
            for name, ports in results.items()
            for port, problem in ports.items()
        ]
        print_table(("storage", "port", "found"), rows)
    return 0 if is_healthy else 1


async def _data_port_problem(address: str) -> str | None:
    """Return the error of a connection to a data port; None if it works."""
    try:
        link = await member_connections.dial(WireProtocol.STORAGE, address)
    except WaltzError as error:
        return str(error)
    link.close("done")
    await link.wait_closed()
    return None


async def _admin_port_problem(facts: ClusterStorages, target: StorageTarget) -> str | None:
    """Return an error if the admin port does not belong to the registered storage."""
    store = facts.view.store
    try:
        async with admin_connection(
            target.admin_address, ssl=member_connections.ssl_context()
        ) as admin:
            await admin.request(Done, CheckCluster, store.cluster_key.bytes, store.partition_count)
            if admin.is_current:
                response = await admin.request(StorageResponse, StorageRequest)
                registered_id = facts.storage_ids.get(ReplicaId(str(target)))
                if registered_id != bytes(response.storage_id):
                    registered_text = "none" if registered_id is None else registered_id.hex()
                    raise StorageIdMismatch(
                        f"the storage at {target} is not the registered one: expected storage "
                        f"ID {registered_text}, found {bytes(response.storage_id).hex()}"
                    )
    except WaltzError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------------------------------
# max-transaction-id


@subcommand
@partitions_option
@with_storage_options()
async def max_transaction_id(choice: StorageChoice, *, partitions: str) -> int:
    """Print the last transaction ID of replicas on a storage."""
    partition_numbers = parse_partition_numbers(partitions)
    target = await find_one_storage(choice)
    last_ids: dict[int, int] = {}
    async with admin_connection(
        target.admin_address, ssl=member_connections.ssl_context()
    ) as admin:
        for partition in partition_numbers:
            replica = await admin.request(ReplicaResponse, ReplicaRequest, partition)
            if not replica.is_held or replica.reason:
                reason = (
                    replica.reason
                    if replica.is_held
                    else ("the partition is not assigned to the storage")
                )
                raise WaltzError(
                    f"{target}: the replica of partition {partition} cannot be queried ({reason})"
                )
            last_ids[partition] = replica.synced_max
    if choice.as_json:
        print_json(last_ids)
    else:
        print_table(("partition", "max transaction ID"), list(last_ids.items()))
    return 0
