"""`waltz-core cluster verify`: seven checks of every partition, from ZooKeeper to storages.

Nothing is changed here, and what is found is told twice, as sentences for people and by partition
and check for programs. What has failed is judged in `ops/checks.py`, from what the doctor asks,
too.
"""

import argparse
from typing import Final

from waltz_core.cli.changing import add_common, connected
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.cli.parsing import Verbs
from waltz_core.cli.progress import ProgressLine
from waltz_core.cluster.change import changes
from waltz_core.ops.checks import (
    CHECKS,
    check,
    failed_checks,
)
from waltz_core.transport import net

# How long an answer may take.
ANSWER_S: Final = 10.0


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    verified = verbs.add_parser("verify", help="check every partition, from ZooKeeper to storages")
    verified.add_argument("--partitions", default="all", help="like 3 or 0-6,9 (default all)")
    verified.add_argument(
        "--by-partition",
        action="store_true",
        help=f"show each check of each partition, too: {', '.join(CHECKS)}",
    )
    add_common(verified, changes=False)
    verified.set_defaults(verb=lambda arguments: net.run(_verify(arguments)))


async def _verify(arguments: argparse.Namespace) -> int:
    from waltz_core.cli.doctor.doctor_probes import ask_cluster  # noqa: PLC0415 - loads Arrow

    async with connected(arguments.connect) as coordinator:
        count = (await coordinator.read_cluster()).params.partition_count
        chosen = changes.parse_partitions(arguments.partitions, count)
        with ProgressLine() as line:
            facts = await ask_cluster(coordinator, timeout_s=ANSWER_S, tell=line.show)
    found = check(facts, chosen)
    by_partition = {each: failed_checks(found, each) for each in chosen}
    if arguments.json:
        told: dict[str, object] = {"passed": not found, "findings": [each.text for each in found]}
        if arguments.by_partition:
            told["partitions"] = {
                int(each): {name: name not in failed for name in CHECKS}
                for each, failed in by_partition.items()
            }
        show_json(told)
        return 1 if found else 0
    if arguments.by_partition:
        rows = [
            (int(each), *("FAILED" if name in failed else "ok" for name in CHECKS))
            for each, failed in by_partition.items()
        ]
        show_table(("partition", *CHECKS), rows)
    for finding in found:
        show(finding.text)
    show("failed" if found else "passed")
    return 1 if found else 0
