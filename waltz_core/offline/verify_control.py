"""Verifies the files of a storage outside its logs: control file, slots and storage ID.

These files state what the logs must contain. So they are read first, and compared with the logs
afterwards.

Rules:
    1. Each partition has two structures in the control file, and two slots in its own file. A wrong
       structure or slot is reported. The check then uses the valid one of the two, as a start of
       the storage does.
    2. This version writes the structure in the 0.13 control file after the slot. So after a crash,
       the structure may be older than the slot. The structure's marks may be higher than those of
       the slot, because a truncation does not lower the structure's marks. Only two signs show that
       Waltz 0.13 has written the structure: its sequence is greater than the sequence that the slot
       states, or its session is later than the slot's session. If the slot has no session, the
       structure's session is no sign: the log was begun again after the structure was written.
    3. After a clean stop, the acked marker is at the end of the log. After any other stop, the log
       may be longer.
    4. Records may have no batches until the next start of the storage. In this state, the acked
       marker contains the special value `UNBATCHED_CHAIN` instead of a chain hash. There are two
       causes: an owner leaves records of Waltz 0.13 in this state, and an earlier version of the
       storage left records of 0.13 servers in this state. The session of a 0.13 server has no
       nonce, and the low-water mark of such a session may be above the end of the log.
"""

from pathlib import Path
from typing import NamedTuple

from waltz_core.offline.file_findings import FileFindings, VerificationFindings
from waltz_core.offline.files import read_all
from waltz_core.offline.layout import (
    ASSIGNED,
    CONTROL_ENTRY_BYTES,
    CONTROL_FILE_NAME,
    CONTROL_HEADER_BYTES,
    ID_NAME,
    INFO_BYTES,
    PROVISIONAL,
    SLOT_BLOCK_BYTES,
    SLOT_BYTES,
    SLOTS_FILE_NAME,
    TRUNCATE,
    UNBATCHED_CHAIN,
    ControlEntry,
    ControlFileHeader,
    ControlInfo,
    ControlSlot,
    current_slot,
    decode_control_entry,
    decode_control_header,
    decode_control_slot,
    decode_storage_id,
)
from waltz_core.offline.verify_log import has_batches
from waltz_core.offline.verify_segment import ExpectedLog, FoundLog


class DecodedControlFile(NamedTuple):
    """The decoded control file, and its size in bytes."""

    header: ControlFileHeader
    entries: tuple[ControlEntry, ...]
    size: int


def read_control(path: Path) -> DecodedControlFile | None:
    """Read and decode a control file; return None if it does not exist."""
    data = read_all(path)
    if data is None:
        return None
    header = decode_control_header(data[:CONTROL_HEADER_BYTES])
    entry_count = (len(data) - CONTROL_HEADER_BYTES) // CONTROL_ENTRY_BYTES
    entries = []
    for position in range(max(0, min(header.partition_count, entry_count))):
        offset = CONTROL_HEADER_BYTES + CONTROL_ENTRY_BYTES * position
        entries.append(decode_control_entry(data[offset : offset + CONTROL_ENTRY_BYTES], position))
    return DecodedControlFile(header, tuple(entries), len(data))


def read_slots(path: Path) -> tuple[ControlSlot, ControlSlot] | None:
    """Read and decode the two slots of a partition; return None if the file does not exist."""
    data = read_all(path)
    if data is None:
        return None
    return decode_control_slot(data[:SLOT_BYTES], 0), decode_control_slot(
        data[SLOT_BLOCK_BYTES:][:SLOT_BYTES], 1
    )


# ---------------------------------------------------------------------------------------------
# the storage


def check_control_file(control: DecodedControlFile | None, findings: VerificationFindings) -> None:
    """Report the errors of the control file."""
    report = findings.in_file(CONTROL_FILE_NAME)
    if control is None:
        report.add_error(None, "the file is missing; without it the storage does not start")
        return
    header = control.header
    if header.errors:
        report.add_error(0, f"header: {'; '.join(header.errors)}; the storage does not start")
    expected = CONTROL_HEADER_BYTES + CONTROL_ENTRY_BYTES * header.partition_count
    if header.partition_count >= 0 and control.size != expected:
        report.add_error(
            min(control.size, expected),
            f"expected {expected} bytes, for {header.partition_count} partitions, found "
            f"{control.size}",
        )
    for position, entry in enumerate(control.entries):
        entry_offset = CONTROL_HEADER_BYTES + CONTROL_ENTRY_BYTES * position
        for error in entry.errors:
            report.add_error(entry_offset, f"partition {position}: {error}")
        for number, info in enumerate(entry.infos):
            if info.errors:
                offset = entry_offset + 4 + INFO_BYTES * number
                what = "; ".join(info.errors)
                report.add_error(
                    offset, f"partition {position}, copy {number + 1} of its structure: {what}"
                )


