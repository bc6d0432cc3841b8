"""An application in another language appends and reads through gateways while processes die."""

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fault.load import PROJECT_ROOT
from tests.gateway_process import run_gateway
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.local import running_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.fault

COUNT = 300


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_node_js_client_loses_and_duplicates_nothing_while_processes_are_killed(tmp_path: Path):
    with (
        running_cluster(tmp_path, storage_count=3, server_count=2) as cluster,
        run_gateway(cluster.connect) as first,
        run_gateway(cluster.connect) as second,
    ):

        def restart_server(name: str) -> None:
            cluster.kill(name)
            cluster.start(name)

        def restart_gateway() -> None:
            first.kill()
            first.start()

        faults: dict[str, Callable[[], None]] = {
            "appended 50": lambda: restart_server("server-1"),
            "appended 100": restart_gateway,
            "appended 150": lambda: restart_server("storage-1"),
            "appended 200": lambda: restart_server("server-2"),
        }
        program = str(PROJECT_ROOT / "examples" / "gateway_client.mjs")
        words = ["node", program, f"{first.url},{second.url}", str(COUNT)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            lines = []
            with contextlib.suppress(StopIteration):
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line.strip())
                    faults.pop(lines[-1], lambda: None)()
            assert process.wait(TEST_TIMEOUT_S) == 0, lines
        assert lines[-2:] == [
            "lost 0, duplicated 0",
            f"gateway client: OK, {COUNT} transactions",
        ]
        assert not faults
