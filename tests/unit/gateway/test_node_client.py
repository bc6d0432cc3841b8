"""The Node.js example with gateways in memory, while appends, answers and a gateway are lost."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.loops import poll_until
from tests.unit.gateway.gateway_world import in_gateway_world

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "gateway_client.mjs"
COUNT = 50


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_node_client_neither_loses_nor_duplicates_transactions():
    async def scenario(world):
        async with world.gateway(request_timeout_ms=500) as stays:
            async with world.gateway(request_timeout_ms=500) as ends:
                process = await asyncio.create_subprocess_exec(
                    *("node", str(PROGRAM), f"{ends.url},{stays.url}", str(COUNT)),
                    stdout=asyncio.subprocess.PIPE,
                )
                await poll_until(lambda: world.transaction_count() >= COUNT // 2)
            output, _ = await process.communicate()
        assert output.decode().splitlines()[-2:] == [
            "lost 0, duplicated 0",
            f"gateway client: OK, {COUNT} transactions",
        ]
        assert process.returncode == 0
        assert world.transaction_count() == COUNT

    in_gateway_world(scenario, fault_rate=0.1)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_node_client_without_gateways_prints_its_usage():
    done = subprocess.run(["node", str(PROGRAM)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: node gateway_client.mjs")) == (2, True)
