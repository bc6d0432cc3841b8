"""`storage scrub` waits for a slow disk, up to a limit."""

import time
from contextlib import asynccontextmanager

import pytest

from waltz_core.cli.main import main
from waltz_core.cli.storage import storage_scrub
from waltz_core.wire.admin_messages import ScrubResponse


class Storage:
    """An admin connection to a storage whose scrub stays at record 7 of 40."""

    is_current, address = True, "127.0.0.1:1"

    async def request(self, expected, _kind, partition, *_):
        assert expected is ScrubResponse
        return ScrubResponse(0, partition, True, 7, 39, 700, 3, 0, None)


@pytest.fixture(autouse=True)
def stuck_storage(monkeypatch):
    @asynccontextmanager
    async def admin_connection(_address, *, ssl):
        yield Storage()

    monkeypatch.setattr(storage_scrub, "admin_connection", admin_connection)


def test_an_incomplete_scrub_is_reported_at_the_timeout(capsys):
    began_s = time.monotonic()
    arguments = ["--admin", Storage.address, "--partition", "4", "--timeout-s", "0.3"]
    assert main(["storage", "scrub", *arguments]) == 1
    assert time.monotonic() - began_s < 30
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "waltz-core: the command did not finish within 0.3 s. It still waits for: "
        "scrubbing partition 4: record 7 of 40. The storage continues the scrub; --status "
        "shows its progress\n"
    )
