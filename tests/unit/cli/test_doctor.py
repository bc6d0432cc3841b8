"""`waltz-core doctor`: output, exit codes and timeouts."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import pytest

from tests.certificates import create_certificates
from tests.unit.ops.test_diagnosis import ONE, A, B, healthy
from waltz_core.administration import lasting_findings
from waltz_core.administration.cluster_probes import _ProbeCounter, gather_facts, zookeeper_mode
from waltz_core.cli.doctor import doctor_command
from waltz_core.cli.main import main
from waltz_core.ops.diagnosis import diagnose
from waltz_core.ops.facts import Facts

CONNECT = "127.0.0.1:1/waltz/none"


@pytest.fixture
def facts_to_gather(monkeypatch, tmp_path):
    """Return a list of facts that the doctor gathers one after the other; the last one repeats."""
    monkeypatch.setattr(lasting_findings, "RECHECK_INTERVAL_S", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    facts = [healthy()]

    async def gather_next(connect, **_):
        assert connect == CONNECT
        return facts.pop(0) if len(facts) > 1 else facts[0]

    monkeypatch.setattr(lasting_findings, "gather_facts", gather_next)
    return facts


def with_failed_storage(facts, address):
    storages = dict(facts.cluster.storages)
    storages[address] = replace(storages[address], failure="refused", replicas={})
    return replace(facts, cluster=replace(facts.cluster, storages=storages))


def test_a_healthy_cluster_is_reported_as_healthy(facts_to_gather, capsys):
    assert main(["doctor", "--connect", CONNECT]) == 0
    first, clocks = capsys.readouterr().out.splitlines()
    assert first.startswith("no problems: 2 servers, 4 storages,")
    assert "4 storages and of this machine differ by at most 3 ms" in clocks


def test_findings_are_numbered_with_their_commands(facts_to_gather, capsys):
    facts_to_gather[:] = [with_failed_storage(healthy(), A)]
    assert main(["doctor", "--connect", CONNECT]) == 1
    sentence, command = capsys.readouterr().out.splitlines()
    assert sentence.startswith(f"1. storage {A} does not answer: refused. Hint: ")
    assert command == "   waltz-core storage run --config storage.toml"


def test_a_finding_that_disappears_is_not_reported(facts_to_gather, capsys):
    facts_to_gather[:] = [
        with_failed_storage(healthy(), A),
        with_failed_storage(healthy(), B),
        healthy(),
    ]
    assert main(["doctor", "--connect", CONNECT, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["is_healthy"], value["findings"]) == (True, [])


def test_a_cluster_whose_problems_change_at_each_check_is_not_healthy(facts_to_gather, capsys):
    facts_to_gather[:] = [with_failed_storage(healthy(), A), with_failed_storage(healthy(), B)]
    assert main(["doctor", "--connect", CONNECT]) == 1
    assert f"storage {B} does not answer" in capsys.readouterr().out
    facts_to_gather[:] = [with_failed_storage(healthy(), each) for each in (A, B, A, B, A)]
    assert main(["doctor", "--connect", CONNECT]) == 1
    (sentence, _) = capsys.readouterr().out.splitlines()
    assert sentence.startswith(f"1. storage {A} does not answer")


def test_json_output_is_one_value(facts_to_gather, capsys):
    facts_to_gather[:] = [with_failed_storage(healthy(), A)]
    assert main(["doctor", "--connect", CONNECT, "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["connect"] == healthy().connect
    (finding,) = value["findings"]
    assert (finding["name"], finding["area"], finding["about"]) == (
        "storage-unavailable",
        "storages",
        A,
    )
    server = value["facts"]["servers"][ONE]
    assert (server["open"], server["not_open"], server["out_of_reach"]) == ([0], [], [])
    assert value["facts"]["storages"][B]["clock_ahead_ms"] == 3.0
    assert value["facts"]["marks"] == {"0": 90, "1": 90}
    assert value["not_measured"]


def test_mismatched_tls_files_are_reported_as_one_error(facts_to_gather, tmp_path, capsys):
    one, other = create_certificates(tmp_path), create_certificates(tmp_path, name="other")
    settings = tmp_path / "client.toml"
    settings.write_text(
        f'tls_certificate = "{one.certificate}"\ntls_key = "{other.key}"\n'
        f'tls_authorities = "{one.authorities}"\n'
    )
    assert main(["doctor", "--connect", f"{CONNECT}?tls={settings}"]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("waltz-core: setting tls_certificate: ")
    assert "key values mismatch" in sentence


def test_a_cluster_that_becomes_unreachable_is_not_reported_as_healthy(facts_to_gather, capsys):
    facts_to_gather[:] = [with_failed_storage(healthy(), A), Facts(CONNECT)]
    assert main(["doctor", "--connect", CONNECT]) == 1
    assert "could not be queried" in capsys.readouterr().out
    value = doctor_command.findings_json(Facts(CONNECT), [])
    assert "zookeeper" in value["facts"]
    assert not value["is_healthy"]


def test_without_a_cluster_the_doctor_reports_the_expected_argument(facts_to_gather, capsys):
    assert main(["doctor"]) == 1
    assert "expected --connect zk1:2181" in capsys.readouterr().err
    assert main(["doctor", "--connect", CONNECT, "--timeout-s", "0"]) == 1
    assert "expected a number above 0, found 0" in capsys.readouterr().err


def test_the_mode_of_a_zookeeper_server_is_read():
    assert zookeeper_mode(b"Zookeeper version: 3.9\nMode: leader\nNode count: 5\n") == "leader"
    assert zookeeper_mode(b"This ZooKeeper instance is not currently serving requests\n") == ""
    assert (
        zookeeper_mode(b"srvr is not executed because it is not in the whitelist.\n")
        == "not reported"
    )
    assert zookeeper_mode(b"") == ""


def test_a_silent_zookeeper_port_is_reported():
    """A port that accepts connections and sends nothing is reported with its node's name."""

    with socket.create_server(("127.0.0.1", 0)) as silent:
        connect = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:1/waltz/none"
        began_s = time.monotonic()
        result = asyncio.run(gather_facts(connect, timeout_s=2.0, local=None))
    assert time.monotonic() - began_s < 60
    first, second = result.zookeeper_servers
    assert first.is_silent
    assert not second.is_silent
    assert [finding.name for finding in diagnose(result)] == [
        "zookeeper-unavailable",
        "zookeeper-server-unavailable",
        "zookeeper-server-unavailable",
    ]


def test_progress_names_the_processes_that_have_not_answered_yet():
    progress_lines, release = [], asyncio.Event()

    async def slow():
        await release.wait()
        return "slow"

    async def quick():
        return "quick"

    async def run_probes():
        probe_counter = _ProbeCounter(lambda *each: progress_lines.append(each))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(probe_counter.track("server a:1", slow()))
            await tasks.create_task(probe_counter.track("storage b:1", quick()))
            release.set()
        return first.result()

    assert asyncio.run(run_probes()) == "slow"
    assert progress_lines == [
        (1, 2, "waiting for server a:1"),
        (2, 2, "all have answered"),
    ]
