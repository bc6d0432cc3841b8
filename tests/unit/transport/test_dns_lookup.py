"""Lookups of host names: one at a time for each name, on a separate thread."""

import asyncio
import socket
import threading

import pytest

from tests.loops import poll_until
from waltz_core.config.host_names import check_host
from waltz_core.errors import Unreachable
from waltz_core.transport import dns_lookup, net
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import WireProtocol


class Dns:
    """Answers lookups of localhost at once, and those of `slow-...` when the test permits it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requested_hosts: list[str] = []
        self.may_end = threading.Event()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host, *words, **named):
        self.requested_hosts.append(host)
        if not host.startswith("slow-"):
            return self._real(host, *words, **named)
        self.may_end.wait()
        if host == "slow-and-unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{each}", 0)) for each in "21"
        ]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch):
    """Yield a fake DNS, and check that all its lookups have ended."""
    fake_dns = Dns(monkeypatch)
    yield fake_dns
    fake_dns.may_end.set()


def test_a_numeric_address_is_not_looked_up(dns: Dns):
    assert asyncio.run(dns_lookup.addresses_of("127.0.0.1")) == ["127.0.0.1"]
    assert asyncio.run(dns_lookup.addresses_of("::1")) == ["::1"]
    assert dns.requested_hosts == []


def test_callers_share_a_lookup_that_continues_if_some_callers_are_cancelled(dns: Dns):
    async def run():
        async with asyncio.TaskGroup() as tasks:
            callers = [tasks.create_task(dns_lookup.addresses_of("slow-1")) for _ in range(20)]
            await poll_until(lambda: dns.requested_hosts)
            for caller in callers[:10]:
                caller.cancel()
            await asyncio.wait(callers[:10])
            assert dns.requested_hosts == ["slow-1"]
            dns.may_end.set()
        assert [caller.result() for caller in callers[10:]] == 10 * [["127.0.0.2", "127.0.0.1"]]
        assert await dns_lookup.addresses_of("slow-1") == ["127.0.0.2", "127.0.0.1"]
        assert dns.requested_hosts == ["slow-1", "slow-1"]

    asyncio.run(run())


def test_slow_lookups_of_some_names_do_not_delay_lookups_of_others(dns: Dns):
    async def run():
        async with asyncio.TaskGroup() as tasks:
            names = [f"slow-{number}" for number in range(40)]
            slow = [tasks.create_task(dns_lookup.addresses_of(name)) for name in names]
            await asyncio.sleep(0)
            assert "127.0.0.1" in await dns_lookup.addresses_of("localhost")
            assert not any(each.done() for each in slow)
            dns.may_end.set()

    net.run(run())


def test_the_errors_of_a_lookup_name_the_host(dns: Dns, monkeypatch: pytest.MonkeyPatch):
    dns.may_end.set()
    with pytest.raises(socket.gaierror, match="not known"):
        asyncio.run(dns_lookup.addresses_of("slow-and-unknown"))
    for impossible in ("a..b", "localhost\0x", "a\ud800", ""):
        with pytest.raises(OSError, match="is not a valid host name"):
            asyncio.run(dns_lookup.addresses_of(impossible))

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        found = dns_lookup.begin_lookup("localhost")
    with pytest.raises(OSError, match="resolve the host name localhost: no thread"):
        found.result()
    assert dns_lookup.begin_lookup("localhost").result()


@pytest.mark.parametrize(
    "host", ["db1", "waltz_storage_1", "a.b.", "münchen.example", "10.0.0.1", "::1", "fe80::1%eth0"]
)
def test_valid_host_names_are_accepted(host: str):
    check_host(host)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("", "expected a host name"),
        ("a b", "expected a host name"),
        ("a\nb", "expected a host name"),
        ("db1:80", "expected a host name"),
        ("[::1]", "expected a host name"),
        ("a/b", "expected a host name"),
        (".a", "label empty"),
        ("a..b", "label empty"),
        ("a" * 64, "label"),
        ("a.b." * 80, "at most 253 bytes"),
    ],
)
def test_invalid_host_names_are_rejected(host: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        check_host(host)


def test_a_dial_tries_each_address(dns: Dns):
    async def run():
        dns.may_end.set()
        listener = await listen(WireProtocol.STORAGE, "127.0.0.1", 0, lambda _link: None)
        try:
            link = await net.dial(WireProtocol.STORAGE, f"slow-1:{listener.port}")
            link.abort("seen")
        finally:
            await listener.close()
        # If one of several addresses refuses a connection, this does not prove that the process is
        # dead.
        with pytest.raises(Unreachable) as caught:
            await net.dial(WireProtocol.STORAGE, f"slow-1:{listener.port}")
        assert not isinstance(caught.value.__cause__, ConnectionRefusedError)
        assert str(caught.value).count("127.0.0.") == 2

    net.run(run())
