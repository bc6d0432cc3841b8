"""The pages and the operations of the console, over real sockets, at a server in memory."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.certificates import create_certificates
from tests.gateway_process import GatewayClient
from tests.loops import poll_until
from tests.unit.gateway.gateway_world import PARTITION_COUNT, in_gateway_world
from tests.unit.gateway.test_gateway_access import MINE, NOT_MINE, token, with_access
from waltz_core import errors
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.gateway.console import console_routes, running_changes
from waltz_core.gateway.console.cluster_view import ClusterViewer
from waltz_core.gateway.console.static_pages import CONTENT_SECURITY_POLICY

PAGES = Path(running_changes.__file__).parent / "pages"
FILES = sorted(each.name for each in PAGES.iterdir() if each.is_file())
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
CHANGES = "/v1/console/changes"
CHANGE = {"name": "remove-server", "arguments": {"server": "10.0.1.1:5180"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return create_certificates(tmp_path_factory.mktemp("certificates"))


async def exchange(gateway, method, path, body=None, **headers):
    """Return status, headers and body of a response."""

    def send():
        client = GatewayClient(gateway.url)
        try:
            response = client.response(method, path, body, **headers)
            named = {name.lower(): each for name, each in response.getheaders()}
            return response.status, named, response.read()
        finally:
            client.close()

    return await asyncio.to_thread(send)


async def get_json(gateway, path, **headers):
    status, _, body = await exchange(gateway, "GET", path, **headers)
    return status, json.loads(body)


async def post_change(gateway, body, **headers):
    status, _, answer = await exchange(gateway, "POST", CHANGES, body, **headers)
    return status, json.loads(answer)


def with_gateway(scenario, **settings):
    async def run(world):
        async with world.gateway(**settings) as gateway:
            await scenario(world, gateway)

    in_gateway_world(run)


# --- the files of the pages


def path_of(name):
    return "/console/" + ("" if name == "index.html" else name)


def test_each_file_has_its_content_type_and_security_headers():
    async def scenario(_world, gateway):
        for name in FILES:
            status, headers, body = await exchange(gateway, "GET", path_of(name))
            assert (status, body) == (200, (PAGES / name).read_bytes())
            expected = f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8"
            assert headers["content-type"] == expected
            assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-cache"

    with_gateway(scenario)


def test_a_file_that_has_not_changed_is_not_sent_again():
    async def scenario(_world, gateway):
        _, headers, _ = await exchange(gateway, "GET", "/console/")
        tag = headers["etag"]
        status, headers, body = await exchange(gateway, "GET", "/console/", If_None_Match=tag)
        assert (status, headers["etag"], body) == (304, tag, b"")
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        status, headers, _ = await exchange(gateway, "GET", "/console/app.js", If_None_Match=tag)
        assert (status, headers["etag"] != tag) == (200, True)
        assert (await exchange(gateway, "HEAD", "/console/"))[::2] == (200, b"")
        assert (await exchange(gateway, "POST", "/console/"))[0] == 405

    with_gateway(scenario)


def test_the_content_security_policy_permits_only_files_of_the_gateway():
    sources = dict(each.strip().split(" ", 1) for each in CONTENT_SECURITY_POLICY.split(";"))
    assert sources["default-src"] == sources["base-uri"] == sources["form-action"] == "'none'"
    assert sources["frame-ancestors"] == "'none'"
    assert {sources[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert "unsafe" not in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("path", ["/", "/console"])
def test_root_paths_redirect_to_the_console(path):
    async def scenario(_world, gateway):
        status, headers, _ = await exchange(gateway, "GET", path)
        assert (status, headers["location"]) == (307, "/console/")

    with_gateway(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/console/nothing.js",
        "/console/index.html",
        "/console/app.js/",
        "/console//app.js",
        "/console/../console_routes.py",
        "/console/../../../../etc/passwd",
        "/console/%2e%2e/console_routes.py",
        "/console/..%2fconsole_routes.py",
        "/console/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/console/..%5cconsole_routes.py",
        "/console/app.js%00",
        "/pages/app.js",
    ],
)
def test_a_path_without_a_file_of_the_console_is_not_found(path):
    async def scenario(_world, gateway):
        status, headers, body = await exchange(gateway, "GET", path)
        assert (status, headers["content-type"]) == (404, "application/json")
        assert json.loads(body)["type"] == "BadRequest"

    with_gateway(scenario)


# --- the content of the files


def test_pages_reference_no_other_origin():
    for name in FILES:
        text = (PAGES / name).read_text(encoding="utf-8")
        matches = re.findall(r"(?:https?:|wss?:)?//[a-z0-9][^\s\"'`]*\.[^\s\"'`]*", text)
        assert {each for each in matches if each != "http://www.w3.org/2000/svg"} == set(), name
        assert re.sub(r"http://www\.w3\.org/2000/svg", "", text).count("://") == 0, name


@pytest.mark.parametrize("name", [file for file in FILES if file.endswith(".js")])
def test_no_script_turns_text_into_html_or_code(name):
    text = (PAGES / name).read_text(encoding="utf-8")
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|createContextualFragment|DOMParser|srcdoc"
        r"|document\.write|\beval\b|\bFunction\(|javascript:|set(Timeout|Interval)\([\"'`]"
        r"|\bimport\(|setAttribute\([^)]*[\"'`](on\w+|style)[\"'`]"
    )
    assert re.search(unsafe, text) is None
    imported = re.findall(r"""(?:from|import)\s+["']([^"']+)["']""", text)
    assert {each.removeprefix("./") for each in imported} <= set(FILES)
    assert all(each.startswith("./") for each in imported)


def test_the_page_has_no_inline_scripts_or_styles():
    text = (PAGES / "index.html").read_text(encoding="utf-8")
    unsafe = r"<style|\sstyle=|\son\w+=|javascript:|<base|<iframe"
    assert re.search(unsafe, text, re.IGNORECASE) is None
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    assert scripts
    assert all(" src=" in attributes and not content for attributes, content in scripts)
    named = re.findall(r"""\s(?:src|href)="([^"#][^"]*)\"""", text)
    assert {each for each in named if each != "data:,"} <= set(FILES)
    styles = (PAGES / "console.css").read_text(encoding="utf-8")
    assert "@import" not in styles
    assert set(re.findall(r"url\(\s*[\"']?(\w+:)", styles)) <= {"data:"}