def check_storage_id(directory: Path, findings: VerificationFindings, *, has_slots: bool) -> None:
    """Report the errors of `waltz-x.id`; a directory of Waltz 0.13 has no such file."""
    report = findings.in_file(ID_NAME)
    data = read_all(directory / ID_NAME)
    if data is None:
        if has_slots:
            report.add_error(None, "the file is missing, so the storage ID is unknown")
        return
    errors = decode_storage_id(data)[1]
    if errors:
        report.add_error(0, f"{'; '.join(errors)}; the storage does not start")


# ---------------------------------------------------------------------------------------------
# a partition, before its log is read


def expected_log(
    directory: Path, number: int, control: DecodedControlFile | None, findings: VerificationFindings
) -> ExpectedLog:
    """Return the facts about a log that the control files state, and report their errors."""
    report = findings.in_file(f"{number}/{SLOTS_FILE_NAME}")
    slots = read_slots(directory / str(number) / SLOTS_FILE_NAME)
    _check_slot_blocks(directory / str(number) / SLOTS_FILE_NAME, report)
    if slots is None and has_batches(directory / str(number)):
        report.add_error(
            None,
            "the file is missing, although there are batches; it contained the promised session",
        )
    elif slots is None:
        report.add_note(None, "the file is missing: only Waltz 0.13 has written to this directory")
    current = None if slots is None else _check_slots(slots, number, report)
    cluster_key = None
    info: ControlInfo | None = None
    if control is not None and not control.header.errors:
        cluster_key = control.header.cluster_key
        info = control.entries[number].info if number < len(control.entries) else None
    if current is None:
        durable = -1 if info is None else info.local_low_water_mark
        return ExpectedLog(number, cluster_key, None, gets_batches=False, last_synced_id=durable)
    # The slot is written before the structure, and states the sequence that the structure will
    # have. After a crash, the structure may have a lower sequence. So only a greater sequence or a
    # later session proves a write of 0.13 (rule 2).
    has_legacy_writes = info is not None and (
        info.sequence > current.control_file_sequence or -1 < current.last_session < info.session
    )
    gets_batches = has_legacy_writes or _is_unbatched(current)
    durable = current.acked
    if has_legacy_writes:
        assert info is not None
        durable = info.local_low_water_mark
    if current.flags & TRUNCATE:
        durable = min(durable, current.truncate_to)
    ends = frozenset(
        {current.start, current.acked, current.low_water_mark, current.provisional_mark}
    )
    return ExpectedLog(
        number,
        cluster_key,
        current,
        gets_batches=gets_batches,
        last_synced_id=durable,
        batch_ends=ends,
    )


def _check_slot_blocks(path: Path, report: FileFindings) -> None:
    """Report nonzero bytes after each slot in its block, and a wrong size of the file."""
    data = read_all(path)
    if data is None:
        return
    expected = 2 * SLOT_BLOCK_BYTES
    if len(data) != expected:
        report.add_error(min(len(data), expected), f"expected {expected} bytes, found {len(data)}")
    for block in (0, SLOT_BLOCK_BYTES):
        rest = data[block + SLOT_BYTES : block + SLOT_BLOCK_BYTES]
        if any(rest):
            position = len(rest) - len(rest.lstrip(b"\0"))
            offset = block + SLOT_BYTES + position
            report.add_error(offset, f"expected zeros after the slot, found {rest[position]:#04x}")


def _check_slots(
    slots: tuple[ControlSlot, ControlSlot], number: int, report: FileFindings
) -> ControlSlot | None:
    for position, slot in enumerate(slots):
        offset = SLOT_BLOCK_BYTES * position
        if slot.errors:
            report.add_error(offset, f"slot {position}: {'; '.join(slot.errors)}")
        elif slot.partition != number:
            report.add_error(
                offset, f"slot {position}: expected partition {number}, found {slot.partition}"
            )
    current = current_slot(slots, number)
    valid_slots = [slot for slot in slots if not slot.errors and slot.partition == number]
    if current is None:
        report.add_error(None, "no control slot is valid; the storage cannot open the partition")
    elif len(valid_slots) == 1:
        report.add_error(
            None,
            "only one control slot is valid; the other slot may have had a later promised session",
        )
    elif abs(slots[0].sequence - slots[1].sequence) != 1:
        report.add_error(
            None,
            "expected consecutive sequence numbers in the two slots, found "
            f"{slots[0].sequence} and {slots[1].sequence}",
        )
    return current


# ---------------------------------------------------------------------------------------------
# a partition, after its log was read


