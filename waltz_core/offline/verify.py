"""Verifies a storage directory, or a copy of one partition or segment.

This file defines the order of the checks, and collects their results.
"""

import time
from pathlib import Path
from typing import NamedTuple

from waltz_core.errors import BadRequest
from waltz_core.offline.file_findings import VerificationFindings
from waltz_core.offline.files import (
    chosen_partitions,
    first_ids_in,
    first_of,
    is_storage,
    locked_shared,
    partitions_in,
)
from waltz_core.offline.layout import CONTROL_NAME, SLOTS_NAME
from waltz_core.offline.verify_control import (
    Control,
    check_control,
    check_id,
    compare_log,
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
    began = time.perf_counter()
    findings = VerificationFindings(limit)
    with locked_shared(path):
        if path.is_file() and first_of(path.name) is not None:
            logs = {-1: verify_segment(path, findings)}
        elif path.is_dir() and is_storage(path):
            logs = _verify_storage(path, partitions, findings)
        elif path.is_dir() and (first_ids_in(path) or (path / SLOTS_NAME).exists()):
            logs = _verify_partition(path, findings)
        else:
            raise BadRequest(
                f"{path}: expected a storage directory with {CONTROL_NAME}, the directory of "
                "a partition, or a .seg file"
            )
    return VerificationResult(path, logs, findings, time.perf_counter() - began)


def _verify_storage(
    directory: Path, partitions: list[int] | None, findings: VerificationFindings
) -> dict[int, FoundLog]:
    control = read_control(directory / CONTROL_NAME)
    check_control(control, findings)
    here = partitions_in(directory)
    has_slots = any((directory / str(number) / SLOTS_NAME).exists() for number in here)
    check_id(directory, findings, has_slots=has_slots)
    if control is not None and partitions is None:
        _check_assignment(control, here, findings)
    logs = {}
    for number in chosen_partitions(directory, partitions):
        logs[number] = _verify_one(directory, number, control, findings)
    return logs


def _check_assignment(control: Control, here: list[int], findings: VerificationFindings) -> None:
    for number, entry in enumerate(control.entries):
        if is_assigned(entry) and number not in here:
            session = -1 if entry.info is None else entry.info.session
            findings.in_file(str(number)).add_finding(
                None,
                f"the directory is missing, but partition {number} is assigned to the "
                f"storage and had session {session}",
                is_wrong=session >= 0,  # before the first session there may be no files yet
            )
    for number in here:
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
    control = read_control(parent / CONTROL_NAME)
    return {number: _verify_one(parent, number, control, findings)}


def _verify_one(
    directory: Path, number: int, control: Control | None, findings: VerificationFindings
) -> FoundLog:
    expected = expected_log(directory, number, control, findings)
    seen = verify_log(directory / str(number), expected, findings)
    entry = None
    if control is not None and number < len(control.entries):
        entry = control.entries[number]
    compare_log(expected, entry, seen, findings)
    return seen