# --- the protection of operations


OPERATIONS = [
    ("GET", "/v1/console/cluster", "console_cluster"),
    ("GET", "/v1/console/findings", "console_findings"),
    ("GET", CHANGES, "console_changes"),
    ("POST", CHANGES, "console_change"),
    ("GET", "/v1/console/partitions/0/transactions", "console_transactions"),
    ("GET", "/v1/console/partitions/0/first-at", "console_first_at"),
    ("GET", "/v1/console/partitions/0/rejections", "console_rejections"),
]


def test_each_operation_checks_the_host_and_the_token_and_is_counted():
    async def scenario(_world, gateway):
        for method, path, name in OPERATIONS:
            body = json.dumps(CHANGE).encode() if method == "POST" else None
            status, _, answer = await exchange(gateway, method, path, body, Host="attacker.example")
            assert (status, "header Host" in json.loads(answer)["error"]) == (400, True)
            status, headers, _ = await exchange(gateway, method, path, body, Authorization="x")
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            status, _, answer = await exchange(gateway, method, f"{path}?unknown=1", body)
            assert (status, json.loads(answer)["type"]) == (400, "RequestRejected")
            metric = "waltz_gateway_requests_total"
            counts = [
                gateway.metrics.value(metric, operation=name, status=each) for each in (400, 401)
            ]
            assert counts == [2, 1]

    with_gateway(scenario)


def test_a_gateway_with_a_network_address_rejects_changes_with_another_host_header():
    async def scenario(_world, gateway):
        body = json.dumps(CHANGE).encode()
        path = "/v1/console/changes"
        status, _, answer = await exchange(gateway, "POST", path, body, Host="attacker.example")
        assert (status, "header Host" in json.loads(answer)["error"]) == (400, True)
        assert list(gateway.routes.changes._changes) == []
        status, _, _ = await exchange(gateway, "GET", path, None, Host="gateway.example")
        assert status == 200

    with_gateway(scenario, listen_host="10.0.0.1", insecure_network=True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": ""}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 400),
    ],
)
def test_a_web_page_of_another_origin_cannot_start_a_change(headers, status):
    async def scenario(_world, gateway):
        assert (await post_change(gateway, b"{}", **headers))[0] == status
        preflight, answered, _ = await exchange(gateway, "OPTIONS", CHANGES)
        assert preflight == 405
        assert not [each for each in answered if each.startswith("access-control")]

    with_gateway(scenario)


# --- changes


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "the body: expected valid JSON"),
        (b"{", "the body: expected valid JSON"),
        (b"\xff", "the body: expected valid JSON"),
        (b"[" * 100_000, "the body: expected valid JSON"),
        (b'{"name": "prefer", "arguments": {"server": "\\ud800"}}', "the body: expected valid"),
        (b'{"name": NaN}', "the body: expected valid JSON"),
        (b"[]", "the change: expected an object"),
        (b'{"name": "delete", "arguments": {}}', "field name: expected replace-storage"),
        (b'{"name": "prefer", "arguments": {"server": "a:1"}}', "arguments.partitions"),
    ],
)
def test_a_malformed_change_is_rejected(body, error):
    async def scenario(world, gateway):
        status, answer = await post_change(gateway, body)
        assert (status, answer["type"]) == (400, "RequestRejected")
        assert answer["error"].startswith(error)
        assert await world.coordinator.audit.read() == []

    with_gateway(scenario)