def compare_log_with_control_files(
    expected: ExpectedLog,
    entry: ControlEntry | None,
    found_log: FoundLog,
    findings: VerificationFindings,
) -> None:
    """Report differences between the log and the control files."""
    info = entry.info if entry is not None else None
    control_report = findings.in_file(CONTROL_FILE_NAME)
    is_unbatched = expected.slot is not None and _is_unbatched(expected.slot)
    is_of_old_format = expected.slot is None or (expected.gets_batches and not is_unbatched)
    if is_of_old_format and info is not None and info.local_low_water_mark > found_log.last:
        control_report.add_error(
            None,
            f"partition {expected.partition}: the log ends at transaction {found_log.last}, below "
            f"its low-water mark {info.local_low_water_mark}",
        )
    if expected.slot is None:
        return
    report = findings.in_file(f"{expected.partition}/{SLOTS_FILE_NAME}")
    if is_unbatched:
        report.add_note(
            None,
            "some records belong to no batch; the next start of the storage creates batches for "
            "them",
        )
    elif expected.gets_batches:
        report.add_note(
            None,
            "Waltz 0.13 was the last version to write to this log; the next start of the storage "
            "adopts the records",
        )
    elif info is not None and info.session != expected.slot.last_session:
        control_report.add_note(
            None,
            f"partition {expected.partition}: expected session {expected.slot.last_session}, "
            f"as in the control slot, found {info.session}",
        )
    _compare_marks(expected, expected.slot, found_log, report)
    _compare_damage(expected.slot, found_log, report)
    _note_state(expected.slot, report)


def _compare_marks(
    expected: ExpectedLog, slot: ControlSlot, found_log: FoundLog, report: FileFindings
) -> None:
    marks = [("low-water mark", slot.low_water_mark)]
    # Waltz 0.13 sets its mark before it has completed the log (rule 4).
    if slot.flags & PROVISIONAL and any(slot.nonce) and slot.provisional_session >= 0:
        marks.append(("provisional low-water mark", slot.provisional_mark))
    if not expected.gets_batches or _is_unbatched(slot):
        marks.append(("acked ID", slot.acked))
    for what, mark in marks:
        if mark > found_log.last:
            report.add_error(
                None, f"the log ends at transaction {found_log.last}, below its {what} {mark}"
            )
    found_start_chain = found_log.chains_by_id.get(slot.start, slot.start_chain)
    if found_start_chain != slot.start_chain:
        report.add_error(
            None,
            f"the log begins after transaction {slot.start}: expected chain hash "
            f"{slot.start_chain.hex()} there, found {found_start_chain.hex()}",
        )
    if expected.gets_batches or slot.flags & TRUNCATE or slot.acked > found_log.last:
        return
    found_chain = found_log.chains_by_id.get(slot.acked)
    if found_chain != slot.acked_chain:
        found_text = found_chain.hex() if found_chain is not None else "no batch that ends there"
        report.add_error(
            None,
            f"the acked marker is at transaction {slot.acked}: expected chain hash "
            f"{slot.acked_chain.hex()} there, found {found_text}",
        )
    if not slot.is_dirty and slot.acked < found_log.last:
        report.add_error(
            None,
            f"the log was closed with its acked marker at transaction {slot.acked}, but it "
            f"continues to {found_log.last}",
        )


def _is_unbatched(slot: ControlSlot) -> bool:
    """Return whether records may have no batches (rule 4)."""
    return slot.acked_chain == UNBATCHED_CHAIN


def _compare_damage(slot: ControlSlot, found_log: FoundLog, report: FileFindings) -> None:
    for first, last in slot.damaged:
        if last > found_log.last:
            report.add_error(
                None,
                f"records {first}..{last} are listed as damaged, but the log ends at transaction "
                f"{found_log.last}",
            )
        elif not any(low <= last and first <= high for low, high in found_log.unreadable):
            report.add_note(
                None,
                f"records {first}..{last} are listed as damaged, but all of them can be read "
                "and have valid CRCs",
            )


def _note_state(slot: ControlSlot, report: FileFindings) -> None:
    if slot.is_dirty:
        report.add_note(
            None,
            "the log was not closed properly; it is known to be synced up to transaction "
            f"{slot.acked}",
        )
    if slot.is_suspect:
        report.add_note(None, "the replica is suspect: its log is not trusted until it is repaired")
    if slot.flags & TRUNCATE:
        report.add_note(
            None,
            f"a truncation after transaction {slot.truncate_to} was started; the next start of "
            "the storage completes it",
        )


def is_assigned(entry: ControlEntry | None) -> bool:
    """Return whether the storage holds a partition, according to the control file."""
    info = entry.info if entry is not None else None
    return info is not None and bool(info.flags & ASSIGNED)
