"""`waltz-core access` on a cluster of real processes: daemons use its permissions."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.commands import run_command
from tests.integration.tls_cluster import daemons_with_access, tls_cluster
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cli.access import access_change
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import AuthenticationFailed
from waltz_core.local import LocalCluster

PARTITION = 1


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[LocalCluster]:
    with daemons_with_access("report"), tls_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster


def test_permissions_and_tokens_reach_every_daemon(
    cluster: LocalCluster,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    # Even if a daemon takes long to read the first permissions, the command must not report that
    # the daemon's access control is off.
    monkeypatch.setattr(access_change, "ACCESS_OFF_WAIT_S", TEST_TIMEOUT_S)
    connect_arguments = ("--connect", cluster.connect)

    def access(*words: str, code: int = 0) -> dict[str, object]:
        ran = run_command("access", *words, "--json", *connect_arguments)
        assert ran.returncode == code, (words, ran.stdout, ran.stderr)
        return json.loads(ran.stdout)

    def change(*words: str) -> dict[str, object]:
        """Change the permissions, and check that every daemon uses them."""
        changed = access(*words, "--timeout-s", f"{TEST_TIMEOUT_S}")
        assert [each.split()[0] for each in changed["applied"]] == ["server", "storage"]
        for name in ("server-1", "storage-1"):
            line = f"access.revision_applied revision={changed['revision']}\n"
            assert line in cluster.log_path(name).read_text()
        return changed

    assert change("init")["revision"] == 1
    change("group", "add", "servers", "s1")
    change("grant", "servers", "replicate", "--group")
    change("grant", "ann", "read,append", "--partitions", f"{PARTITION}")
    file = tmp_path / "token"
    token_id = change("token", "create", "ann", "--file", str(file))["token_id"]
    shown = access("list")
    assert [(grant["verb"], grant["partitions"]) for grant in shown["grants"]] == [
        ("replicate", "all"),
        ("read", f"{PARTITION}"),
        ("append", f"{PARTITION}"),
    ]
    assert [token["id"] for token in shown["tokens"]] == [token_id]
    assert access("check", "ann", "append", "--partition", f"{PARTITION}")["permitted"] is True
    assert access("check", "ann", "append", "--partition", "0", code=1)["permitted"] is False

    without_options = cluster.connect.partition("?")[0]
    connect = f"{without_options}?tls={certificates.authorities}&token_file={file}"
    with WaltzClient(connect) as client:
        assert client.append(b"with a token", partition=PARTITION).result() >= 0
    change("token", "revoke", token_id)
    with (
        WaltzClient(connect, ClientConfig(request_timeout_ms=5_000)) as client,
        pytest.raises(AuthenticationFailed, match=f"token {token_id} of .* is revoked"),
    ):
        client.high_water_mark(PARTITION)

    audit = json.loads(run_command("cluster", "audit", "--json", *connect_arguments).stdout)
    changes = [each for each in audit if each["command"].startswith("access ")]
    assert [each["outcome"] for each in changes] == ["done"] * 6
    assert file.read_text().strip() not in str(audit)


def test_the_error_names_a_storage_that_has_not_read_a_change(cluster: LocalCluster):
    connect_arguments = ("--connect", cluster.connect)
    run_command("access", "init", *connect_arguments)  # unless another test has done so
    grant = ("access", "grant", "bob", "read", *connect_arguments)
    (address,) = json.loads(run_command("cluster", "show", "--json", *connect_arguments).stdout)[
        "storages"
    ]
    cluster.kill("storage-1", signal.SIGSTOP)
    try:
        late = run_command(*grant, "--timeout-s", "1")
    finally:
        cluster.kill("storage-1", signal.SIGCONT)
    assert late.returncode == 1
    assert "bob has the verbs read for partitions all; the permissions have revision" in late.stdout
    assert f"storage {address}: it " in late.stderr
    assert "of 2 daemons do not use it. Hint:" in late.stderr
    again = run_command(*grant, "--timeout-s", f"{TEST_TIMEOUT_S}")
    assert again.returncode == 0, again.stderr
    assert "nothing to change" in again.stdout
    assert "all 2 daemons use revision" in again.stderr