def test_a_change_runs_after_the_answer_to_its_request(monkeypatch):
    async def scenario(world, gateway):
        @asynccontextmanager
        async def open_session(_connect):
            yield world.coordinator

        monkeypatch.setattr(zookeeper_session, "open_session", open_session)
        assert await post_change(gateway, json.dumps(CHANGE).encode()) == (202, {"id": "1"})
        await poll_until(lambda: not gateway.routes.changes._change_tasks)
        status, listed = await get_json(gateway, CHANGES)
        assert (status, listed["can_change"], listed["cannot_change_reason"]) == (200, True, "")
        (change,), (entry,) = listed["running"], listed["history"]
        assert (change["id"], change["name"]) == ("1", "remove-server")
        assert change["command"] == entry["command"] == "cluster remove-server 10.0.1.1:5180"
        assert change["user"] == entry["user"]
        assert change["user"].startswith("anonymous via gateway@")
        assert change["outcome"] == entry["outcome"]
        assert change["outcome"].startswith("failed: no server is registered at 10.0.1.1:5180")

    with_gateway(scenario)


def test_a_caller_without_permission_for_changes_gets_the_reason(monkeypatch):
    async def check_permitted(_self, _caller):
        raise errors.PermissionDenied("ann may not. Hint: grant it.")

    async def scenario(_world, gateway):
        expected = {"can_change": False, "cannot_change_reason": "ann may not. Hint: grant it."}
        listed = {"kinds": [], "running": [], "history": []}
        assert await get_json(gateway, CHANGES) == (200, listed | expected)
        status, cluster = await get_json(gateway, "/v1/console/cluster")
        assert status == 200
        assert expected.items() <= cluster.items()
        status, denied = await post_change(gateway, json.dumps(CHANGE).encode())
        assert (status, denied["type"]) == (403, "PermissionDenied")
        assert (denied["error"], denied["hint"]) == ("ann may not.", "Grant it.")

    monkeypatch.setattr(running_changes.ConsoleChanges, "check_permitted", check_permitted)
    with_gateway(scenario)


def test_a_token_that_zookeeper_does_not_have_is_not_valid(monkeypatch):
    async def check_permitted(_self, _caller):
        raise errors.AuthenticationFailed("the token is not known, or it has expired")

    async def scenario(_world, gateway):
        for path in (CHANGES, "/v1/console/cluster"):
            assert (await get_json(gateway, path))[0] == 401

    monkeypatch.setattr(running_changes.ConsoleChanges, "check_permitted", check_permitted)
    with_gateway(scenario)


# --- the cluster


def test_the_cluster_is_shown_although_the_check_for_changes_waits_for_zookeeper(monkeypatch):
    may_end = asyncio.Event()

    async def check_permitted(_self, _caller):
        await may_end.wait()

    async def scenario(_world, gateway):
        try:
            status, cluster = await get_json(gateway, "/v1/console/cluster")
        finally:
            may_end.set()
        assert (status, cluster["partition_count"]) == (200, PARTITION_COUNT)
        assert cluster["can_change"] is False
        assert cluster["cannot_change_reason"] == console_routes.NO_ANSWER_TEXT

    monkeypatch.setattr(running_changes.ConsoleChanges, "check_permitted", check_permitted)
    with_gateway(scenario)


def test_the_cluster_view_is_unavailable_before_the_first_read_of_zookeeper():
    async def scenario(world, gateway):
        world.coordinator._znodes.suspend()
        status, answer = await get_json(gateway, "/v1/console/cluster")
        assert (status, answer["type"]) == (503, "CoordinatorUnavailable")

    with_gateway(scenario)


def test_findings_are_shared_by_the_requests_of_one_caller(monkeypatch):
    calls = []

    async def findings(_self, token_hash):
        calls.append(token_hash)
        return {"time_ms": 1, "findings": []}

    async def scenario(_world, gateway):
        for _ in range(3):
            assert await get_json(gateway, "/v1/console/findings") == (
                200,
                {"time_ms": 1, "findings": []},
            )
        assert calls == [""]

    monkeypatch.setattr(ClusterViewer, "findings", findings)
    with_gateway(scenario)


