"""Verifies a storage directory, or a copy of one partition or segment.

This file defines the order of the checks, and collects their results.
"""

import time
from pathlib import Path
from typing import NamedTuple

from waltz_core.errors import BadRequest
from waltz_core.offline.file_findings import VerificationFindings
from waltz_core.offline.files import (
    first_id_in_name,
    first_ids_in,
    hold_shared_locks,
    is_storage_directory,
    partitions_in,
    select_partitions,
)
from waltz_core.offline.layout import CONTROL_FILE_NAME, SLOTS_FILE_NAME
from waltz_core.offline.verify_control import (
    DecodedControlFile,
    check_control_file,
    check_storage_id,
    compare_log_with_control_files,
    expected_log,
    is_assigned,
    read_control,
)
from waltz_core.offline.verify_log import verify_log, verify_segment
from waltz_core.offline.verify_segment import FoundLog


class VerificationResult(NamedTuple):
    """The verified logs, by partition, and the findings."""

    path: Path
    logs: dict[int, FoundLog]
    findings: VerificationFindings
    seconds: float


def verify(path: Path, partitions: list[int] | None, limit: int) -> VerificationResult:
    """Verify a storage directory, a partition's directory, or a `.seg` file.

    Raises:
        BadRequest: the path is none of these.
        DiskFailed: a storage runs on the directory, or a file cannot be read.
    """
    start_s = time.perf_counter()
    findings = VerificationFindings(limit)
    with hold_shared_locks(path):
        if path.is_file() and first_id_in_name(path.name) is not None:
            logs = {-1: verify_segment(path, findings)}
        elif path.is_dir() and is_storage_directory(path):
            logs = _verify_storage(path, partitions, findings)
        elif path.is_dir() and (first_ids_in(path) or (path / SLOTS_FILE_NAME).exists()):
            logs = _verify_partition(path, findings)
        else:
            raise BadRequest(
                f"{path}: expected a storage directory with {CONTROL_FILE_NAME}, the directory of "
                "a partition, or a .seg file"
            )
    return VerificationResult(path, logs, findings, time.perf_counter() - start_s)


def _verify_storage(
    directory: Path, partitions: list[int] | None, findings: VerificationFindings
) -> dict[int, FoundLog]:
    control = read_control(directory / CONTROL_FILE_NAME)
    check_control_file(control, findings)
    existing_partitions = partitions_in(directory)
    has_slots = any(
        (directory / str(number) / SLOTS_FILE_NAME).exists() for number in existing_partitions
    )
    check_storage_id(directory, findings, has_slots=has_slots)
    if control is not None and partitions is None:
        _check_assignment(control, existing_partitions, findings)
    logs = {}
    for number in select_partitions(directory, partitions):
        logs[number] = _verify_log_of(directory, number, control, findings)
    return logs


def _check_assignment(
    control: DecodedControlFile, present: list[int], findings: VerificationFindings
) -> None:
    for number, entry in enumerate(control.entries):
        if is_assigned(entry) and number not in present:
            session = -1 if entry.info is None else entry.info.session
            findings.in_file(str(number)).add_finding(
                None,
                f"the directory is missing, but in the control file partition {number} is assigned "
                f"to the storage and has session {session}",
                is_error=session >= 0,  # before the first session there may be no files yet
            )
    for number in present:
        report = findings.in_file(str(number))
        count = control.header.partition_count
        if number >= count:
            report.add_error(
                None, f"expected a partition below {count}, the partition count of the control file"
            )
        elif number < len(control.entries) and not is_assigned(control.entries[number]):
            report.add_note(
                None, f"the directory has partition {number}, which is not assigned to the storage"
            )


def _verify_partition(directory: Path, findings: VerificationFindings) -> dict[int, FoundLog]:
    """Verify a partition's directory, with the control file of its storage if there is one."""
    parent = directory.absolute().parent
    if not directory.absolute().name.isdecimal():
        raise BadRequest(f"{directory}: expected a directory whose name is a partition number")
    number = int(directory.absolute().name)
    control = read_control(parent / CONTROL_FILE_NAME)
    return {number: _verify_log_of(parent, number, control, findings)}


def _verify_log_of(
    directory: Path, number: int, control: DecodedControlFile | None, findings: VerificationFindings
) -> FoundLog:
    expected = expected_log(directory, number, control, findings)
    found_log = verify_log(directory / str(number), expected, findings)
    entry = None
    if control is not None and number < len(control.entries):
        entry = control.entries[number]
    compare_log_with_control_files(expected, entry, found_log, findings)
    return found_log
