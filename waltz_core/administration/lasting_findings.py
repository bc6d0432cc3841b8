"""The findings about a cluster that two successive checks report.

Rules:
    1. If any check finds no problem, the result is empty. Otherwise the findings are the problems
       that two successive checks have in common. So temporary problems are omitted (a partition
       that moves, a replica that catches up). If the problems differ at each of `CHECKS_MAX`
       checks, the findings are those of the last check: a partition whose owner changes all the
       time is not healthy.
"""

import asyncio
from dataclasses import replace
from typing import Final

from waltz_core.administration.cluster_probes import gather_facts
from waltz_core.ops.diagnosis import diagnose
from waltz_core.ops.facts import Facts, LocalFacts
from waltz_core.ops.findings import Finding

# Enough time to open a session or to move a partition in a healthy cluster.
RECHECK_INTERVAL_S: Final = 1.5
CHECKS_MAX: Final = 5


async def lasting_findings(
    connect: str,
    *,
    timeout_s: float,
    local: LocalFacts | None = None,
    displayed_connect: str | None = None,
) -> tuple[Facts, list[Finding]]:
    """Check repeatedly; return the facts, and the findings that are not temporary (rule 1).

    Findings and their commands have the connect string `displayed_connect`, by default `connect`.
    """

    async def check() -> tuple[Facts, list[Finding]]:
        facts = await gather_facts(connect, timeout_s=timeout_s, local=local)
        if displayed_connect is not None:
            facts = replace(facts, connect=displayed_connect)
        return facts, diagnose(facts)

    facts, findings = await check()
    for _ in range(CHECKS_MAX - 1):
        if not findings:
            break
        previous_keys = {each.key for each in findings}
        await asyncio.sleep(RECHECK_INTERVAL_S)
        facts, findings = await check()
        lasting_ones = [each for each in findings if each.key in previous_keys]
        if lasting_ones:
            return facts, lasting_ones
    return facts, findings
