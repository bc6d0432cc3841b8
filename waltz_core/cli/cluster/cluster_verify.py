"""`waltz-core cluster verify`: seven checks of every partition, from ZooKeeper to storages.

The command changes nothing. It prints failures as sentences for users, or by partition and check
for programs. `ops/checks.py` derives the failures from the answers to the doctor's queries.
"""

from typing import Final

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_json, print_result, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change import replica_steps
from waltz_core.ops.checks import CHECK_CONDITIONS, check_cluster, names_of_failed_checks

# Seconds to wait for an answer of a process.
ANSWER_TIMEOUT_S: Final = 10.0


@subcommand
@click.option(
    "--partitions", default="all", help="the partitions, for example 3 or 0-6,9 [default: all]"
)
@click.option(
    "--by-partition",
    is_flag=True,
    help=f"also print the result of each check of each partition: {', '.join(CHECK_CONDITIONS)}",
)
@options.connect_option
@options.json_option
async def verify(*, partitions: str, by_partition: bool, connect: str, as_json: bool) -> int:
    """Run seven checks of each partition; exit code 1 if one fails."""
    from waltz_core.administration.cluster_probes import query_cluster  # noqa: PLC0415 - loads Arrow

    async with open_command_session(connect) as coordinator:
        count = (await coordinator.read_cluster()).params.partition_count
        partition_ids = replica_steps.parse_partitions(partitions, count)
        with ProgressLine() as line:
            facts = await query_cluster(
                coordinator, timeout_s=ANSWER_TIMEOUT_S, on_progress=line.show
            )
    failures = check_cluster(facts, partition_ids)
    failed = {each: names_of_failed_checks(failures, each) for each in partition_ids}
    if as_json:
        result: dict[str, object] = {
            "passed": not failures,
            "findings": [each.text for each in failures],
        }
        if by_partition:
            result["partitions"] = {
                int(each): {name: name not in failed_checks for name in CHECK_CONDITIONS}
                for each, failed_checks in failed.items()
            }
        print_json(result)
        return 1 if failures else 0
    if by_partition:
        rows = [
            (int(each), *("FAILED" if name in failed_checks else "ok" for name in CHECK_CONDITIONS))
            for each, failed_checks in failed.items()
        ]
        print_table(("partition", *CHECK_CONDITIONS), rows)
    for finding in failures:
        print_result(finding.text)
    print_result("failed" if failures else "passed")
    return 1 if failures else 0