@pytest.mark.parametrize("path", [CHANGES, "/v1/console/partitions/0/transactions", "/v1/marks"])
def test_browsers_neither_cache_answers_nor_share_them_with_other_origins(path):
    async def scenario(_world, gateway):
        _, headers, _ = await exchange(gateway, "GET", path)
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers

    with_gateway(scenario)


# --- partitions


@pytest.mark.parametrize(
    ("path", "status", "part"),
    [
        (f"{PARTITION_COUNT}/transactions", 404, "there is no partition 4"),
        ("x/transactions", 400, "partition in the path"),
        ("-1/transactions", 400, "partition in the path"),
        ("0/transactions?first=1&last=2", 400, "expected first or last"),
        ("0/transactions?first=-1", 400, "query parameter first"),
        ("0/transactions?first=1&first=2", 400, "given twice"),
        ("0/transactions?last=-2", 400, "query parameter last"),
        ("0/transactions?count=0", 400, "query parameter count"),
        (f"0/transactions?count={console_routes.COUNT_MAX + 1}", 400, "query parameter count"),
        ("0/transactions?count=ten", 400, "query parameter count"),
        ("0/transactions?header=x", 400, "query parameter header"),
        ("0/transactions?header=2147483648", 400, "query parameter header"),
        ("0/first-at", 400, "query parameter time_ms"),
        ("0/first-at?time_ms=now", 400, "query parameter time_ms"),
        ("0/first-at?time_ms=-1", 400, "query parameter time_ms"),
        (f"0/first-at?time_ms={1 << 63}", 400, "query parameter time_ms"),
        ("9/first-at?time_ms=1", 404, "there is no partition 9"),
        ("9/rejections", 404, "there is no partition 9"),
        ("0/rejections?count=1", 400, "unknown query parameter count"),
        (f"{'9' * 30}/rejections", 400, "partition in the path"),
    ],
)
def test_wrong_requests_for_partitions_are_rejected(path, status, part):
    async def scenario(_world, gateway):
        found, answer = await get_json(gateway, f"/v1/console/partitions/{path}")
        assert (found, part in answer["error"]) == (status, True)

    with_gateway(scenario)


def test_transactions_of_a_partition_are_shown():
    async def scenario(_world, gateway):
        async with gateway.client() as client:
            rows = [{"data": f'{{"n":{number}}}', "partition": 1} for number in range(3)]
            assert (await client.append(*rows)).status == 200
        partition = "/v1/console/partitions/1"
        _, page = await get_json(gateway, f"{partition}/transactions?first=1&count=1")
        assert [transaction["transaction_id"] for transaction in page["transactions"]] == [1]
        assert (page["next"], page["high_water_mark"]) == (2, 2)
        _, newest = await get_json(gateway, f"{partition}/transactions?count=2")
        assert [transaction["transaction_id"] for transaction in newest["transactions"]] == [1, 2]
        assert newest["previous"] == 0
        _, found = await get_json(gateway, f"{partition}/first-at?time_ms=0")
        assert found == {"transaction_id": 0, "high_water_mark": 2}
        _, found = await get_json(gateway, f"{partition}/first-at?time_ms={(1 << 63) - 1}")
        assert found == {"transaction_id": 3, "high_water_mark": 2}

    with_gateway(scenario)


@pytest.mark.parametrize("part", ["transactions", "first-at?time_ms=0", "rejections"])
def test_a_partition_is_shown_only_to_a_caller_that_may_read_the_partition(files, part):
    async def scenario(gateway, _access):
        for name, partition, status in (
            ("reader", MINE, 200),
            ("reader", NOT_MINE, 403),
            (None, MINE, 403),
        ):
            secret = None if name is None else token(name)
            async with gateway.client(secret) as client:
                answer = await client.get(f"/v1/console/partitions/{partition}/{part}")
                assert answer.status == status, (name, partition, answer.body)

    with_access(files, scenario)


def test_rejections_name_the_client_of_the_winning_transaction():
    async def scenario(_world, gateway):
        taken = {"partition": 1, "write_locks": [["seat", "12F"]], "mark": -1}
        async with gateway.client() as client:
            answers = [await client.append({"data": name, **taken}) for name in "abc"]
        assert [answer.status for answer in answers] == [200, 409, 409]
        _, found = await get_json(gateway, "/v1/console/partitions/1/rejections")
        first, second = found["rejections"]
        assert {first["winner"], second["winner"]} == {0}
        assert {each["reason"] for each in (first, second)} == {"lock"}
        assert first["winner_client_id"] == first["client_id"]  # the gateway is the client of all
        assert first["time_ms"] >= second["time_ms"]
        _, others = await get_json(gateway, "/v1/console/partitions/0/rejections")
        assert others == {"rejections": []}

    with_gateway(scenario)
