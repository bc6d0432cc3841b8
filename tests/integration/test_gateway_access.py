"""A gateway of a cluster with access control: the permissions of each caller, and the console."""

import dataclasses
import json
from collections.abc import Callable, Iterator

import pytest

from tests.certificates import Certificates
from tests.fault.load import wait_until
from tests.gateway_process import GatewayAnswer, GatewayClient, GatewayProcess, run_gateway
from tests.integration.permitted_cluster import (
    DENIED_PARTITION,
    PERMISSIONS,
    PERMITTED_PARTITION,
    PRINCIPALS,
    ClusterAccess,
    permitted_cluster,
)
from waltz_core.access.permissions import Grant
from waltz_core.access.requirements import AccessVerb
from waltz_core.access.tokens import hash_of

ADMINISTER_ALL = dataclasses.replace(
    PERMISSIONS,
    grants=(*PERMISSIONS.grants, Grant("administer", False, AccessVerb.ADMINISTER, None)),
)


@pytest.fixture(scope="module")
def access(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[ClusterAccess]:
    with permitted_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateway(access: ClusterAccess, certificates: Certificates) -> Iterator[GatewayProcess]:
    without_options = access.cluster.connect.partition("?")[0]
    with run_gateway(f"{without_options}?tls={certificates.authorities}") as gateway:
        yield gateway


class Caller:
    """A caller with the token of a principal, or without one."""

    def __init__(self, gateway: GatewayProcess, principal: str | None) -> None:
        secret = None if principal is None else bytes([PRINCIPALS.index(principal)]) * 32
        self._client = GatewayClient(gateway.url, token=None if secret is None else secret.hex())

    def close(self) -> None:
        self._client.close()

    def append(self, partition: int, key: str | None = None) -> GatewayAnswer:
        return self._client.append({"data": "x", "partition": partition}, key=key)

    def get(self, path: str) -> GatewayAnswer:
        return self._client.get(path)

    def change(self, name: str, **arguments: str) -> GatewayAnswer:
        body = json.dumps({"name": name, "arguments": arguments}).encode()
        headers = {"Content-Type": "application/json"}
        return self._client.exchange("POST", "/v1/console/changes", body, headers)


@pytest.fixture
def caller_of(
    request: pytest.FixtureRequest, gateway: GatewayProcess
) -> Callable[[str | None], Caller]:
    """Return a function that creates the caller of a principal."""

    def create(principal: str | None) -> Caller:
        caller = Caller(gateway, principal)
        request.addfinalizer(caller.close)
        return caller

    return create


@pytest.mark.parametrize(
    ("principal", "partition", "status"),
    [
        ("writer", PERMITTED_PARTITION, 200),
        ("append", PERMITTED_PARTITION, 200),
        ("writer", DENIED_PARTITION, 403),
        ("read", PERMITTED_PARTITION, 403),
        ("nothing", PERMITTED_PARTITION, 403),
        (None, PERMITTED_PARTITION, 403),
    ],
)
def test_an_append_has_the_permissions_of_its_caller(caller_of, principal, partition, status):
    answer = caller_of(principal).append(partition)
    assert answer.status == status, answer
    if status == 403:
        assert answer.body["type"] == "PermissionDenied"


def test_an_append_with_an_idempotency_key_needs_read_and_append(caller_of):
    writer = caller_of("writer")
    first, again = (writer.append(PERMITTED_PARTITION, "key-1") for _ in range(2))
    assert (first.status, again.body) == (200, first.body)
    assert caller_of("append").append(PERMITTED_PARTITION, "key-2").status == 403


def test_a_reader_needs_the_verb_read(caller_of):
    assert caller_of("writer").append(PERMITTED_PARTITION).status == 200
    path = f"/v1/partitions/{PERMITTED_PARTITION}/transactions?first=0"
    assert caller_of("read").get(path).status == 200
    assert caller_of("append").get(path).status == 403
    assert caller_of(None).get(path).status == 403


@pytest.mark.slow
def test_a_revoked_token_is_rejected(caller_of, access):
    writer = caller_of("writer")
    assert writer.append(PERMITTED_PARTITION).status == 200
    writer_hash = hash_of(bytes([PRINCIPALS.index("writer")]) * 32)
    tokens = {key: token for key, token in PERMISSIONS.tokens.items() if key != writer_hash}
    access.write(dataclasses.replace(PERMISSIONS, tokens=tokens))
    try:
        answer = writer.append(PERMITTED_PARTITION)
        wait_until(
            "the token is rejected", lambda: writer.append(PERMITTED_PARTITION).status == 401
        )
        assert answer.status in (401, 403, 503)
    finally:
        access.write(PERMISSIONS)
    wait_until("the token is valid", lambda: writer.append(PERMITTED_PARTITION).status == 200)


def test_the_console_shows_the_cluster_to_administrators_only(caller_of):
    view = caller_of("administer").get("/v1/console/cluster")
    assert view.status == 200, view
    assert {server["state"] for server in view.body["servers"]} == {"up"}
    for principal in ("nothing", None):
        answer = caller_of(principal).get("/v1/console/cluster")
        assert (answer.status, answer.body["type"]) == (403, "PermissionDenied")
        assert caller_of(principal).get("/v1/console/findings").status == 403
    view = caller_of("read").get("/v1/console/cluster")
    assert {storage["state"] for storage in view.body["storages"]} == {"unknown"}


def test_a_change_needs_the_verb_administer_for_all_partitions(caller_of, access):
    administrator = caller_of("administer")
    server = administrator.get("/v1/console/cluster").body["servers"][0]["address"]
    arguments = {"partitions": str(PERMITTED_PARTITION), "server": server}
    for principal in ("administer", "writer", "nothing", None):
        caller = caller_of(principal)
        answer = caller.change("prefer", **arguments)
        assert (answer.status, answer.body["type"]) == (403, "PermissionDenied"), principal
        listed = caller.get("/v1/console/changes").body
        assert (listed["can_change"], listed["running"]) == (False, [])

    access.write(ADMINISTER_ALL)
    try:
        started = administrator.change("prefer", **arguments)
        assert started.status == 202, started

        def outcome() -> str:
            changes = administrator.get("/v1/console/changes").body["running"]
            return next(
                change["outcome"] for change in changes if change["id"] == started.body["id"]
            )

        wait_until("the change ends", lambda: outcome() != "begun")
        assert outcome() == "done"
        entry = administrator.get("/v1/console/changes").body["history"][0]
        assert entry["user"].startswith("administer via gateway@")
        assert entry["command"] == f"cluster prefer {PERMITTED_PARTITION} {server}"
    finally:
        access.write(PERMISSIONS)
    assert administrator.change("prefer", **arguments).status == 403
