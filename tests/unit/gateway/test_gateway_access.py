"""The gateway applies the permissions of each caller instead of its own permissions."""

import dataclasses
import json

import pytest

from tests.certificates import create_certificates
from tests.unit.gateway.gateway_world import in_gateway_world
from waltz_core.access.permissions import Grant, Permissions, StoredToken
from waltz_core.access.requirements import APPEND, READ
from waltz_core.access.tokens import hash_of
from waltz_core.config import ServerConfig
from waltz_core.gateway import callers, http_feeds
from waltz_core.transport import tls

LATER_MS = 1 << 50
SECRETS = {name: bytes([number]) * 32 for number, name in enumerate(("writer", "reader", "other"))}
MINE, NOT_MINE = 1, 2
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    grants=tuple(
        Grant(name, False, verb, ((MINE, MINE),))
        for name, verb in (
            ("writer", APPEND),
            ("writer", READ),
            ("reader", READ),
            ("other", APPEND),
            ("other", READ),
        )
    ),
    tokens={hash_of(secret): StoredToken(name, name, LATER_MS) for name, secret in SECRETS.items()},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return create_certificates(tmp_path_factory.mktemp("certificates"))


def with_access(files, scenario, **settings):
    """Run a scenario with a gateway at a server with `access = "on"`."""
    config = ServerConfig(connect="zk:1/w", access="on", **files.settings)
    context = tls.listen_context(config)
    context.access.apply(PERMISSIONS)

    async def play(world):
        async with world.gateway(**settings) as gateway:
            await scenario(gateway, context.access)

    in_gateway_world(play, authorities=files.authorities, context=context)


def token(name):
    return SECRETS[name].hex()


def row(partition, data="x"):
    return {"data": data, "partition": partition}


def test_each_caller_has_the_permissions_of_its_token(files):
    async def scenario(gateway, _access):
        async with gateway.client(token("writer")) as writer:
            for key in (None, "k"):
                assert (await writer.append(row(MINE), key=key)).status == 200
                denied = await writer.append(row(NOT_MINE), key=key and "l")
                assert (denied.status, denied.body["type"]) == (403, "PermissionDenied")
                assert "writer has no grant" in denied.body["error"]
            assert (await writer.get(f"/v1/marks?partition={MINE}")).body["marks"] == {"1": 1}
            assert (await writer.get("/v1/marks")).status == 403
        async with gateway.client(token("reader")) as reader:
            assert (await reader.append(row(MINE))).status == 403
            path = f"/v1/partitions/{MINE}/transactions?first=0"
            assert len((await reader.get(path)).body["transactions"]) == 2
            assert (await reader.get("/v1/partitions/2/transactions?first=0")).status == 403
            assert (await reader.get("/v1/partitions/2/feed?from=-1")).status == 403
            lines = await reader.read_feed(
                f"/v1/partitions/{MINE}/feed?from=0", 2, Accept=http_feeds.JSON_LINES_TYPE
            )
            assert json.loads(lines[1])["transaction_id"] == 1
        async with gateway.client() as anonymous:
            assert (await anonymous.append(row(MINE))).status == 403
            assert (await anonymous.get(f"/v1/partitions/{MINE}/feed?from=-1")).status == 403

    with_access(files, scenario)


def test_an_idempotency_key_belongs_to_its_principal(files):
    async def scenario(gateway, _access):
        async with gateway.client(token("writer")) as writer:
            assert (await writer.append(row(MINE), key="k")).status == 200
        async with gateway.client(token("other")) as other:
            answer = await other.append(row(MINE), key="k")
            assert (answer.status, answer.body["type"]) == (403, "PermissionDenied")

    with_access(files, scenario)


def test_a_token_that_is_not_valid_is_rejected_at_once(files):
    async def scenario(gateway, _access):
        async with gateway.client("f" * 64) as stranger:
            for _ in range(2):
                answer = await stranger.append(row(MINE))
                assert (answer.status, answer.body["type"]) == (401, "AuthenticationFailed")
                assert "f" * 16 not in json.dumps(answer.body)
            assert len(gateway.callers) == 0

    with_access(files, scenario)


def test_a_request_with_a_wrong_token_does_not_close_the_client_of_another_caller(
    files, monkeypatch
):
    monkeypatch.setattr(callers, "CALLERS_MAX", 1)

    async def scenario(gateway, _access):
        async with gateway.client(token("writer")) as writer:
            assert (await writer.append(row(MINE))).status == 200
            (known,) = gateway.callers._callers.values()
            async with gateway.client("f" * 64) as stranger:
                assert (await stranger.append(row(MINE))).status == 401
            assert list(gateway.callers._callers.values()) == [known]
            async with gateway.client(token("other")) as other:
                assert (await other.append(row(MINE))).status == 200
            assert known not in gateway.callers._callers.values()
            assert (await writer.append(row(MINE))).status == 200

    with_access(files, scenario)


def test_a_revoked_token_ends_requests_and_feeds(files, monkeypatch):
    monkeypatch.setattr(http_feeds, "HEARTBEAT_S", 0.05)

    async def scenario(gateway, access):
        async with gateway.client(token("writer")) as writer:
            assert (await writer.append(row(MINE))).status == 200

            def revoke():
                tokens = dict(PERMISSIONS.tokens)
                del tokens[hash_of(SECRETS["writer"])]
                access.apply(dataclasses.replace(PERMISSIONS, revision=2, tokens=tokens))

            async with gateway.client(token("writer")) as reader:
                events = await reader.read_feed_until_its_end(
                    f"/v1/partitions/{MINE}/feed?from=-1", revoke, Accept=http_feeds.JSON_LINES_TYPE
                )
            assert json.loads(events[-1])["type"] == "AuthenticationFailed"
            assert (await writer.append(row(MINE))).status == 401
            assert len(gateway.callers) == 0

    with_access(files, scenario, request_timeout_ms=1_000)


def test_a_new_grant_permits_a_request_that_was_denied_before(files):
    async def scenario(gateway, access):
        async with gateway.client(token("writer")) as writer:
            assert (await writer.append(row(NOT_MINE))).status == 403
            more = (*PERMISSIONS.grants, Grant("writer", False, APPEND, ((NOT_MINE, NOT_MINE),)))
            access.apply(dataclasses.replace(PERMISSIONS, revision=2, grants=more))
            assert (await writer.append(row(NOT_MINE))).status == 200

    with_access(files, scenario)


def test_a_gateway_with_a_certificate_needs_a_token_for_each_request(files):
    async def scenario(gateway, _access):
        async with gateway.client() as anonymous:
            answer = await anonymous.get("/v1/marks")
            assert answer.status == 401
            assert "no token" in answer.body["error"]
        async with gateway.client(token("writer")) as writer:
            assert (await writer.append(row(MINE))).status == 200

    with_access(files, scenario, tls="on", tls_certificate=files.certificate, tls_key=files.key)
