"""`waltz-core disk verify | repair-index`: verify a directory, and rebuild index files."""

from contextlib import AbstractContextManager
from pathlib import Path

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.offline.file_findings import FileFinding
from waltz_core.offline.files import hold_shared_locks, segments_at
from waltz_core.offline.index_repair import IndexRepairResult, hold_exclusive_locks
from waltz_core.offline.index_repair import repair_index as rebuild_index
from waltz_core.offline.verify import VerificationResult
from waltz_core.offline.verify import verify as verify_at
from waltz_core.offline.verify_segment import FoundLog
from waltz_core.storage.disk.file_system import RealDisk

FINDINGS_SHOWN_MAX = 1000


@subcommand
@click.option(
    "--limit",
    type=int,
    default=FINDINGS_SHOWN_MAX,
    metavar="N",
    help="maximum number of findings to print; further ones are only counted [default: "
    f"{FINDINGS_SHOWN_MAX}]",
)
@options.storage_file_options("a storage directory, a partition's directory or a .seg file")
def verify(*, path: Path, partitions: list[int] | None, limit: int, as_json: bool) -> int:
    """Verify the checksums and chain hashes of a storage directory; exit code 1 if one is wrong."""
    if limit < 0:
        raise BadConfig(f"--limit: expected a number of at least 0, found {limit}")
    result = verify_at(path, partitions, limit)
    if as_json:
        print_json(_verification_json(result))
    else:
        _print_verification(result)
    return 1 if result.findings.error_count else 0


def _verification_json(result: VerificationResult) -> dict[str, object]:
    findings = result.findings
    return {
        "path": str(result.path),
        "wrong": findings.error_count,
        "notes": findings.note_count,
        "findings": [
            {
                "kind": _finding_kind(finding),
                "file": finding.path,
                "offset": finding.offset,
                "what": finding.what,
            }
            for finding in findings.kept_findings
        ],
        "partitions": [
            {
                "partition": None if number < 0 else number,
                "segments": log.segment_count,
                "records": log.record_count,
                "last": log.last,
                "bytes": log.bytes_read,
                "checksums": log.checksum_count,
                "batches": log.batch_count,
                "unchecked_batches": log.unchecked_batch_count,
                "chain": None if log.end is None else log.end.chain.hex(),
                "unreadable": log.unreadable,
            }
            for number, log in result.logs.items()
        ],
        "seconds": round(result.seconds, 3),
    }


def _finding_kind(finding: FileFinding) -> str:
    return "wrong" if finding.is_error else "note"


def _print_verification(result: VerificationResult) -> None:
    findings = result.findings
    for finding in findings.kept_findings:
        location = finding.path if finding.offset is None else f"{finding.path} at {finding.offset}"
        print_result(f"{_finding_kind(finding)}: {location}: {finding.what}")
    if findings.omitted_count:
        print_result(f"{findings.omitted_count} more findings were omitted; --limit shows more")
    if result.logs and next(iter(result.logs)) >= 0:
        print_table(
            (
                "partition",
                "segments",
                "records",
                "bytes",
                "batches",
                "unchecked",
                "last ID",
                "chain",
            ),
            [_log_row(number, checked_log) for number, checked_log in result.logs.items()],
        )
    logs = result.logs.values()
    print_result(
        f"checked {sum(log.checksum_count for log in logs)} checksums of "
        f"{sum(log.record_count for log in logs)} records, "
        f"{sum(log.bytes_read for log in logs)} bytes, in {result.seconds:.1f} s: "
        f"{findings.error_count} wrong, {findings.note_count} notes"
    )


def _log_row(number: int, log: FoundLog) -> tuple[object, ...]:
    chain = "-" if log.end is None else log.end.chain.hex()
    unchecked = log.unchecked_batch_count
    return (
        number,
        log.segment_count,
        log.record_count,
        log.bytes_read,
        log.batch_count,
        unchecked,
        log.last,
        chain,
    )


# ---------------------------------------------------------------------------------------------
# The index


@subcommand
@click.option("--dry-run", is_flag=True, help="only print the changes")
@options.storage_file_options("a .seg file, a partition's directory or a storage directory")
def repair_index(*, path: Path, partitions: list[int] | None, dry_run: bool, as_json: bool) -> int:
    """Rebuild wrong or missing index files from their segment files."""
    disk = RealDisk()
    segments = segments_at(path, partitions)
    repaired: list[IndexRepairResult] = []
    rejected: list[str] = []
    with _lock_directory(disk, path, dry_run=dry_run):
        for segment in segments:
            try:
                repaired.append(rebuild_index(disk, segment, dry_run=dry_run))
            except BadFormat as error:  # other segments can still be repaired
                rejected.append(str(error))
    if as_json:
        print_json([_repair_json(index, dry_run=dry_run) for index in repaired])
    else:
        for index in repaired:
            print_result(_repair_text(index, dry_run=dry_run))
    for message in rejected:
        print_error(f"waltz-core: {message}")
    return 1 if rejected else 0


def _lock_directory(disk: RealDisk, path: Path, *, dry_run: bool) -> AbstractContextManager[None]:
    """Lock the storage directory: shared for a dry run, otherwise exclusively."""
    return hold_shared_locks(path) if dry_run else hold_exclusive_locks(disk, path)


def _repair_json(index: IndexRepairResult, *, dry_run: bool) -> dict[str, object]:
    return {
        "file": str(index.path),
        "is_valid": index.is_valid,
        "is_rebuilt": not index.is_valid and not dry_run,
        "entries": index.entry_count,
        "old_entries": index.old_entry_count,
        "wrong": index.difference_count,
        "kept_of_unreadable_records": index.kept_count,
    }


def _repair_text(index: IndexRepairResult, *, dry_run: bool) -> str:
    if index.is_valid:
        return f"{index.path}: correct, {index.entry_count} entries; unchanged"
    action_text = "would be rebuilt" if dry_run else "rebuilt"
    problem_text = (
        "missing" if index.old_entry_count is None else f"{index.difference_count} wrong entries"
    )
    if index.difference_count == 1 and index.old_entry_count is not None:
        problem_text = "1 wrong entry"
    kept_text = (
        (f"; {index.kept_count} of them belong to records that cannot be read, and were kept")
        if index.kept_count
        else ""
    )
    return f"{index.path}: {problem_text}; {action_text}, {index.entry_count} entries{kept_text}"
