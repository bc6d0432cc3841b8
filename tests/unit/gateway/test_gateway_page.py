"""A gateway answers every request of docs/gateway.md, in the order of the page, as documented."""

import asyncio
import json
import re
from pathlib import Path

from tests.unit.gateway.gateway_world import in_gateway_world

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
EXAMPLE = re.compile(r"^```\n((?:GET|POST) .*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_request_of_the_page_has_the_documented_answer():
    page = PAGE.read_text(encoding="utf-8")
    examples = EXAMPLE.findall(page)
    assert len(examples) >= 4

    async def scenario(world):
        async with world.gateway() as gateway, gateway.client() as client:
            for example in examples:
                await check(client, example)

    in_gateway_world(scenario)


async def check(client, example):
    request, _, expected = example.partition("\n\n")
    first, *more = request.splitlines()
    method, path = first.split()
    if path.partition("?")[0].endswith("/feed"):
        lines = [line.encode() for line in expected.splitlines() if line]
        assert await client.read_feed(path, len(lines)) == lines
        return
    headers = dict(line.split(": ", 1) for line in more if not line.startswith("{"))
    body = "".join(line for line in more if line.startswith("{")).encode() or None
    answer = await asyncio.to_thread(client.exchange, method, path, body, headers)
    status, fields = expected.splitlines()
    assert (answer.status, answer.body) == (int(status), json.loads(fields))
