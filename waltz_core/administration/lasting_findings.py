"""The findings about a cluster that two successive checks report.

Rules:
    1. The result omits temporary problems, such as a partition that moves or a replica that catches
       up. The cluster is checked repeatedly:
       - If a check finds no problem, the result is empty.
       - If two successive checks have problems in common, these problems are the result.
       - If the problems are different at each of `CHECKS_MAX` checks, the problems of the last
         check are the result. Reason: a cluster whose problems change all the time is not healthy.
"""

import asyncio
from dataclasses import replace
from typing import Final

from waltz_core.administration.cluster_probes import gather_facts
from waltz_core.ops.diagnosis import diagnose
from waltz_core.ops.facts import Facts, LocalFacts
from waltz_core.ops.findings import Finding

# A healthy cluster opens a store session or moves a partition within this time.
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
        previous_keys = {finding.key for finding in findings}
        await asyncio.sleep(RECHECK_INTERVAL_S)
        facts, findings = await check()
        lasting_ones = [finding for finding in findings if finding.key in previous_keys]
        if lasting_ones:
            return facts, lasting_ones
    return facts, findings
